"""The files of a data set, as its readers share them out; reading one from any byte on.

Covers: a path, directory or pattern → files (what Spark and Hadoop hide is left out); RangeStream.
Does not: know formats, or who reads what (splits).
Threads: a stream belongs to one thread; its next blocks are fetched meanwhile.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable

from feeding.config import MIB
from feeding.errors import DataError
from feeding.filesystem.choose import filesystem_for
from feeding.filesystem.interface import FileStatus, FileSystem, RangeReader
from feeding.filesystem.local import LocalReader
from feeding.splits import SourceFile

_BLOCK_BYTES = 4 * MIB
_BLOCKS_AHEAD = 2
"""Hides one round trip behind the reading of one block; more only holds memory."""
_MAGIC = set("*?[{")
_MAX_DEPTH = 32


def data_files(
    paths: str | Iterable[str], *, can_be_cut: Callable[[FileStatus], bool]
) -> list[SourceFile]:
    """Return the files below paths, sorted by path.

    Directories are walked (`key=value` ones of partitioned data included); names that begin with
    `_` or `.` are left out, as Spark does. Patterns match names as in a shell.

    Args:
        paths: files, directories and patterns, with a scheme or local.
        can_be_cut: whether a file may be read from the middle on.

    Raises:
        FileNotFoundError: a path or pattern has no file.
        DataError: a directory is nested more than 32 deep.
    """
    found: dict[str, SourceFile] = {}
    for path in [paths] if isinstance(paths, str) else paths:
        files = list(_below(path))
        if not files:
            raise FileNotFoundError(
                f"no data file at {path}; names that begin with _ or . do not count"
            )
        for status in files:
            found[status.path] = SourceFile(status.path, status.size_bytes, can_be_cut(status))
    return sorted(found.values())


def _below(path: str) -> Iterable[FileStatus]:
    filesystem = filesystem_for(path)
    heads = filesystem.glob(path) if _MAGIC & set(path) else [filesystem.status(path)]
    for head in heads:
        yield from _walk(filesystem, head, 0)


def _walk(filesystem: FileSystem, status: FileStatus, depth: int) -> Iterable[FileStatus]:
    if not status.is_directory:
        yield status
        return
    if depth == _MAX_DEPTH:
        raise DataError(f"{status.path} is nested more than {_MAX_DEPTH} directories deep")
    for entry in filesystem.entries(status.path):
        if entry.name[:1] not in "._":
            yield from _walk(filesystem, entry, depth + 1)


class RangeStream(io.RawIOBase):
    """A file from a byte on; blocks of a file elsewhere are fetched ahead.

    Args:
        reader: the open file; closed by the caller.
        start: first byte.
    """

    def __init__(self, reader: RangeReader, start: int = 0) -> None:
        self._reader = reader
        self._at = start
        """Of the next block to ask for."""
        self._ahead: deque[Callable[[], bytes]] = deque()
        self._block = memoryview(b"")

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # as io calls it
        """See io.RawIOBase. Raises as RangeReader.read_range."""
        if isinstance(self._reader, LocalReader):
            count = self._reader.read_into(self._at, buffer)
            self._at += count
            return count
        if not self._block:
            self._advance()
        count = min(len(buffer), len(self._block))
        buffer[:count] = self._block[:count]
        self._block = self._block[count:]
        return count

    def _advance(self) -> None:
        while len(self._ahead) <= _BLOCKS_AHEAD and self._at < self._reader.size_bytes:
            count = min(_BLOCK_BYTES, self._reader.size_bytes - self._at)
            self._ahead.append(self._reader.start_range(self._at, count))
            self._at += count
        if self._ahead:
            self._block = memoryview(self._ahead.popleft()())
