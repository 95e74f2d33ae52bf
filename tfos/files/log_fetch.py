"""Log fetch: brings event files from a log directory that is a URL to the host of TensorBoard.

TensorBoard reads files of its host alone and keeps them open, so a file grows here in place. What
this host has written itself is never touched.

Covers: which files to fetch, their growth, limits.
Does not: decide when, send (tfos.worker.reports.log_mirror).
Runs in: the chief's process.      Threads: that of the mirror.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from feeding.errors import FileChanged, PathError, StorageUnavailable
from feeding.filesystem.interface import FileStatus, FileSystem
from feeding.filesystem.location import Location, parse
from feeding.filesystem.temp_files import PIECE_BYTES

_logger = logging.getLogger(__name__)

MARK = "tfevents"
"""Part of the name of every event file; TensorBoard looks for it, too."""
MOST_BYTES = 1 << 30
MOST_DIRECTORIES = 1000
MOST_DEPTH = 8


class LogFetch:
    """Event files of other hosts and earlier runs, copied into a directory of this host.

    Args:
        fs: the URL's file system.
        source: the URL.
        target: a directory of this host.
        most_bytes: limit of all copies; further files are left out.
    """

    def __init__(
        self, fs: FileSystem, source: str, target: Path, *, most_bytes: int = MOST_BYTES
    ) -> None:
        self._fs = fs
        self._source = parse(source)
        self._target = target
        self._most_bytes = most_bytes
        self._sizes: dict[str, int] = {}
        self._is_full = False

    @property
    def names(self) -> set[str]:
        """The fetched files, relative to both directories."""
        return set(self._sizes)

    def round(self) -> None:
        """Fetch new files, and what known ones have grown by.

        Raises:
            OSError: the file system or this host's disk failed for some files; the others came.
        """
        failure: OSError | None = None
        for name, status in self._found():
            path = self._target / name
            if name not in self._sizes and os.path.lexists(path):
                continue  # written by this host
            have = self._sizes.get(name, 0)
            if status.size_bytes <= have or not self._has_room(status.size_bytes - have):
                continue
            try:
                self._append(name, path, status)
            except (FileNotFoundError, FileChanged):  # removed or sent again since it was listed
                continue
            except OSError as error:
                if isinstance(error, StorageUnavailable):
                    raise  # the others would wait as long
                failure = failure or error
        if failure is not None:
            raise failure

    def _found(self) -> Iterator[tuple[str, FileStatus]]:
        """Yield the event files below the URL by name; links of this host lead nowhere."""
        left: list[tuple[str, Location, int]] = [("", self._source, 0)]
        for _ in range(MOST_DIRECTORIES):
            if not left:
                return
            prefix, directory, depth = left.pop(0)
            try:
                entries = self._fs.entries(str(directory))
            except FileNotFoundError:  # nobody has sent anything yet
                continue
            for entry in entries:
                try:
                    child = directory.child(entry.name)
                except PathError:
                    continue
                name = f"{prefix}{entry.name}"
                if not entry.is_directory and MARK in entry.name:
                    yield name, entry
                is_open = depth < MOST_DEPTH and not (self._target / name).is_symlink()
                if entry.is_directory and is_open:
                    left.append((f"{name}/", child, depth + 1))

    def _has_room(self, more_bytes: int) -> bool:
        if sum(self._sizes.values()) + more_bytes <= self._most_bytes:
            return True
        if not self._is_full:
            self._is_full = True
            _logger.warning(
                "TensorBoard shows a part of %s: its event files have more than %d bytes; view the "
                "rest elsewhere, or use a log_dir for each run",
                self._source,
                self._most_bytes,
            )
        return False

    def _append(self, name: str, path: Path, status: FileStatus) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        is_new = os.O_EXCL if name not in self._sizes else 0
        source = str(self._source.child(name))
        with contextlib.ExitStack() as stack:
            reader = stack.enter_context(self._fs.open(source))
            file = stack.enter_context(os.fdopen(os.open(path, flags | is_new, 0o600), "ab", 0))
            have = self._sizes.setdefault(name, 0)
            while have < status.size_bytes:
                piece = reader.read_range(have, min(PIECE_BYTES, status.size_bytes - have))
                if not piece:
                    break  # it was replaced by a shorter one
                have += file.write(piece)  # a full disk takes a part, then raises
                self._sizes[name] = have
