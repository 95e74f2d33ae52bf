"""Private directories of one node or local run, and the removal of those that killed ones left.

Covers: log, sockets, TensorBoard's directories (mode 0700, unpredictable names), the owner's mark
in each, removing them; finding directories whose owner is certainly dead, and removing those.
Does not: write into them; touch what another user owns, what bears no mark that can be read, or
what belongs to another boot or process namespace and so cannot be checked.
Runs in: supervisors at their start and end, node tasks whose supervisor vanished, local runs.
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

from rpc.process_id import ProcessId
from rpc.transport.listen import short_temporary_directory
from tfos.node.spec import Executor

_logger = logging.getLogger(__name__)

PREFIX = "tfos-"
_MARK = ".owner.json"
_MAX_MARK_BYTES = 4096
_REMOVE_ATTEMPTS = 3


def make_directory(parent: str) -> Path:
    """Create a directory (mode 0700) that this process owns; it is removed after its death."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        (path / _MARK).write_bytes(msgspec.json.encode(ProcessId.of_this()))
    except OSError:  # a full disk: nobody would remove a directory without a whole mark
        shutil.rmtree(path, ignore_errors=True)
        raise
    return path


def sweep(*parents: str) -> list[Path]:
    """Remove the directories of dead owners below these; return what was removed."""
    return [path for parent in dict.fromkeys(parents) for path in _dead(parent) if _remove(path)]


def _dead(parent: str) -> Iterator[Path]:
    for path in Path(parent).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
                continue
            with (path / _MARK).open("rb") as mark:
                owner = msgspec.json.decode(mark.read(_MAX_MARK_BYTES), type=ProcessId)
            if owner.has_ended():
                yield path


def _remove(path: Path) -> bool:
    # Several nodes may sweep one directory at once.
    shutil.rmtree(path, ignore_errors=True)
    return not path.exists()


class Workspace:
    """Directories of a running node; the log remains where Spark keeps its own logs.

    Args:
        executor: where the node runs.
        node_name: the node's name, for example "worker-0".
        attempt: the node's attempt.
        cluster_id: part of the log's name.
    """

    def __init__(self, executor: Executor, node_name: str, attempt: int, cluster_id: str) -> None:
        self._parents = (executor.scratch_dir, short_temporary_directory())
        sweep(*self._parents)
        scratch_dir, temp_dir = self._parents
        self.directory = make_directory(scratch_dir)
        # A Unix socket's path ends at 108 bytes, so it cannot lie deep in Spark's directories.
        self.socket_dir = make_directory(temp_dir)
        name = f"tfos-{cluster_id}-{node_name.replace(':', '-')}-{attempt}.log"
        self.log_path = (Path(executor.log_dir) if executor.log_dir else self.directory) / name
        self.log_is_kept = bool(executor.log_dir)

    def subdirectory(self, name: str) -> Path:
        """Create and return a directory inside the workspace."""
        path = self.directory / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def remove(self) -> None:
        """Remove all but a log in the executor's directory; sweep those of dead owners."""
        sweep(*self._parents)
        for path in (self.directory, self.socket_dir):
            for attempt in range(_REMOVE_ATTEMPTS):
                try:
                    shutil.rmtree(path)
                    break
                except FileNotFoundError:
                    if not path.exists():
                        break  # an ending executor also removes its directories, at the same time
                except OSError as error:
                    if attempt == _REMOVE_ATTEMPTS - 1:
                        _logger.warning("cannot remove %s: %s", path, error)
