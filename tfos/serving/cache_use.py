"""Use of the cache's indexes: who has one open, and the removal of those that nobody needs.

An open index holds a shared lock of its manifest, which the kernel releases with the process.
After a new index is built, all others that nobody has open are removed but the KEPT_UNUSED that
were opened last: a process that is started again, or an earlier export, finds its own.

Covers: locks, ages, removal.      Does not: know what an index holds (tfos.serving.index_files).
Threads: any; any number of processes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

KEPT_UNUSED = 2
"""Of the indexes that nobody has open."""


def hold(owner: object, manifest: Path) -> None:
    """Mark an index as in use until `owner` is gone.

    Args:
        owner: object of this process that has it open.
        manifest: of the index.

    Raises:
        FileNotFoundError: there is none, or it is being removed.
    """
    descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    weakref.finalize(owner, os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileNotFoundError(f"{manifest} is being removed") from None
    with suppress(OSError):  # a cache that is only read keeps its ages
        os.utime(descriptor)


def remove_unused(directory: Path, pattern: str, manifest_name: str) -> None:
    """Remove the indexes that nobody has open, but those that were opened last.

    Args:
        directory: of the cache.
        pattern: of the indexes' names.
        manifest_name: of each one's manifest.
    """
    for left in directory.glob(f".{pattern}.gone"):
        shutil.rmtree(left, ignore_errors=True)  # of a process that was killed meanwhile
    unused = [
        (manifest.stat().st_mtime_ns, manifest)
        for manifest in directory.glob(f"{pattern}/{manifest_name}")
        if not _is_in_use(manifest)
    ]
    for _, manifest in sorted(unused)[: max(0, len(unused) - KEPT_UNUSED)]:
        _remove(manifest)


def _is_in_use(manifest: Path) -> bool:
    return not _alone(manifest, lambda: None)


def _remove(manifest: Path) -> None:
    index = manifest.parent
    gone = index.with_name(f".{index.name}.{uuid.uuid4().hex[:12]}.gone")
    # By another name first: who opens it meanwhile finds all of it, or nothing.
    if _alone(manifest, lambda: index.rename(gone)):
        shutil.rmtree(gone, ignore_errors=True)


def _alone(manifest: Path, act: Callable[[], object]) -> bool:
    """Act while nobody has an index open; return False if somebody has, or it is gone."""
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        act()
    except OSError:  # it is in use, or another process removes it
        return False
    finally:
        os.close(descriptor)
    return True
