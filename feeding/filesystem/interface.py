"""File system interface: what the readers and writers of feeding need, and nothing more.

Implementations: local, hdfs.filesystem, fsspec_files; one contract suite tests all of them.
Threads: any; a file system holds no position and no open file.

Paths are those of users, with their scheme, in arguments and in results. Errors are Python's
OSErrors with the path in them (FileNotFoundError, PermissionError, FileExistsError,
NotADirectoryError, IsADirectoryError), PathError for a path that is refused, or StorageUnavailable
when the servers did not answer in time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from rpc.field_texts import with_field_texts

Path = str | os.PathLike[str]
Buffer = bytes | bytearray | memoryview
Pieces = Callable[[], Iterable[Buffer]]
"""Returns a file's content from its beginning at each call: a failed write is repeated."""


@with_field_texts
@dataclass(frozen=True, slots=True)
class FileStatus:
    """Status of a path."""

    path: str
    """Path with its scheme."""
    size_bytes: int
    """0 for a directory."""
    is_directory: bool
    version: str = ""
    """Tells a file's content from an earlier or later one; see is_other. Empty: unknown."""

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rpartition("/")[2]


def is_other(version: str, other: str) -> bool:
    """Return whether two versions of one path tell that its content has changed.

    Args:
        version: as `FileStatus.version`: a kind, such as "etag", and its value.
        other: one of another kind tells nothing, nor does an unknown one.
    """
    kinds = (version.partition(" ")[0], other.partition(" ")[0])
    return version != other and kinds[0] == kinds[1]


class RangeReader(Protocol):
    """One file, open for reading at any position, by several threads at once."""

    @property
    def path(self) -> str:
        """Path as it was opened."""

    @property
    def size_bytes(self) -> int:
        """Size when it was opened."""

    @property
    def version(self) -> str:
        """Version when it was opened; see FileStatus."""

    def read_range(self, offset: int, length: int) -> bytes:
        """Return a range of the file.

        Args:
            offset: offset of the first byte.
            length: in bytes; the result is shorter only at the file's end.

        Raises:
            StorageUnavailable: no server sent the bytes in time.
            FileChanged: the file was replaced after it was opened. Where the file system has
                versions, it is raised within the next ranges, or at the end of a `with` block.
        """

    def start_range(self, offset: int, length: int) -> Callable[[], bytes]:
        """Start to fetch a range; a call of the result waits for it as `read_range` does.

        Args:
            offset: offset of the first byte.
            length: in bytes.
        """

    def close(self) -> None:
        """Close the file; ranges in flight are dropped."""

    def __enter__(self) -> RangeReader:
        """Return itself."""

    def __exit__(self, *exc_info: object) -> None:
        """Close it.

        Raises:
            FileChanged: the block raised nothing or a DataError, and the file was replaced before
                the last ranges came.
            StorageUnavailable: the block raised nothing, and no server reported whether it was.
        """


def check_range(path: str, offset: int, length: int) -> None:
    """Refuse a range that no file has; each RangeReader asks this first.

    Args:
        path: path of the file.
        offset: offset of the first byte.
        length: in bytes.

    Raises:
        ValueError: the offset or the length is negative.
    """
    if offset < 0 or length < 0:
        raise ValueError(f"a range of {path} at {offset} with {length} bytes")


class FileSystem(Protocol):
    """Files of one scheme and authority."""

    @property
    def renames_whole(self) -> bool:
        """Whether a directory gets another name in one step; else its files are copied in turn."""

    def status(self, path: Path) -> FileStatus:
        """Return a path's status.

        Raises:
            FileNotFoundError: the path does not exist.
        """

    def exists(self, path: Path) -> bool:
        """Return whether a path exists; an unavailable server raises, it never counts as absent."""

    def entries(self, directory: Path) -> list[FileStatus]:
        """Return the entries of a directory, sorted by path.

        Raises:
            FileNotFoundError: there is no such directory.
            NotADirectoryError: it is a file.
        """

    def glob(self, pattern: Path) -> list[FileStatus]:
        """Return the files that a pattern matches, sorted by path; `globbing` has the syntax."""

    def open(self, path: Path) -> RangeReader:
        """Open a file for reading."""

    def write(self, path: Path, content: Buffer | Pieces, *, overwrite: bool = True) -> None:
        """Write a file atomically: readers see the whole new content or the old one.

        Parent directories are made.

        Args:
            path: path of the file.
            content: bytes, or what makes them at each attempt.
            overwrite: replace an existing file.

        Raises:
            FileExistsError: the file exists and `overwrite` is False.
        """

    def create(self, path: Path, *, overwrite: bool = True) -> AbstractContextManager[BinaryIO]:
        """Return a file on this host whose content `write` gives to `path` when the block ends.

        If the block raises, nothing is written.

        Args:
            path: path of the file.
            overwrite: replace an existing file.
        """

    def rename(self, source: Path, target: Path, *, overwrite: bool = False) -> None:
        """Rename a file or directory on the same file system, atomically where it can.

        Args:
            source: existing path.
            target: new path.
            overwrite: replace an existing file.

        Raises:
            FileExistsError: the target exists and `overwrite` is False.
        """

    def mkdirs(self, path: Path) -> None:
        """Make a directory and its parents; no error if it exists."""

    def delete(self, path: Path, *, recursive: bool = False) -> bool:
        """Remove a file or directory; False if there was none.

        Args:
            path: to remove.
            recursive: also the content of a directory.

        Raises:
            OSError: ENOTEMPTY, for a directory that is not empty and without `recursive`.
        """
