"""Staged write job: its files become visible together, or not at all.

Covers: where tasks put files, making them visible together, taking everything back.
Does not: write records (tfos.datasource.writer).
Runs in: tasks (`attempt`), a Python process on the driver's host (`commit`, `abort`).

    root/_temporary/JOB/ATTEMPT/day=1/part-00000-JOB.c000.tfrecord   while tasks write
    root/_temporary/JOB/replaced/…                                   while the job commits
    root/day=1/part-00000-JOB.c000.tfrecord, root/_SUCCESS           afterwards
Names that begin with `_` or `.` are hidden from readers. An attempt that nobody commits, because
Spark repeated its task, goes with its job's directory.
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
"""What a commit has done: (where it was, where it is now), None for a directory that it made."""


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A file that a task has written whole."""

    staged: str
    """Where it is."""
    name: str
    """Where it belongs, below the root."""


@dataclass(frozen=True, slots=True)
class StagedJob:
    """One write below one directory.

    Args:
        root: the directory, with what makes it the same on every host.
        job_id: different for every write.
        replaces: whether what is there goes when the new files come.
        makes_root: whether there was nothing at `root` before.
    """

    root: str
    job_id: str
    replaces: bool
    makes_root: bool

    def attempt(self) -> str:
        """Return a new directory for the files of one attempt of a task."""
        return f"{self._directory}/{secrets.token_hex(6)}"

    def commit(self, files: Iterable[StagedFile]) -> None:
        """Make files visible, instead of what was there if the job replaces it.

        When this raises, what was there is there again and nothing new is.

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
        """Take back everything; fine if there is nothing.

        What a commit set aside and could not move back stays where it is.
        """
        fs = filesystem_for(self.root)
        if self.replaces and status_of(self._aside) is not None and fs.entries(self._aside):
            _logger.error("what was at %s is in %s; move it back by hand", self.root, self._aside)
            return
        self._clean(fs)
        if self.makes_root:
            with contextlib.suppress(OSError):  # another job has files there by now
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
        with contextlib.suppress(OSError):  # other jobs' directories are in it
            fs.delete(f"{self.root}/{TEMPORARY}")


def status_of(path: str) -> FileStatus | None:
    """Return what is at a path, None if there is nothing."""
    try:
        return filesystem_for(path).status(path)
    except FileNotFoundError:
        return None


def _take_back(fs: FileSystem, undo: _Undo) -> None:
    """Undo the last step first: what was there needs the places of new directories."""
    for before, after in reversed(undo):
        if before is None:
            with contextlib.suppress(OSError):  # it holds what was there before, or another's files
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
