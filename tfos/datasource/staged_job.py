"""Staged write job: its files become visible together, or not at all.

Covers: the staging directories of tasks, the commit, the rollback.
Does not: write records (tfos.datasource.writer).
Runs in: tasks (`attempt`), a Python process on the driver's host (`commit`, `abort`).

    root/_temporary/JOB/ATTEMPT/day=1/part-00000-JOB.c000.tfrecord   while tasks write
    root/_temporary/JOB/replaced/…                                   while the job commits
    root/day=1/part-00000-JOB.c000.tfrecord, root/_SUCCESS           afterwards
Names that begin with `_` or `.` are hidden from readers. The job removes uncommitted attempts of
repeated tasks with its directory.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from feeding.filesystem.interface import FileStatus, FileSystem
from feeding.filesystem.registry import filesystem_for

_logger = logging.getLogger(__name__)
TEMPORARY, SUCCESS = "_temporary", "_SUCCESS"
_Undo = list[tuple[str | None, str]]
"""Moves of a commit, (old path, new path); the old path is None for a created directory."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that a task has written completely."""

    staged: str
    """Current path."""
    name: str
    """Final path below the root."""


@dataclass(frozen=True, slots=True)
class StagedJob:
    """One write below one directory.

    Args:
        root: the directory, complete, so that it is the same on every host.
        job_id: unique for every write.
        replaces: whether the commit replaces the existing content.
        makes_root: whether `root` did not exist before.
    """

    root: str
    job_id: str
    replaces: bool
    makes_root: bool

    def attempt(self) -> str:
        """Return a new directory for the files of one attempt of a task."""
        return f"{self._directory}/{secrets.token_hex(6)}"

    def commit(self, files: Iterable[StagedFile]) -> None:
        """Make files visible; replace the existing content if the job does that.

        When this raises, the old content is restored and no new file is visible.

        Raises:
            OSError: a file cannot be moved.
        """
        fs = filesystem_for(self.root)
        fs.mkdirs(self.root)
        undo: _Undo = []
        try:
            if self.replaces:
                self._set_aside(fs, undo)
            self._move_in(fs, files, undo)
            fs.write(f"{self.root}/{SUCCESS}", b"")
        except BaseException:
            _take_back(fs, undo)
            raise
        self._clean(fs)

    def abort(self) -> None:
        """Remove all staged files; no effect if there are none.

        Content that a commit set aside and could not move back remains there.
        """
        fs = filesystem_for(self.root)
        if self.replaces and status_of(self._aside) is not None and fs.entries(self._aside):
            _logger.error(
                "the old content of %s is in %s; move it back by hand", self.root, self._aside
            )
            return
        self._clean(fs)
        if self.makes_root:
            with contextlib.suppress(OSError):  # another job has files there now
                fs.delete(self.root)

    @property
    def _directory(self) -> str:
        return f"{self.root}/{TEMPORARY}/{self.job_id}"

    @property
    def _aside(self) -> str:
        return f"{self._directory}/replaced"

    def _set_aside(self, fs: FileSystem, undo: _Undo) -> None:
        aside = self._aside
        fs.mkdirs(aside)
        for entry in fs.entries(self.root):
            if entry.name != TEMPORARY:
                fs.rename(entry.path, f"{aside}/{entry.name}")
                undo.append((f"{self.root}/{entry.name}", f"{aside}/{entry.name}"))

    def _move_in(self, fs: FileSystem, files: Iterable[StagedFile], undo: _Undo) -> None:
        made = {self.root}
        for file in files:
            target = f"{self.root}/{file.name}"
            parts = file.name.split("/")
            for depth in range(1, len(parts)):
                directory = "/".join([self.root, *parts[:depth]])
                if directory not in made:
                    made.add(directory)
                    undo.append((None, directory))
                    fs.mkdirs(directory)
            fs.rename(file.staged, target)
            undo.append((file.staged, target))

    def _clean(self, fs: FileSystem) -> None:
        with _told(f"{self._directory} could not be removed; remove it by hand"):
            fs.delete(self._directory, recursive=True)
        with contextlib.suppress(OSError):  # it contains other jobs' directories
            fs.delete(f"{self.root}/{TEMPORARY}")


def status_of(path: str) -> FileStatus | None:
    """Return the status of a path, None if it does not exist."""
    try:
        return filesystem_for(path).status(path)
    except FileNotFoundError:
        return None


def _take_back(fs: FileSystem, undo: _Undo) -> None:
    """Undo the last step first: the old content needs the paths of new directories."""
    for before, after in reversed(undo):
        if before is None:
            with contextlib.suppress(OSError):  # it contains old content, or files of another job
                fs.delete(after)
            continue
        with _told(f"{after} could not be moved back to {before}"):
            fs.rename(after, before)


@contextlib.contextmanager
def _told(text: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _logger.warning("%s: %s", text, error)
