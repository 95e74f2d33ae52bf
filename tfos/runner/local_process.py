"""Process of a rank beside the driver: listens, learns the others' addresses, calls the function.

Covers: the messages with the driver, the rank's value or error.
Does not: start processes (local_run).
Runs in: a process of its own, which dies with the driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading

import cloudpickle
import msgspec

from rpc.auth.handshake import Credentials, Identity, Role
from rpc.endpoint import Endpoint
from rpc.server.listener import Listener
from tfos.collectives.group import RankGroup, RankPeer
from tfos.collectives.offers import Offers
from tfos.errors import LinkError
from tfos.node import failure, whole_files
from tfos.node.child_link import ChildLink
from tfos.node.process_exit import forks_end
from tfos.runner import ranks
from tfos.runner.rank_process import RankWork
from tfos.spark.pickling import pickle_value

_LAST_ANSWERS_S = 5.0
_RAISED_EXIT_S = 1.0
"""Seconds for the threads and exit handlers of a function that has raised."""
_RETURNED_EXIT_S = 5.0
"""Seconds for those of a function that has returned, as on executors."""


class LocalRank(msgspec.Struct, frozen=True, array_like=True):
    """What the process receives at start, in a memfd."""

    rank: int
    run_id: str
    secret: bytes
    directory: str
    """Directory of its Unix socket."""
    work: bytes
    """cloudpickle of RankWork."""
    link_fd: int = -1
    outcome_fd: int = -1
    """memfd that takes the RankOutcome."""

    def __repr__(self) -> str:
        return f"LocalRank({self.rank}, {self.run_id!r})"


class RankListening(msgspec.Struct, frozen=True):
    """Address of this rank."""

    endpoint: Endpoint


class RankAddresses(msgspec.Struct, frozen=True):
    """Addresses of all ranks."""

    endpoints: tuple[Endpoint, ...]


class RankOutcome(msgspec.Struct, frozen=True, array_like=True):
    """How the function ended: its value or its error; neither after sys.exit(0)."""

    value: bytes = b""
    error_type: str = ""
    message: str = ""
    traceback: str = ""


def main(body: bytes) -> None:
    """Run the rank that this document describes."""
    spec = msgspec.msgpack.decode(body, type=LocalRank)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver's Ctrl-C ends it through the driver
    offers = Offers(spec.rank)
    credentials = Credentials(spec.run_id, spec.secret)
    identity = Identity(Role.WORKER, spec.rank)
    listener = Listener(
        offers.handle,
        credentials,
        identity,
        on_connect=offers.connected,
        on_disconnect=offers.disconnected,
    )
    try:
        listener.bind_unix(spec.directory)
        listener.start()
        work = cloudpickle.loads(spec.work)
        peers = _peers(spec, listener.endpoint)
        group = RankGroup(identity, credentials, offers, peers)
        outcome = RankOutcome(_value(spec, work, group))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the driver must read it
        name = failure.type_name(error)
        text = failure.user_traceback(error, frozenset({__file__, cloudpickle.__file__}))
        outcome = RankOutcome(error_type=name, message=failure.text_of(error), traceback=text)
    leave_outcome(spec.outcome_fd, outcome)
    offers.end("has ended")
    listener.finish_calls(_LAST_ANSWERS_S)
    listener.close()
    limit_s = _RAISED_EXIT_S if outcome.error_type else _RETURNED_EXIT_S
    last = threading.Timer(limit_s, _end, (spec.rank, outcome))  # nothing else ends its threads
    last.daemon = True
    last.start()


def _end(rank: int, outcome: RankOutcome) -> None:
    """End this process whatever still runs."""
    here = (threading.main_thread(), threading.current_thread())
    late = [each for each in threading.enumerate() if not each.daemon and each not in here]
    if not outcome.error_type:
        names = ", ".join(each.name for each in late)
        what = f"threads ({names})" if late else "exit handlers"
        with contextlib.suppress(Exception):  # the function may have closed or replaced it
            sys.stderr.write(
                f"rank {rank} has returned, and its {what} go on: it ends without them\n"
            )
    os._exit(1 if outcome.error_type else 0)


def leave_outcome(outcome_fd: int, outcome: RankOutcome) -> None:
    """Write the outcome for the driver.

    Args:
        outcome_fd: memfd that takes it.
        outcome: what to write.
    """
    whole_files.replace(outcome_fd, msgspec.msgpack.encode(outcome))


def _value(spec: LocalRank, work: RankWork, group: RankGroup) -> bytes:
    with ranks.entered(group, spec.rank):
        try:
            with forks_end():
                value = work()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
            return b""
        return pickle_value(value, f"rank {spec.rank}")


def _peers(spec: LocalRank, endpoint: Endpoint) -> dict[int, RankPeer]:
    sock = socket.socket(fileno=spec.link_fd)
    with contextlib.closing(ChildLink[RankAddresses](sock, RankAddresses)) as link:
        link.send(RankListening(endpoint))
        found = link.receive()
    if found is None:
        raise LinkError("the driver ended before all ranks had begun")
    return {
        rank: RankPeer(Identity(Role.WORKER, rank), each)
        for rank, each in enumerate(found.endpoints)
        if rank != spec.rank
    }
