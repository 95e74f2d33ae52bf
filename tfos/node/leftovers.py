"""Directories that a killed process could not remove: marked by their owner, swept by the next one.

Covers: the mark in a private directory, finding those whose owner is certainly dead, removing them.
Does not: make directories (node.workspace); touch what another user owns, what bears no mark, or
whose owner lives behind another boot or process namespace and so cannot be looked up.
Runs in: supervisors at their start and end, node tasks whose supervisor vanished.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rpc import endpoint
from tfos.node import procfs

PREFIX = "tfos-"
_MARK = ".owner.json"
_MAX_MARK_BYTES = 4096


class Owner(msgspec.Struct, frozen=True):
    """A process, named so that no later one can be taken for it."""

    cluster_id: str
    pid: int
    start_ticks: int
    """Since boot; tells this process from a later one with its pid."""
    boot_id: str
    pid_namespace: int
    """Inode of the namespace in which `pid` means this process."""

    @property
    def is_dead(self) -> bool:
        """Whether the process has certainly ended."""
        if (self.boot_id, self.pid_namespace) != (endpoint.boot_id(), _pid_namespace()):
            return False
        pidfd = procfs.open_pidfd(self.pid)
        if pidfd is None:
            return True
        try:
            # What cannot be read, as without a free descriptor, is not known to be another's.
            ticks = procfs.start_ticks(self.pid)
            return procfs.wait_exited([pidfd], 0) or ticks not in (None, self.start_ticks)
        finally:
            os.close(pidfd)


def make_directory(parent: str, cluster_id: str) -> Path:
    """Make a directory (mode 0700) that belongs to this process and goes after its death."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    pid = os.getpid()
    owner = Owner(
        cluster_id, pid, procfs.start_ticks(pid) or 0, endpoint.boot_id(), _pid_namespace()
    )
    (path / _MARK).write_bytes(msgspec.json.encode(owner))
    return path


def sweep(*parents: str) -> list[Path]:
    """Remove what dead owners left in these directories; returns what was removed."""
    return [path for parent in dict.fromkeys(parents) for path in _dead(parent) if _remove(path)]


def _dead(parent: str) -> Iterator[Path]:
    for path in Path(parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with (path / _MARK).open("rb") as mark:
                owner = msgspec.json.decode(mark.read(_MAX_MARK_BYTES), type=Owner)
            if owner.is_dead:
                yield path


def _remove(path: Path) -> bool:
    # Several nodes may sweep one directory at once.
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino
