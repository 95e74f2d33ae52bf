"""Stop ticket: what lets another process of the same user stop the stream that trains a cluster.

Covers: the file with the key, in the user's cache directory; asking the driver by it.
Does not: stop anything (tfos.streaming.dstream does, at the driver).
Runs in: the driver, which writes it; a command of the user, which reads it.      Threads: any.

The key proves one right alone: to ask for the stop of streams. No other user can read it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from rpc.auth.certificates import TlsCredentials
from rpc.endpoint import bracketed
from rpc.jit.cache_directory import user_cache, why_unsafe
from tfos.control.client import ControlClient
from tfos.control.identity import STOPPER_NAME
from tfos.errors import ControlError, ControlRefused, SettingsError
from tfos.failure import NodeId

_ASK_S = 10.0


class StopTicket(msgspec.Struct, frozen=True):
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
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := why_unsafe(directory, (os.geteuid(), 0)):
        raise OSError(f"{directory} is not used: {reason}")
    path = directory / f"{port}-{cluster_id}"
    ticket = StopTicket(cluster_id, credentials.cert_pem, credentials.key_pem, credentials.ca_pem)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb") as file:
        file.write(msgspec.msgpack.encode(ticket))
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
    for path in sorted(_directory().glob(f"{port}-*")):
        try:
            ticket = msgspec.msgpack.decode(path.read_bytes(), type=StopTicket)
        except (OSError, msgspec.MsgspecError):
            continue
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
