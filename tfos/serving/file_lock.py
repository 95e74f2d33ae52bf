"""Lock of a removable file: one process holds it, for as long as the process lives.

The holder of its lock may remove a file. So a lock counts only if the path still names the
locked file: another process may have removed it between open and lock, and a third one made a
new file.

Covers: taking without waiting, releasing.      Does not: wait.
Threads: any; any number of processes.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def try_lock(path: Path, *, creates: bool = False) -> int | None:
    """Lock a file without waiting.

    Args:
        path: path of the file.
        creates: create it if there is none.

    Returns:
        A descriptor for `unlock`; None: another process has it open and locked, or removed it.

    Raises:
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT if creates else os.O_RDONLY
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        if creates:
            raise
        return None
    has_lock = False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_lock = is_at(descriptor, path)
    finally:
        if not has_lock:
            os.close(descriptor)
    return descriptor if has_lock else None


def unlock(descriptor: int) -> None:
    """Release a lock that `try_lock` took."""
    # A forked child may also have it open; closing it here would not release the lock.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path names the descriptor's file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
