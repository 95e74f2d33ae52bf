"""Use of the cache's indexes: which ones are open, and removal of unused ones.

An open index holds a shared lock of its manifest, which the kernel releases with the process.
After a new index is built, unused indexes are removed, except the KEPT_UNUSED most recently
opened. So a process that is restarted, or an earlier export, still finds its own. If the disk has
no room for a new index, unused ones are removed before it is built. So are the leftovers of
processes that were killed while they built or removed an index.

Covers: locks, ages, removal.      Does not: know what an index holds (tfos.serving.index_files).
Threads: any; any number of processes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tfos.serving.cache_directory import builder_lock
from tfos.serving.file_lock import is_at, try_lock, unlock

INDEX_MANIFEST = "index.json"
"""Written last in an index's directory; locked by processes that have the index open."""
_INDEXES = "index-*"
KEPT_UNUSED = 2
"""Number of unused indexes that are kept."""
HOLD_TIMEOUT_S = 1.0
"""Seconds to wait for the lock of a process that checks whether an index is in use, or renames
it. Such a process holds it for less than a millisecond, unless it is stopped."""
_LOOK_S = 0.01


def hold(owner: object, manifest: Path) -> weakref.finalize[..., object]:
    """Mark an index as in use until `owner` is gone.

    Args:
        owner: object of this process that has it open.
        manifest: manifest of the index.

    Returns:
        A finalizer; call it to end the mark earlier.

    Raises:
        FileNotFoundError: there is no manifest, or it is being removed.
    """
    descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    release = weakref.finalize(owner, os.close, descriptor)
    deadline_s = time.monotonic() + HOLD_TIMEOUT_S
    while not _is_shared(descriptor):
        if time.monotonic() > deadline_s:
            release()
            raise FileNotFoundError(f"{manifest} is being removed")
        time.sleep(_LOOK_S)
    if not is_at(descriptor, manifest):
        release()
        raise FileNotFoundError(f"{manifest} was removed")
    with suppress(OSError):  # a read-only cache keeps its ages
        os.utime(descriptor)
    return release


def _is_shared(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_unused(directory: Path) -> None:
    """Remove unused indexes from a cache's directory, except the most recently opened."""
    remove_leftovers(directory)
    unused = _unused(directory)
    for manifest in unused[: max(0, len(unused) - KEPT_UNUSED)]:
        remove_if_unused(manifest)


def make_room(directory: Path, has_room: Callable[[], bool]) -> bool:
    """Remove unused indexes, the least recently opened first, until there is room.

    Args:
        directory: directory of the cache.
        has_room: returns whether the disk has room.

    Returns:
        Whether there was an index to remove.
    """
    has_removed = False
    for manifest in _unused(directory):
        if has_room():
            break
        remove_if_unused(manifest)
        has_removed |= not manifest.exists()
    return has_removed


def _unused(directory: Path) -> list[Path]:
    """Return the manifests of unused indexes, the least recently opened first."""
    unused = [
        (opened_ns, manifest)
        for manifest in directory.glob(f"{_INDEXES}/{INDEX_MANIFEST}")
        if (opened_ns := _unused_since(manifest)) is not None
    ]
    return [manifest for _, manifest in sorted(unused)]


def remove_leftovers(directory: Path) -> None:
    """Remove the leftovers of processes that were killed while they built or removed an index."""
    for gone in directory.glob(f".{_INDEXES}.gone"):
        shutil.rmtree(gone, ignore_errors=True)
    hidden = [*directory.glob(f".{_INDEXES}.lock"), *directory.glob(f".{_INDEXES}.building")]
    for name in {each.name.split(".")[1] for each in hidden}:
        with suppress(OSError):  # this process may not remove it
            _remove_of_builder(directory, name)


def _remove_of_builder(directory: Path, name: str) -> None:
    """Remove the leftovers of an index that no process builds, and its lock."""
    lock = builder_lock(directory, name)
    descriptor = try_lock(lock, creates=True)
    if descriptor is None:
        return
    try:
        for staged in directory.glob(f".{name}.*.building"):
            shutil.rmtree(staged, ignore_errors=True)
        lock.unlink()
    finally:
        unlock(descriptor)


def remove_if_unused(manifest: Path) -> None:
    """Remove an index if it is unused.

    Args:
        manifest: manifest of the index.
    """
    with suppress(OSError):  # this process may not remove it
        descriptor = try_lock(manifest)
        if descriptor is None:
            return
        try:
            gone = move_aside(manifest.parent)
        finally:
            unlock(descriptor)
        shutil.rmtree(gone, ignore_errors=True)


def move_aside(index: Path) -> Path:
    """Rename an index before its removal: a process that opens it finds all of it, or nothing.

    Args:
        index: its directory.

    Returns:
        Its new name, `remove_leftovers` removes it if this process is killed.
    """
    return index.rename(index.with_name(f".{index.name}.{uuid.uuid4().hex[:12]}.gone"))


def _unused_since(manifest: Path) -> int | None:
    """Return when an index was opened last, in nanoseconds; None: it is in use, or gone."""
    with suppress(OSError):
        descriptor = try_lock(manifest)
        if descriptor is not None:
            try:
                return os.fstat(descriptor).st_mtime_ns
            finally:
                unlock(descriptor)
    return None
