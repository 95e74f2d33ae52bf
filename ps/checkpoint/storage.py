"""Storage of checkpoints: one root, its files and directories by their names below it.

Covers: the few operations that a checkpoint needs of a file system, and the local one.
Does not: know what the files hold (ps.checkpoint.format), nor other file systems: who has one hands
in what opens it (OpenStorage).
Threads: any; every call stands alone.

Names are relative to the root, with `/`, at most one directory deep, and made by this program, so
they cannot leave the root. Links are never followed below the root, only the root may be one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from ps.errors import CheckpointError

Found = TypeVar("Found")

PATIENCE_S = 5.0
"""A file system that gives no file is asked again for this long: a failover of a server for files
takes seconds, and a restarted server would else go on from an older step for good."""
_LOOK_AGAIN_S = 0.25
_CREATE_ATTEMPTS = 10
_READ_ATTEMPTS = 5
_MAX_SMALL_NBYTES = 1 << 16
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}
"""The name does not lead to a file, now or later."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
"""Errors of disks without hard links."""


class Storage(Protocol):
    """A checkpoint root on some file system. What goes wrong is a CheckpointError or an OSError."""

    def where(self, name: str = "") -> str:
        """Return the whole path or URL, for messages and for users."""

    def names(self, directory: str = "") -> list[str]:
        """Return what is in a directory, unsorted; nothing if it does not exist."""

    def sizes(self, directory: str) -> dict[str, int]:
        """Return the bytes of the regular files in a directory; nothing if it does not exist."""

    def size(self, name: str) -> int:
        """Return a regular file's bytes.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: it is a link, a device or a directory.
        """

    def open(self, name: str) -> BinaryIO:
        """Open a regular file for reading at any position. Raises as `size`.

        A read raises OSError with ESTALE where the file was replaced after it was opened.
        """

    def create(self, name: str) -> BinaryIO:
        """Create or replace a file for writing, with its directory."""

    def sync(self, file: BinaryIO) -> None:
        """Return when all that was written to the file would survive a crash of the host."""

    def is_directory(self, name: str) -> bool:
        """Whether there is something that counts as a directory; a link does not."""

    def publish(self, directory: str, target: str) -> None:
        """Give a directory its final name, at once and so that it survives a crash.

        Args:
            directory: its name until now, below the root.
            target: its final name, below the root.

        Raises:
            FileExistsError: the target exists and is not empty.
        """

    def remove(self, name: str) -> None:
        """Remove a file, or a directory with all that is in it, as far as possible."""

    @property
    def is_exclusive(self) -> bool:
        """Whether of many who `put` a new file at once, on any hosts, one succeeds."""

    def put(self, name: str, data: bytes, *, overwrite: bool) -> None:
        """Make `data` the content of a small file: readers see all of it, or what was before.

        Args:
            name: name of the file, below the root.
            data: the whole content.
            overwrite: replace a file that exists.

        Raises:
            FileExistsError: it exists and `overwrite` is False.
        """

    def move(self, name: str, target: str) -> None:
        """Give a file or directory another name, that nothing has, at once where the store can.

        Args:
            name: name of the file, below the root.
            target: its new name, below the root.

        Raises:
            FileNotFoundError: there is nothing of that name, or another one has moved it.
        """

    def free_text(self) -> str:
        """Say how much room is left."""


OpenStorage = Callable[[str | Path], Storage]
"""Returns the storage of a root as users name it; `storage_at`, or one that knows URLs."""


def storage_at(root: str | Path | Storage) -> Storage:
    """Return the storage of a local root.

    Raises:
        CheckpointError: not a path of a file system that is known here.
    """
    if not isinstance(root, str | Path):
        return root
    if "\0" in str(root) or "://" in str(root) or not str(root):
        raise CheckpointError(
            f"checkpoints need a local directory, got {str(root)!a}; a URL works in a cluster's "
            "Checkpoints(directory=...), and with the commands `tfos inspect` and `tfos export`"
        )
    return LocalStorage(Path(root))


def name_for_servers(root: str | Path, storage: Storage) -> str:
    """Return a root as processes in other working directories find it: a local path whole.

    Args:
        root: as its user named it.
        storage: what that has opened.
    """
    path = Path(root)
    if not isinstance(storage, LocalStorage) or storage.where() != str(path):
        return str(root)
    # Not os.path.abspath: it takes the directory before a link for the one above its target.
    return str(path.absolute())


