"""Ticket of a driver: what lets its user's other processes look at its job, save and stop it.

Covers: what is in it; its directory, of the user's login; a second one, in the user's cache, for
clusters that train or answer a DStream: another host with the same home may stop the stream;
removing those of drivers that have ended.
Does not: ask the driver (tfos.watch.operator).
Runs in: the driver, which writes it; a command of the user, which reads it.      Threads: any.

The key proves one right: to ask as the operator, or to end the streams. A file has mode 0600, its
directory belongs to the user alone, and both are checked when it is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import msgspec

from rpc.jit.cache_directory import made_private, real_path, user_cache, why_unsafe
from rpc.process_id import ProcessId
from tfos.errors import SettingsError

RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
LOGINS = "/run/user"
"""Where systemd makes the runtime directories of logins, by user id."""
_IN_CACHE = Path("tfos", "drivers")
_SUFFIX = ".ticket"
_MOST_BYTES = 64 << 10


class DriverTicket(ProcessId, frozen=True, kw_only=True):
    """The way to one job's driver."""

    cluster_id: str
    name: str
    application_id: str
    started_at: float
    """Unix seconds."""
    address: str
    """Address of the control server."""
    page_url: str = ""
    cert_pem: bytes
    key_pem: bytes
    ca_pem: bytes

    def __repr__(self) -> str:
        return f"DriverTicket({self.cluster_id!r})"


def write(ticket: DriverTicket, directory: Path | None = None) -> Path:
    """Write a ticket, instead of one of the same cluster; return its path without links.

    Args:
        ticket: ticket of this process.
        directory: where to write it; None: `directory_of_tickets`.

    Raises:
        SettingsError: this user has no directory of its own.
        OSError: the directory cannot be made, or is not the user's alone.
    """
    directory = directory or directory_of_tickets()
    with contextlib.suppress(SettingsError):  # an unsafe directory stays as it is
        _read_in(directory)  # removes those of killed drivers
    path = made_private(directory) / f"{ticket.cluster_id}{_SUFFIX}"
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb") as file:
        file.write(msgspec.msgpack.encode(ticket))
    return path


def read_all() -> list[DriverTicket]:
    """Return the tickets of this user's running drivers on this host, the oldest first.

    Those of drivers that have ended are removed.

    Raises:
        SettingsError: this user has no directory of its own, or others can change the first one.
    """
    first, *others = directories_of_tickets()
    found = _read_in(first)
    for other in others:
        with contextlib.suppress(SettingsError, OSError):  # unsafe files there are no loss
            found += _read_in(other)
    return sorted(found, key=lambda each: each.started_at)


def read_streams(port: int) -> list[DriverTicket]:
    """Return the tickets of this user's clusters that read a DStream and listen at this port.

    Those of this host come first; whether drivers of other hosts have ended cannot be told.

    Raises:
        SettingsError: this user has no directory of its own, or others can change it.
    """
    found = _read_in(directory_of_streams(), with_others=True)
    return [each for each in found if each.address.rpartition(":")[2] == str(port)]


def directory_of_streams() -> Path:
    """Return the user's directory of tickets of clusters that read a DStream.

    Raises:
        SettingsError: this user has no home directory.
    """
    cache = user_cache()
    if cache is None:
        raise SettingsError("this user has no home directory for tickets; set XDG_CACHE_HOME")
    return cache / "tfos" / "streams"


def directories_of_tickets() -> list[Path]:
    """Return where tickets of drivers are looked for: `directory_of_tickets` comes first.

    A driver under cron or nohup, or behind sudo, may have another runtime directory or none.

    Raises:
        SettingsError: this user has no directory of its own.
    """
    places = [directory_of_tickets(), Path(LOGINS, str(os.geteuid()), "tfos")]
    if (runtime := Path(os.environ.get(RUNTIME_VARIABLE, ""))).is_absolute():
        places.append(runtime / "tfos")
    if (cache := user_cache()) is not None:
        places.append(cache / _IN_CACHE)
    return list(dict.fromkeys(map(real_path, places)))


def directory_of_tickets() -> Path:
    """Return the user's directory of tickets: that of this login, or else the user's cache.

    Raises:
        SettingsError: there is neither.
    """
    runtime = Path(os.environ.get(RUNTIME_VARIABLE, ""))
    # After su it may be root's, which why_unsafe trusts.
    is_ours = runtime.is_absolute() and os.access(runtime, os.W_OK | os.X_OK)
    if is_ours and not why_unsafe(real_path(runtime)):
        return runtime / "tfos"
    cache = user_cache()
    if cache is None:
        raise SettingsError(
            f"this user has no directory for tickets of drivers; set {RUNTIME_VARIABLE} to a "
            "directory of its own, mode 0700"
        )
    return cache / _IN_CACHE


def _read_in(directory: Path, *, with_others: bool = False) -> list[DriverTicket]:
    """Return the tickets of running drivers; those of drivers that have ended are removed.

    Args:
        directory: directory of the tickets.
        with_others: also those of other hosts or containers, after this host's: a shared home has
            them, and whether they have ended cannot be told.

    Raises:
        SettingsError: others can change the directory.
    """
    directory = real_path(directory)
    if not directory.exists():
        return []
    if reason := why_unsafe(directory):
        raise SettingsError(f"{directory} is not read: {reason}")
    mine: list[DriverTicket] = []
    others: list[DriverTicket] = []
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        ticket = _read(path)
        if ticket is None:
            continue
        has_ended = ticket.has_ended()
        if has_ended:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            (mine if has_ended is False else others).append(ticket)
    return [*mine, *others] if with_others else mine


def _read(path: Path) -> DriverTicket | None:
    """Return what a file holds; None unless it is a ticket that this user alone could write."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o077:
                return None
            body = file.read(_MOST_BYTES)
        return msgspec.msgpack.decode(body, type=DriverTicket)
    except (OSError, msgspec.MsgspecError):
        return None
