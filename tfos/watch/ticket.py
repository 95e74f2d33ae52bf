"""Ticket of a driver: what lets its user's other processes look at its job, save and stop it.

Covers: the file with address and key, in the user's runtime directory; reading all of them, those
of dead drivers left out.
Does not: ask the driver (tfos.watch.operator).
Runs in: the driver, which writes it; a command of the user, which reads it.      Threads: any.

The key proves one right: to ask as the operator. The file has mode 0600, its directory belongs to
the user alone, and both are checked again when it is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from rpc.jit.cache_directory import user_cache, why_unsafe
from rpc.process_id import ProcessId
from tfos.errors import SettingsError

MOST_BYTES = 64 << 10
RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"


class DriverTicket(ProcessId, frozen=True, kw_only=True):
    """The way to one job's driver."""

    cluster_id: str
    name: str
    application_id: str
    started_at: float
    """Unix seconds."""
    address: str
    """Of the control server."""
    page_url: str = ""
    cert_pem: bytes
    key_pem: bytes
    ca_pem: bytes

    def __repr__(self) -> str:
        return f"DriverTicket({self.cluster_id!r})"


def write(ticket: DriverTicket) -> Path:
    """Write a ticket and return its file.

    Raises:
        SettingsError: this user has no directory of its own.
        OSError: the directory cannot be made, or is not the user's alone.
    """
    directory = directory_of_tickets()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := why_unsafe(directory, (os.geteuid(), 0)):
        raise OSError(f"{directory} is not used: {reason}")
    path = directory / f"{ticket.cluster_id}.ticket"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb") as file:
        file.write(msgspec.msgpack.encode(ticket))
    return path


def read_all() -> list[DriverTicket]:
    """Return the tickets of this user's running drivers on this host, the oldest first.

    Those of drivers that have ended are removed.

    Raises:
        SettingsError: this user has no directory of its own, or others can change it.
    """
    directory = directory_of_tickets()
    if not directory.exists():
        return []
    if reason := why_unsafe(directory, (os.geteuid(), 0)):
        raise SettingsError(f"{directory} is not read: {reason}")
    found = []
    for path in directory.glob("*.ticket"):
        ticket = _read(path)
        if ticket is None:
            continue
        has_ended = ticket.has_ended()
        if has_ended:
            with contextlib.suppress(OSError):
                path.unlink()
        elif has_ended is False:  # None: of another host or container, on a shared directory
            found.append(ticket)
    return sorted(found, key=lambda each: each.started_at)


def directory_of_tickets() -> Path:
    """Return the user's directory of tickets: of this login, or else in the user's cache.

    Raises:
        SettingsError: there is neither.
    """
    runtime = Path(os.environ.get(RUNTIME_VARIABLE, ""))
    if runtime.is_absolute() and not why_unsafe(runtime, (os.geteuid(), 0)):
        return runtime / "tfos"
    cache = user_cache()
    if cache is None:
        raise SettingsError(
            f"this user has no directory for tickets of drivers; set {RUNTIME_VARIABLE} to a "
            "directory of its own, mode 0700"
        )
    return cache / "tfos" / "drivers"


def _read(path: Path) -> DriverTicket | None:
    """Return what a file holds; None unless it is a ticket that this user alone could write."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o077:
                return None
            body = file.read(MOST_BYTES)
        return msgspec.msgpack.decode(body, type=DriverTicket)
    except (OSError, msgspec.MsgspecError):
        return None