def read_small(storage: Storage, name: str) -> bytes | None:
    """Return the content of a file that `put` has made, None if there is none.

    One that is replaced meanwhile, as a lease's beat, is read again.

    Args:
        storage: the checkpoint root.
        name: name of the file, below the root.

    Raises:
        CheckpointError: it is a link, a device or a directory.
        OSError: the file system fails, or the file was replaced during each of some readings.
    """
    left = _READ_ATTEMPTS
    while True:
        left -= 1
        try:
            with storage.open(name) as file:
                return file.read(_MAX_SMALL_NBYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ESTALE or not left:
                raise


@contextmanager
def typed_errors(storage: Storage, name: str, action: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that states the path and the free space.

    Args:
        storage: the checkpoint root.
        name: name of the file or directory, below the root.
        action: verb for the message, for example "write".
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot {action} {storage.where(name)}: {error.strerror or error}; "
            f"{storage.free_text()}"
        ) from error


def patiently(read: Callable[[], Found]) -> Found:
    """Return what `read` returns; while the file system fails, it is asked again for PATIENCE_S.

    Raises:
        CheckpointError: what `read` raised at last.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return read()
        except CheckpointError as error:
            if not _is_unread(error) or time.monotonic() >= deadline_s:
                raise
        time.sleep(_LOOK_AGAIN_S)


def if_sound(
    read: Callable[[], Found], on_damage: Callable[[CheckpointError], object] | None = None
) -> Found | None:
    """Return what `read` returns; None if a file is damaged or missing, after telling it.

    While the file system gives no file, nothing is known of it: it is asked again for PATIENCE_S.

    Raises:
        CheckpointError: the file system still gives none; it may be whole.
    """
    try:
        return patiently(read)
    except CheckpointError as error:
        if _is_unread(error):
            raise CheckpointError(
                f"{error}. It was tried for {PATIENCE_S:.0f} s. The step may be whole, so no older "
                "one is taken instead. Try again when the file system answers, ask for another "
                "step by its number, or move this one away"
            ) from error
        if on_damage is not None:
            on_damage(error)
        return None


def _is_unread(error: CheckpointError) -> bool:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    if cause is None or isinstance(cause, FileNotFoundError):
        return False
    return cause.errno not in _NOT_THERE


class LocalStorage:
    """A directory of this host, or of a network file system that is mounted here."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def where(self, name: str = "") -> str:
        """See Storage."""
        return str(self._root / name)

    def names(self, directory: str = "") -> list[str]:
        """See Storage."""
        try:
            return os.listdir(self._root / directory)
        except FileNotFoundError:
            return []

    def sizes(self, directory: str) -> dict[str, int]:
        """See Storage."""
        try:
            with os.scandir(self._root / directory) as found:
                return {
                    each.name: each.stat(follow_symlinks=False).st_size
                    for each in found
                    if each.is_file(follow_symlinks=False)
                }
        except FileNotFoundError:
            return {}

    def size(self, name: str) -> int:
        """See Storage."""
        path = self._root / name
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        return status.st_size

    def open(self, name: str) -> BinaryIO:
        """See Storage."""
        self.size(name)
        # Without O_NONBLOCK a pipe that takes the file's place would be waited for.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(self._root / name, flags), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise CheckpointError(f"{self._root / name} is not a regular file")
        return file

    def create(self, name: str) -> BinaryIO:
        """See Storage. Another writer's failure may remove the directory at any time."""
        path = self._root / name
        for _ in range(_CREATE_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                _make_directory(path.parent)
                return _create_in(path.parent, path.name, follow=path.parent == self._root)
        return _create_in(path.parent, path.name, follow=path.parent == self._root)

    def sync(self, file: BinaryIO) -> None:
        """See Storage."""
        file.flush()
        os.fsync(file.fileno())

    def is_directory(self, name: str) -> bool:
        """See Storage."""
        path = self._root / name
        return path.is_dir() and not path.is_symlink()

    def publish(self, directory: str, target: str) -> None:
        """See Storage."""
        _sync_directory(self._root / directory)
        (self._root / directory).rename(self._root / target)
        _sync_directory(self._root)

    def remove(self, name: str) -> None:
        """See Storage."""
        path = self._root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()

    @property
    def is_exclusive(self) -> bool:
        """See Storage; also true of NFS from version 3 on."""
        return True

    def put(self, name: str, data: bytes, *, overwrite: bool) -> None:
        """See Storage."""
        path = self._root / name
        staged = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        try:
            with self.create(staged.name) as file:
                file.write(data)
                self.sync(file)
            if overwrite:
                staged.replace(path)
            else:
                _link(staged, path, data)
        finally:
            staged.unlink(missing_ok=True)
        _sync_directory(path.parent)

    def move(self, name: str, target: str) -> None:
        """See Storage."""
        (self._root / name).rename(self._root / target)

    def free_text(self) -> str:
        """See Storage."""
        for place in (self._root, *self._root.absolute().parents):
            try:
                free = shutil.disk_usage(place).free
            except OSError:
                continue
            return f"{free / 1e6:.1f} MB are free on the disk of {place}"
        return "its free space is unknown"


def _create_in(directory: Path, name: str, *, follow: bool) -> BinaryIO:
    """Create a file in a directory that is no link, unless the user's root itself is one."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    parent = os.open(directory, flags)
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(name, flags, 0o666, dir_fd=parent), "wb")
    finally:
        os.close(parent)


def _make_directory(path: Path) -> None:
    """Make a directory and those above it, so that they survive a crash of the host."""
    missing: list[Path] = []
    for each in (path, *path.parents):
        if each.is_dir():
            break
        missing.append(each)
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _sync_directory(each.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(staged: Path, path: Path, data: bytes) -> None:
    """Give a file another name, unless something has it."""
    try:
        os.link(staged, path, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # Exclusive, but not whole at once: who reads it meanwhile finds a part.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
