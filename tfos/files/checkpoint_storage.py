"""Checkpoint storage at a URL: HDFS, object stores, whatever feeding.filesystem knows.

A file is collected on this host first, without a name, and sent when it is whole, as often as it
takes; so a save needs no more memory than one on a local disk, and goes on when a DataNode dies.

Covers: ps.checkpoint.storage.Storage over a feeding.filesystem.interface.FileSystem, and
which of the two a user means.
Does not: know what the files hold (ps.checkpoint.format).
Runs in: PS processes, workers, drivers and the command `tfos`; never imports TensorFlow or Spark.
Threads: any; every call stands alone.
"""

from __future__ import annotations

import errno
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from feeding.errors import FeedError, FileChanged
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.interface import FileStatus, RangeReader
from feeding.filesystem.location import HADOOP, LOCAL, Location, parse
from feeding.filesystem.registry import DEFAULTS, filesystem_for
from feeding.filesystem.temp_files import pieces_of_file
from ps.checkpoint.storage import Storage, storage_at
from ps.errors import CheckpointError

_CLEANING_S = 20.0
"""For removing what nobody reads; it is tried again with a later save."""
_BLOCK_BYTES = 4 << 20
"""Of one read or write, here and there: buckets and rows are read in smaller parts."""


@dataclass(frozen=True, slots=True)
class Storages:
    """Opens checkpoint directories by path or URL (a ps.checkpoint.storage.OpenStorage)."""

    staging_dir: str = ""
    """Where files are collected before they are sent; empty: the host's directory for temporary
    files. It takes the largest file that one process writes."""
    config: FileSystemConfig = DEFAULTS

    def __call__(self, root: str | Path) -> Storage:
        """Return the storage of a directory; connects to nothing.

        Raises:
            CheckpointError: a path that is refused, or nothing serves its scheme.
        """
        with _refusals():
            location = parse(str(root))
            if location.scheme == LOCAL:
                return storage_at(location.path)
            return RemoteStorage(location, self.staging_dir, self.config)


class RemoteStorage:
    """A directory that is a URL. Names are this program's own, and checked again all the same.

    Args:
        root: a URL.
        staging_dir: local directory for files that are being written.
        config: timeouts of the file system.
    """

    def __init__(self, root: Location, staging_dir: str, config: FileSystemConfig) -> None:
        self._root = root
        self._staging_dir = staging_dir or tempfile.gettempdir()
        hasty = replace(config, patience_s=min(config.patience_s, _CLEANING_S))
        self._fs = filesystem_for(str(root), config)
        self._cleaning = filesystem_for(str(root), hasty)

    def where(self, name: str = "") -> str:
        """See Storage."""
        return str(self._root.child(name) if name else self._root)

    def names(self, directory: str = "") -> list[str]:
        """See Storage."""
        return [entry.name for entry in self._entries(directory)]

    def sizes(self, directory: str) -> dict[str, int]:
        """See Storage."""
        entries = self._entries(directory)
        return {each.name: each.size_bytes for each in entries if not each.is_directory}

    def _entries(self, directory: str) -> list[FileStatus]:
        with _refusals():
            try:
                return self._fs.entries(self.where(directory))
            except FileNotFoundError:
                return []

    def size(self, name: str) -> int:
        """See Storage."""
        with _refusals():
            status = self._fs.status(self.where(name))
        if status.is_directory:
            raise CheckpointError(f"{self.where(name)} is not a regular file")
        return status.size_bytes

    def open(self, name: str) -> BinaryIO:
        """See Storage."""
        with _refusals():
            try:
                reader = self._fs.open(self.where(name))
            except IsADirectoryError as error:
                raise CheckpointError(f"{self.where(name)} is not a regular file") from error
        return cast(BinaryIO, io.BufferedReader(_RangeFile(reader), _BLOCK_BYTES))

    def create(self, name: str) -> BinaryIO:
        """See Storage. The file appears by `sync`."""
        with _refusals():
            return cast(BinaryIO, _CollectedFile(self.where(name), self._staging_dir))

    def sync(self, file: BinaryIO) -> None:
        """See Storage: whole and under its name; on HDFS it is with all its DataNodes then."""
        if not isinstance(file, _CollectedFile):
            raise TypeError(f"{file!r} is not from create()")
        file.flush()
        with _refusals():
            self._fs.write(file.target, lambda: pieces_of_file(cast(BinaryIO, file)))

    def is_directory(self, name: str) -> bool:
        """See Storage."""
        with _refusals():
            try:
                return self._fs.status(self.where(name)).is_directory
            except FileNotFoundError:
                return False

    def publish(self, directory: str, target: str) -> None:
        """See Storage. Not at once where the store has no rename: file by file."""
        with _refusals():
            self._fs.rename(self.where(directory), self.where(target))

    def remove(self, name: str) -> None:
        """See Storage."""
        with suppress(OSError, FeedError):
            self._cleaning.delete(self.where(name), recursive=True)

    @property
    def is_exclusive(self) -> bool:
        """See Storage: HDFS renames exclusively; of object stores it is not known."""
        return self._root.scheme in HADOOP

    def put(self, name: str, data: bytes, *, overwrite: bool) -> None:
        """See Storage."""
        with _refusals():
            self._fs.write(self.where(name), data, overwrite=overwrite)

    def move(self, name: str, target: str) -> None:
        """See Storage. Not at once where the store has no rename."""
        with _refusals():
            self._fs.rename(self.where(name), self.where(target))

    def free_text(self) -> str:
        """See Storage: of the staging directory, the other one's is not known here."""
        text = f"files are collected in {self._staging_dir} first"
        with suppress(OSError):
            free = shutil.disk_usage(self._staging_dir).free
            return f"{text}, where {free / 1e6:.1f} MB are free"
        return text


class _CollectedFile(io.BufferedRandom):
    """A file of this host without a name, so that nothing of it is left after a kill."""

    def __init__(self, target: str, directory: str) -> None:
        raw = tempfile.TemporaryFile("w+b", buffering=0, dir=directory)  # noqa: SIM115 - closed with this
        super().__init__(raw, _BLOCK_BYTES)
        self.target = target


class _RangeFile(io.RawIOBase):
    """A RangeReader as a file with a position."""

    def __init__(self, reader: RangeReader) -> None:
        super().__init__()
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size_bytes}
        self._position = max(0, base[whence] + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._reader.size_bytes - self._position))
        with _stale_if_changed():
            data = self._reader.read_range(self._position, length) if length else b""
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        try:
            if not self.closed:
                with _stale_if_changed():
                    self._reader.__exit__(None, None, None)  # it asks whether the file is the same
        finally:
            super().close()


@contextmanager
def _stale_if_changed() -> Iterator[None]:
    try:
        yield
    except FileChanged as error:
        raise OSError(errno.ESTALE, str(error)) from error


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what is no OSError into a CheckpointError: refused paths, packages that are missing."""
    try:
        yield
    except FeedError as error:
        if isinstance(error, OSError):
            raise
        raise CheckpointError(str(error)) from error
