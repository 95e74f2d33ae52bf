"""Lock of a file that may be removed: who has it alone, as long as its process lives.

A file is removed by who has it locked. So a lock counts only if the path still names the file that
was locked: another process may have removed it between open and lock, and a third one made a new
one.

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
        path: of the file.
        creates: make it if there is none.

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
    """Release a lock of `try_lock`."""
    # A child that was forked meanwhile has it open too: to close it here would not release it.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path names the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
