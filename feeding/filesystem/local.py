"""Local file system: files of this host, and of network file systems that are mounted here.

Threads: any.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path as LocalPath
from typing import BinaryIO, cast

from feeding.errors import PathError
from feeding.filesystem import globbing
from feeding.filesystem.interface import Buffer, FileStatus, Path, Pieces, check_range
from feeding.filesystem.location import LOCAL, parse
from feeding.filesystem.temp_files import names_full_disk, pieces_of, staging_name


class LocalFileSystem:
    """See FileSystem."""

    renames_whole = True

    def status(self, path: Path) -> FileStatus:
        """See FileSystem."""
        local = _own(path)
        return _status(str(local), local.stat())

    def exists(self, path: Path) -> bool:
        """See FileSystem."""
        return globbing.find(self, parse(path)) is not None

    def entries(self, directory: Path) -> list[FileStatus]:
        """See FileSystem. Entries that vanish meanwhile, and dangling links, are left out."""
        found = []
        for local in _own(directory).iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(_status(str(local), local.stat()))
        return sorted(found, key=lambda status: status.path)

    def glob(self, pattern: Path) -> list[FileStatus]:
        """See FileSystem."""
        return globbing.glob(self, parse(pattern))

    def open(self, path: Path) -> LocalReader:
        """See FileSystem."""
        return LocalReader(_own(path))

    def write(self, path: Path, content: Buffer | Pieces, *, overwrite: bool = True) -> None:
        """See FileSystem."""
        with names_full_disk(path), self.create(path, overwrite=overwrite) as file:
            for piece in pieces_of(content)():
                file.write(piece)

    @contextmanager
    def create(self, path: Path, *, overwrite: bool = True) -> Iterator[BinaryIO]:
        """See FileSystem. It is beside its final path, so that the rename stays on one disk."""
        target = _own(path)
        if not overwrite and target.exists():
            raise FileExistsError(errno.EEXIST, "it exists", str(target))
        target.parent.mkdir(parents=True, exist_ok=True)
        staged = target.with_name(staging_name(target.name))
        try:
            with staged.open("xb") as file:
                yield cast(BinaryIO, file)
                file.flush()
                os.fsync(file.fileno())
            _rename(staged, target, overwrite)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise

    def rename(self, source: Path, target: Path, *, overwrite: bool = False) -> None:
        """See FileSystem."""
        _rename(_own(source), _own(target), overwrite)

    def mkdirs(self, path: Path) -> None:
        """See FileSystem."""
        _own(path).mkdir(parents=True, exist_ok=True)

    def delete(self, path: Path, *, recursive: bool = False) -> bool:
        """See FileSystem. A link is removed, not what it leads to."""
        local = _own(path)
        try:
            if not stat.S_ISDIR(local.lstat().st_mode):
                local.unlink()
            elif recursive:
                shutil.rmtree(local)
            else:
                local.rmdir()
        except FileNotFoundError:
            return False
        return True


class LocalReader:
    """See RangeReader."""

    def __init__(self, path: LocalPath) -> None:
        self.path = str(path)
        # Without O_NONBLOCK, opening a pipe would block.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            self.close()
            number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
            raise OSError(number, "not a regular file", self.path)
        self.size_bytes = status.st_size
        self.version = _version(status)

    def __enter__(self) -> LocalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def read_range(self, offset: int, length: int) -> bytes:
        """See RangeReader."""
        check_range(self.path, offset, length)
        parts = []
        while length and (part := os.pread(self._descriptor, length, offset)):
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return b"".join(parts)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read into a buffer from `offset` on; returns the bytes read, 0 at the end.

        Args:
            offset: byte of the file.
            buffer: flat bytes; filled from its start.
        """
        return os.preadv(self._descriptor, [buffer], offset)

    def start_range(self, offset: int, length: int) -> Callable[[], bytes]:
        """See RangeReader. The kernel reads ahead, so this starts nothing."""
        return partial(self.read_range, offset, length)

    def close(self) -> None:
        """See RangeReader."""
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)


def _own(path: Path) -> LocalPath:
    location = parse(path)
    if location.scheme != LOCAL:
        raise PathError(f"{location} is not on this host")
    return LocalPath(location.path)


def _status(path: str, found: os.stat_result) -> FileStatus:
    is_directory = stat.S_ISDIR(found.st_mode)
    size = 0 if is_directory else found.st_size
    version = "" if is_directory else _version(found)
    return FileStatus(path, size, is_directory, version)


def _version(found: os.stat_result) -> str:
    return f"changed {found.st_mtime_ns}"


def sync_tree(path: LocalPath) -> None:
    """Have a file, or a directory with all below, on the disk; links and pipes are left out.

    Args:
        path: what other code has written.
    """
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        return
    for each in path.iterdir() if path.is_dir() else ():
        sync_tree(each)
    _sync(path)


def _sync(path: LocalPath) -> None:
    """Have a file's content, or a directory's names, on the disk, if its mount can do that."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _rename(source: LocalPath, target: LocalPath, overwrite: bool) -> None:
    _give_name(source, target, overwrite)
    _sync(target.parent)


def _give_name(source: LocalPath, target: LocalPath, overwrite: bool) -> None:
    if overwrite:
        source.replace(target)
        return
    if source.is_dir() and not source.is_symlink():
        if target.exists():  # rename would silently replace an empty directory
            raise FileExistsError(errno.EEXIST, "it exists", str(target))
        source.rename(target)
        return
    try:
        os.link(source, target, follow_symlinks=False)  # which fails if the target exists
    except OSError as error:
        if error.errno not in _NO_LINKS or target.exists():
            raise
        source.rename(target)
    else:
        source.unlink()


_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Disks without hard links."""
_NO_SYNC = {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES}
"""What cannot be synced when opened to read: on some FUSE and SMB mounts, or closed to readers."""
