"""A local checkpoint root whose process can be made to end at any of its changes.

Covers: ps.checkpoint.storage.Storage; the end of a process before, after or within a change.
Does not: model a disk that forgets or reorders writes when its host crashes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from ps.checkpoint.storage import LocalStorage


class Crash(BaseException):
    """The process that used the storage was killed."""


class CrashingStorage(LocalStorage):
    """Counts changes; after the crash every further one fails too."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._changes_left: int | None = None

    def crash_after(self, changes: int | None) -> None:
        """End the process in place of the change after so many; None: a new one lives on."""
        self._changes_left = changes

    def change(self) -> None:
        """Count one, or end the process."""
        if self._changes_left is not None:
            if self._changes_left == 0:
                raise Crash
            self._changes_left -= 1

    def create(self, name: str) -> BinaryIO:
        self.change()
        file: Any = _File(super().create(name), self)
        return file  # the part of a file that writers use

    def sync(self, file: Any) -> None:
        self.change()
        super().sync(file)

    def publish(self, directory: str, target: str) -> None:
        self.change()
        super().publish(directory, target)
        self.change()  # after the rename, before the caller hears of it

    def remove(self, name: str) -> None:
        if self.is_directory(name):
            # In the worst of the orders in which a file system lists: the manifest last.
            for inside in sorted(self.names(name), reverse=True):
                self.remove(f"{name}/{inside}")
        self.change()
        super().remove(name)

    def put(self, name: str, data: bytes, *, overwrite: bool) -> None:
        self.change()
        super().put(name, data, overwrite=overwrite)

    def move(self, name: str, target: str) -> None:
        self.change()
        super().move(name, target)


class _File:
    """A file that is open for writing, without a buffer."""

    def __init__(self, file: BinaryIO, storage: CrashingStorage) -> None:
        self._file, self._storage = file, storage

    def write(self, data: Any) -> int:
        try:
            self._storage.change()
        except Crash:
            self._file.write(memoryview(data).cast("B")[: memoryview(data).nbytes // 2])
            raise
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
