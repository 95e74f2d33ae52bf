"""What the readers and writers of this package need of a file system, and nothing more.

Three implementations: `local`, `hdfs`, `fsspec_files`; one suite of tests for all.
Threads: any; a file system holds no position and no open file.

Paths are those that users write, with their scheme, and so are those that come back. What goes
wrong is the OSError that Python has for it, with the path in it (FileNotFoundError,
PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError), a PathError for a path
that is refused, or StorageUnavailable when the servers did not answer in time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

Path = str | os.PathLike[str]
Buffer = bytes | bytearray | memoryview
Pieces = Callable[[], Iterable[Buffer]]
"""Makes a file's content from its beginning, each time that it is called: a write that failed half
way is done again."""


@dataclass(frozen=True, slots=True)
class FileStatus:
    """What a file system says of a path."""

    path: str
    """As a user would write it, with its scheme."""
    size_bytes: int
    """0 for a directory."""
    is_directory: bool
    modified_ms: int
    """Milliseconds since 1970 by the file system's own clock; 0 where it does not say."""

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rpartition("/")[2]


class RangeReader(Protocol):
    """One file, open for reading at any position, by several threads at once."""

    @property
    def path(self) -> str:
        """As it was opened."""

    @property
    def size_bytes(self) -> int:
        """When it was opened."""

    def read_range(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer only at the file's end.

        Raises:
            StorageUnavailable: no server gave the bytes in time.
            FileChanged: the file is not the one that was opened.
        """

    def start_range(self, offset: int, length: int) -> Callable[[], bytes]:
        """Begin to fetch a range; calling the result waits for it, as `read_range` would."""

    def close(self) -> None:
        """Let go of the file; ranges that are under way are forgotten."""

    def __enter__(self) -> RangeReader:
        """Return itself."""

    def __exit__(self, *exc_info: object) -> None:
        """Close it."""


class FileSystem(Protocol):
    """Files of one scheme and authority."""

    def status(self, path: Path) -> FileStatus:
        """Return a path's status.

        Raises:
            FileNotFoundError: there is nothing.
        """

    def exists(self, path: Path) -> bool:
        """Whether there is something; False is only said of what is known to be absent."""

    def entries(self, directory: Path) -> list[FileStatus]:
        """Return what is in a directory, sorted by path.

        Raises:
            FileNotFoundError: there is no such directory.
            NotADirectoryError: it is a file.
        """

    def glob(self, pattern: Path) -> list[FileStatus]:
        """Return what a pattern matches, sorted by path; see `patterns` for what it may hold."""

    def open(self, path: Path) -> RangeReader:
        """Open a file for reading."""

    def write(self, path: Path, content: Buffer | Pieces, *, overwrite: bool = True) -> None:
        """Make `content` the file `path`: readers see all of it, or what was there before.

        Directories on the way are made.

        Raises:
            FileExistsError: it exists and `overwrite` is False.
        """

    def create(self, path: Path, *, overwrite: bool = True) -> AbstractContextManager[BinaryIO]:
        """Collect a file on this host that becomes `path`, as `write` does, when the block ends.

        If the block raises, nothing is written.
        """

    def rename(self, source: Path, target: Path, *, overwrite: bool = False) -> None:
        """Give a file or directory another name on the same file system, at once where it can.

        Raises:
            FileExistsError: the target exists and `overwrite` is False.
        """

    def mkdirs(self, path: Path) -> None:
        """Make a directory and those above it; fine if it exists."""

    def delete(self, path: Path, *, recursive: bool = False) -> bool:
        """Remove a file or directory; False if there was none.

        Raises:
            OSError: ENOTEMPTY, for a directory that is not empty and without `recursive`.
        """
