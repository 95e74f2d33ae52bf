"""Ticket files: what a driver leaves for its user's other processes, such as an address and a key.

Covers: writing one, reading those of a directory, removing those of drivers that have ended.
Does not: say what is in a ticket (tfos.watch.ticket).
Threads: any.

A file has mode 0600, its directory belongs to the user alone, and both are checked when it is read.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from rpc.jit.cache_directory import made_private, real_path, why_unsafe
from rpc.process_id import ProcessId
from tfos.errors import SettingsError

MOST_BYTES = 64 << 10
Ticket = TypeVar("Ticket", bound=ProcessId)


def write(path: Path, ticket: ProcessId) -> Path:
    """Write a ticket, instead of one of that name; return its path without links.

    Args:
        path: its file's path.
        ticket: ticket of this process.

    Raises:
        OSError: the directory cannot be made, or is not the user's alone.
    """
    path = made_private(path.parent) / path.name
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(handle, "wb") as file:
        file.write(msgspec.msgpack.encode(ticket))
    return path


def read(
    directory: Path, pattern: str, kind: type[Ticket], *, with_others: bool = False
) -> list[Ticket]:
    """Return the tickets of running drivers; those of drivers that have ended are removed.

    Args:
        directory: directory of the tickets.
        pattern: pattern of their names.
        kind: kind of the tickets.
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
    mine: list[Ticket] = []
    others: list[Ticket] = []
    for path in sorted(directory.glob(pattern)):
        ticket = _read(path, kind)
        if ticket is None:
            continue
        has_ended = ticket.has_ended()
        if has_ended:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
            (mine if has_ended is False else others).append(ticket)
    return [*mine, *others] if with_others else mine


def _read(path: Path, kind: type[Ticket]) -> Ticket | None:
    """Return what a file holds; None unless it is a ticket that this user alone could write."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
            if not is_ours or status.st_mode & 0o077:
                return None
            body = file.read(MOST_BYTES)
        return msgspec.msgpack.decode(body, type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
