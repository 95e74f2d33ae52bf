"""The private directories of one node, and the sweep of those that killed nodes left behind.

Covers: log, sockets, TensorBoard's directories (mode 0700, unpredictable names), the owner's mark
in each, removing them; finding directories whose owner is certainly dead, and removing those.
Does not: write into them; touch what another user owns, what bears no mark, or what belongs to
another boot or process namespace and so cannot be checked.
Runs in: supervisors at their start and end, node tasks whose supervisor vanished.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from rpc import endpoint
from tfos.node import procfs
from tfos.node.spec import Executor

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


_logger = logging.getLogger(__name__)

_REMOVE_ATTEMPTS = 3


class Workspace:
    """Directories that live as long as the node; the log stays where Spark keeps its own logs."""

    def __init__(self, executor: Executor, node_name: str, attempt: int, cluster_id: str) -> None:
        self._parents = (executor.scratch_dir, tempfile.gettempdir())
        sweep(*self._parents)
        scratch_dir, temp_dir = self._parents
        self.directory = make_directory(scratch_dir, cluster_id)
        # A Unix socket's path ends at 108 bytes, so it cannot lie deep in Spark's directories.
        self.socket_dir = make_directory(temp_dir, cluster_id)
        name = f"tfos-{cluster_id}-{node_name.replace(':', '-')}-{attempt}.log"
        self.log_path = (Path(executor.log_dir) if executor.log_dir else self.directory) / name
        self.log_is_kept = bool(executor.log_dir)

    def subdirectory(self, name: str) -> Path:
        """Make and return a directory inside the workspace."""
        path = self.directory / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def remove(self) -> None:
        """Remove all but a log that lies beside the executor's own; and what the dead left."""
        sweep(*self._parents)
        for path in (self.directory, self.socket_dir):
            for attempt in range(_REMOVE_ATTEMPTS):
                try:
                    shutil.rmtree(path)
                    break
                except FileNotFoundError:
                    if not path.exists():
                        break  # an ending executor removes its directories as well, meanwhile
                except OSError as error:
                    if attempt == _REMOVE_ATTEMPTS - 1:
                        _logger.warning("cannot remove %s: %s", path, error)
