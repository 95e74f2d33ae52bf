"""What file systems on other machines share: whose paths they take, and the bounds of a range.

Covers: RemoteFileSystem, the operations that need no request of their own; RemoteReader.
Does not: ask a server; fsspec_files and hdfs.filesystem derive from these and do.
Threads: any.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import BinaryIO, Self

from feeding.errors import PathError
from feeding.filesystem import globbing
from feeding.filesystem.interface import (
    FileStatus,
    FileSystem,
    Path,
    check_range,
)
from feeding.filesystem.location import Location, parse
from feeding.filesystem.temp_files import collected


class RemoteFileSystem(FileSystem):
    """Files of one scheme and authority.

    Args:
        somewhere: any path on it.
    """

    def __init__(self, somewhere: Location) -> None:
        self._root = somewhere.root

    def exists(self, path: Path) -> bool:
        """See FileSystem."""
        return globbing.find(self, self._own(path)) is not None

    def glob(self, pattern: Path) -> list[FileStatus]:
        """See FileSystem."""
        return globbing.glob(self, self._own(pattern))

    def create(self, path: Path, *, overwrite: bool = True) -> AbstractContextManager[BinaryIO]:
        """See FileSystem."""
        return collected(lambda pieces: self.write(path, pieces, overwrite=overwrite))

    def _own(self, path: Path) -> Location:
        location = parse(path)
        if location.root != self._root:
            raise PathError(f"{location} is not on {self._root}")
        return location

    def _writable(self, path: Path, overwrite: bool) -> Location:
        """Return where to write, after the check that spares work; the rename asks again."""
        target = self._own(path)
        if not overwrite and self.exists(path):
            raise FileExistsError(errno.EEXIST, "it exists", str(target))
        return target


class RemoteReader(ABC):
    """See RangeReader; what derives from it sets `size_bytes` and `version`.

    Args:
        path: path of the open file, as the user wrote it, with its scheme.
    """

    size_bytes: int
    version: str

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_range(self, offset: int, length: int) -> bytes:
        """See RangeReader."""
        return self.start_range(offset, length)()

    def start_range(self, offset: int, length: int) -> Callable[[], bytes]:
        """See RangeReader."""
        check_range(self.path, offset, length)
        # hdfs-native panics past the end.
        length = max(0, min(length, self.size_bytes - offset))
        return self._start(offset, length) if length else bytes

    @abstractmethod
    def close(self) -> None:
        """See RangeReader."""

    @abstractmethod
    def _start(self, offset: int, length: int) -> Callable[[], bytes]:
        """Start to fetch a range that the file has; the result waits for its bytes."""
