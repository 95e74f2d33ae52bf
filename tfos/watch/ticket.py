"""Ticket of a driver: what lets its user's other processes look at its job, save and stop it.

Covers: what is in it; its directory, of the user's login; a second one, in the user's cache, for
clusters that train or answer a DStream: another host with the same home may stop the stream.
Does not: write and read files (tfos.watch.ticket_files), ask the driver (tfos.watch.operator).
Runs in: the driver, which writes it; a command of the user, which reads it.      Threads: any.

The key proves one right: to ask as the operator, or to end the streams.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rpc.jit.cache_directory import real_path, user_cache, why_unsafe
from rpc.process_id import ProcessId
from tfos.errors import SettingsError
from tfos.watch import ticket_files

RUNTIME_VARIABLE = "XDG_RUNTIME_DIR"
LOGINS = "/run/user"
"""Where systemd makes the runtime directories of logins, by user id."""
_IN_CACHE = Path("tfos", "drivers")
_SUFFIX = ".ticket"
_PATTERN = f"*{_SUFFIX}"


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
    """Write a ticket and return its file.

    Args:
        ticket: ticket of this process.
        directory: where to write it; None: `directory_of_tickets`.

    Raises:
        SettingsError: this user has no directory of its own.
        OSError: the directory cannot be made, or is not the user's alone.
    """
    path = (directory or directory_of_tickets()) / f"{ticket.cluster_id}{_SUFFIX}"
    with contextlib.suppress(SettingsError):  # an unsafe directory stays as it is
        ticket_files.read(path.parent, _PATTERN, DriverTicket)  # removes those of killed drivers
    return ticket_files.write(path, ticket)


def read_all() -> list[DriverTicket]:
    """Return the tickets of this user's running drivers on this host, the oldest first.

    Those of drivers that have ended are removed.

    Raises:
        SettingsError: this user has no directory of its own, or others can change the first one.
    """
    first, *others = directories_of_tickets()
    found = ticket_files.read(first, _PATTERN, DriverTicket)
    for other in others:
        with contextlib.suppress(SettingsError, OSError):  # unsafe files there are no loss
            found += ticket_files.read(other, _PATTERN, DriverTicket)
    return sorted(found, key=lambda each: each.started_at)


def read_streams(port: int) -> list[DriverTicket]:
    """Return the tickets of this user's clusters that read a DStream and listen at this port.

    Those of this host come first; whether drivers of other hosts have ended cannot be told.

    Raises:
        SettingsError: this user has no directory of its own, or others can change it.
    """
    found = ticket_files.read(directory_of_streams(), _PATTERN, DriverTicket, with_others=True)
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
