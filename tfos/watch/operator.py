"""Operator: another process of the driver's user, which looks at a job, saves and stops it.

Covers: choosing a job among the running ones, asking its driver; ending the streams of a cluster
by its address.
Does not: show the answers (tfos.cli.jobs), answer them (tfos.watch.job).
Runs in: a command of the user, on the driver's host, or for streams one with its home directory.
Threads: one.
"""

from __future__ import annotations

import msgspec

from rpc.auth.certificates import TlsCredentials
from rpc.endpoint import bracketed
from tfos.control import messages
from tfos.control.client import ControlClient
from tfos.control.identity import OPERATOR_NAME
from tfos.errors import ControlError, ControlRefused, SettingsError
from tfos.failure import NodeId
from tfos.watch.job import SAVE_S
from tfos.watch.snapshot import Json
from tfos.watch.ticket import (
    DriverTicket,
    directories_of_tickets,
    directory_of_streams,
    read_streams,
)

_ASK_S = 10.0
_SLOW_S = SAVE_S + _ASK_S


def choose(tickets: list[DriverTicket], wanted: str) -> DriverTicket:
    """Return the one job that is meant.

    Args:
        tickets: tickets of the running jobs.
        wanted: the beginning of a cluster's id, or the id or name of a Spark application; empty:
            the only job.

    Raises:
        SettingsError: there is no such job, or several; the text lists them.
    """
    if not tickets:
        raise SettingsError(
            "no job of this user runs on this host: there is no ticket of one in "
            f"{' or '.join(map(str, directories_of_tickets()))}. Ask on the driver's host, as its "
            "user; `tfos history` has the runs that have ended"
        )
    fitting = [each for each in tickets if not wanted or _fits(each, wanted)]
    if len(fitting) == 1:
        return fitting[0]
    listed = "; ".join(f"{e.cluster_id} ({e.name}, {e.application_id})" for e in fitting or tickets)
    if not fitting:
        raise SettingsError(f"no running job matches {wanted!r}; there are {listed}")
    fit = f"{len(fitting)} running jobs match {wanted!r}" if wanted else f"{len(fitting)} jobs run"
    raise SettingsError(f"{fit}: choose one with --job ID: {listed}")


def end_streams(host: str, port: int) -> None:
    """Ask the driver that listens there to end its cluster's streams.

    Args:
        host: the driver's host.
        port: port of its control server.

    Raises:
        SettingsError: this user has no ticket for such a cluster.
        ControlError: the driver does not answer, or refuses.
    """
    refused: ControlError | None = None
    for ticket in read_streams(port):
        there = msgspec.structs.replace(ticket, address=f"{bracketed(host)}:{port}")
        with Operator(there) as operator:
            try:
                operator.ask(messages.Ask("end_streams"))
            except ControlRefused as error:
                refused = error
            except ControlError as error:
                refused = refused or error
            else:
                return
    if refused is not None:
        raise refused
    raise SettingsError(
        f"no cluster of this user reads a stream at {host}:{port}: there is no ticket for it in "
        f"{directory_of_streams()}. Ask as the user, and with the home directory, of the driver; "
        "its line 'the stream can be stopped' has host and port"
    )


def _fits(ticket: DriverTicket, wanted: str) -> bool:
    return wanted in (ticket.name, ticket.application_id) or ticket.cluster_id.startswith(wanted)


class Operator:
    """A connection to one job's driver; a context manager.

    Args:
        ticket: the driver's ticket.
    """

    def __init__(self, ticket: DriverTicket) -> None:
        self._client = ControlClient(
            ticket.address,
            ticket.cluster_id,
            NodeId(OPERATOR_NAME, 0),
            TlsCredentials(ticket.cert_pem, ticket.key_pem, ticket.ca_pem),
        )

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def ask(self, ask: messages.Ask) -> Json:
        """Return the driver's answer; see tfos.watch.job.

        Raises:
            ControlError: the driver does not answer, or refuses.
        """
        timeout_s = _SLOW_S if ask.what == "save" else _ASK_S
        answer: Json = msgspec.json.decode(self._client.ask(ask, timeout_s=timeout_s), type=Json)
        return answer
