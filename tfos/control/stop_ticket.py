"""Stop ticket: what lets another process of the same user stop the stream that trains a cluster.

Covers: what is in it, in the user's cache directory; asking the driver by it.
Does not: write and read files (tfos.control.ticket_files), stop anything (tfos.streaming.dstream
does, at the driver).
Runs in: the driver, which writes it; a command of the user, which reads it.      Threads: any.

The key proves one right alone: to ask for the stop of streams. No other user can read it.
"""

from __future__ import annotations

from pathlib import Path

from rpc.auth.certificates import TlsCredentials
from rpc.endpoint import bracketed
from rpc.jit.cache_directory import user_cache
from rpc.process_id import ProcessId
from tfos.control import ticket_files
from tfos.control.client import ControlClient
from tfos.control.identity import STOPPER_NAME
from tfos.errors import ControlError, ControlRefused, SettingsError
from tfos.failure import NodeId

_ASK_S = 10.0


class StopTicket(ProcessId, frozen=True, kw_only=True):
    """The right to stop the streams of one cluster."""

    cluster_id: str
    cert_pem: bytes
    key_pem: bytes
    ca_pem: bytes

    def __repr__(self) -> str:
        return f"StopTicket({self.cluster_id!r})"


def write(cluster_id: str, port: int, credentials: TlsCredentials) -> Path:
    """Write the ticket of a cluster and return its file.

    Args:
        cluster_id: of the cluster.
        port: of its control server.
        credentials: of the authority's node STOPPER_NAME.

    Raises:
        OSError: the directory cannot be made, or is not the user's alone.
    """
    directory = _directory()
    ticket_files.remove_ended(directory, "*-*", StopTicket)  # keys of drivers that were killed
    path = directory / f"{port}-{cluster_id}"
    ticket = StopTicket.of_this(
        cluster_id=cluster_id,
        cert_pem=credentials.cert_pem,
        key_pem=credentials.key_pem,
        ca_pem=credentials.ca_pem,
    )
    ticket_files.write(path, ticket)
    return path


def ask_stop(host: str, port: int) -> None:
    """Ask the driver that listens there to stop its cluster's streams.

    Args:
        host: of the driver.
        port: of its control server.

    Raises:
        SettingsError: this user has no ticket for such a cluster.
        ControlError: the driver does not answer, or refuses.
    """
    refused: ControlError | None = None
    for ticket in ticket_files.read(_directory(), f"{port}-*", StopTicket, with_others=True):
        credentials = TlsCredentials(ticket.cert_pem, ticket.key_pem, ticket.ca_pem)
        client = ControlClient(
            f"{bracketed(host)}:{port}", ticket.cluster_id, NodeId(STOPPER_NAME, 0), credentials
        )
        try:
            client.ask_stop(timeout_s=_ASK_S)
        except ControlRefused as error:
            refused = error
        except ControlError as error:
            refused = refused or error
        else:
            return
        finally:
            client.close()
    if refused is not None:
        raise refused
    raise SettingsError(
        f"no cluster of this user trains a stream at {host}:{port}: there is no ticket for it in "
        f"{_directory()}. Ask as the user, and with the home directory, of the driver; its line "
        "'the stream can be stopped' has host and port"
    )


def _directory() -> Path:
    cache = user_cache()
    if cache is None:
        raise SettingsError("this user has no home directory for tickets; set XDG_CACHE_HOME")
    return cache / "tfos" / "streams"
