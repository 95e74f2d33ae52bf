"""The private files of one node: its log, its sockets, TensorBoard's directories.

Covers: making them (mode 0700, unpredictable names) and removing them; those of nodes that were
killed on this host go as well (node.leftovers).
Does not: write into them.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

from tfos.node import leftovers
from tfos.node.spec import Executor

_logger = logging.getLogger(__name__)

_REMOVE_ATTEMPTS = 3


class Workspace:
    """Directories that live as long as the node; the log stays where Spark keeps its own logs."""

    def __init__(self, executor: Executor, node_name: str, attempt: int, cluster_id: str) -> None:
        self._parents = (executor.scratch_dir, tempfile.gettempdir())
        leftovers.sweep(*self._parents)
        scratch_dir, temp_dir = self._parents
        self.directory = leftovers.make_directory(scratch_dir, cluster_id)
        # A Unix socket's path ends at 108 bytes, so it cannot lie deep in Spark's directories.
        self.socket_dir = leftovers.make_directory(temp_dir, cluster_id)
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
        leftovers.sweep(*self._parents)
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
