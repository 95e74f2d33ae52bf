"""fsspec file system: object stores, SFTP and every other scheme that fsspec knows.

Covers: FileSystem on top of fsspec's own, with a deadline around each call. fsspec's packages retry
by themselves, so a call is made once.
Does not: make a rename atomic where the store has none; most object stores copy and delete.
Threads: any.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from glob import has_magic
from typing import TYPE_CHECKING, Any, TypeVar

from feeding.errors import (
    DataError,
    FileChanged,
    MissingPackage,
    PathError,
    StorageUnavailable,
)
from feeding.filesystem import globbing
from feeding.filesystem.bounded_calls import BoundedCalls, CallTimeout
from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.interface import Buffer, FileStatus, Path, Pieces, is_other
from feeding.filesystem.location import Location, parse
from feeding.filesystem.remote import RemoteFileSystem, RemoteReader
from feeding.filesystem.temp_files import pieces_of, staging_name
from feeding.filesystem.watched_write import WatchedWrite

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

T = TypeVar("T")

_CALLS = BoundedCalls()
"""The calls of all file systems of this process."""
os.register_at_fork(after_in_child=_CALLS.forget)


class FsspecFileSystem(RemoteFileSystem):
    """See FileSystem."""

    renames_whole = False
    """True of some, such as SFTP, but fsspec does not report which."""

    def __init__(self, somewhere: Location, config: FileSystemConfig) -> None:
        """Make fsspec's file system of a scheme.

        Args:
            somewhere: any path on it.
            config: timeouts and read-ahead.

        Raises:
            MissingPackage: fsspec, or its package for the scheme, is not installed.
        """
        super().__init__(somewhere)
        self._config = config
        self._inner = _inner(somewhere)

    def status(self, path: Path) -> FileStatus:
        """See FileSystem."""
        location = self._own(path)
        return _status(str(location), self._run("look at", location, _info))

    def entries(self, directory: Path) -> list[FileStatus]:
        """See FileSystem."""
        location = self._own(directory)
        found: list[FileStatus] = []
        try:
            listed = self._run("list", location, _list)
        except StorageUnavailable:
            raise
        except OSError:  # of a file, from some packages
            there = globbing.find(self, location)
            if there is None or there.is_directory:
                raise
        else:
            statuses = (self._entry(location, info) for info in listed)
            found = [each for each in statuses if each and each.path != str(location)]
        if not found and not self.status(directory).is_directory:
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(location))
        return sorted(found, key=lambda status: status.path)

    def open(self, path: Path) -> FsspecReader:
        """See FileSystem."""
        location = self._own(path)
        status = self.status(path)
        if status.is_directory:
            raise IsADirectoryError(errno.EISDIR, "not a regular file", str(location))
        return FsspecReader(self, location, status)

    def write(self, path: Path, content: Buffer | Pieces, *, overwrite: bool = True) -> None:
        """See FileSystem."""
        target = self._writable(path, overwrite)
        staged = target.sibling(staging_name(target.name))
        try:
            self._write(staged, pieces_of(content))
            self.rename(str(staged), str(target), overwrite=overwrite)
        except BaseException:
            with suppress(OSError):
                self.delete(str(staged))
            raise

    def rename(self, source: Path, target: Path, *, overwrite: bool = False) -> None:
        """See FileSystem. Two clients that do this at once may both succeed."""
        new, old = self._own(target), self._own(source)
        status = self.status(source)
        there = globbing.find(self, new)
        if there is not None:
            if not overwrite:
                raise FileExistsError(errno.EEXIST, "it exists", str(new))
            if there.is_directory:
                raise IsADirectoryError(errno.EISDIR, "it is a directory", str(new))
        move = partial(_move, target=self._path(new), status=status)
        self._run("rename", old, move, self._patience_s(old, status, _COPIED_BYTES))

    def mkdirs(self, path: Path) -> None:
        """See FileSystem."""
        location = self._own(path)
        there = globbing.find(self, location)
        if there is not None and not there.is_directory:
            raise FileExistsError(errno.EEXIST, "it is a file", str(location))
        self._run("make the directory", location, _make_directories)

    def delete(self, path: Path, *, recursive: bool = False) -> bool:
        """See FileSystem."""
        location = self._own(path)
        there = globbing.find(self, location)
        if there is None:
            return False
        if there.is_directory and not recursive and self.entries(path):
            raise OSError(errno.ENOTEMPTY, "the directory is not empty", str(location))
        remove = partial(_remove, status=there)
        self._run("delete", location, remove, self._patience_s(location, there))
        return True

    def _write(self, location: Location, pieces: Pieces) -> None:
        inner = self._connected(location)
        write = WatchedWrite(inner, self._path(location), pieces, _turns(location, inner))
        try:
            write.done(_CALLS, self._config.patience_s)
        except CallTimeout as error:
            raise _given_up(inner, "write", location, error) from None
        except OSError as error:  # no other: one of the caller's content stays as it is
            raise _with_path(error, "write", location) from error

    def _run(
        self,
        action: str,
        location: Location,
        call: Callable[[AbstractFileSystem, str], T],
        patience_s: float | None = None,
    ) -> T:
        """Call fsspec with a path; the call has a deadline, and every error names the path."""
        patience_s = patience_s or self._config.patience_s
        inner = self._connected(location)

        def in_turn() -> T:
            with _turns(location, inner):
                return call(inner, self._path(location))

        try:
            return _CALLS.run(in_turn, patience_s)
        except CallTimeout as error:
            raise _given_up(inner, action, location, error) from None
        except Exception as error:  # some packages raise their own kinds
            raise _with_path(error, action, location) from error

    def _connected(self, location: Location) -> AbstractFileSystem:
        """Return what the next call asks; one that lost a call is replaced, which connects."""
        if "_lost_to_tfos" in vars(self._inner):
            try:
                connect = partial(_inner, location)
                self._inner = _CALLS.run(connect, self._config.patience_s)
            except Exception as error:  # the host is away; some packages raise their own kinds
                raise StorageUnavailable(f"cannot connect to {location}: {error}") from error
        return self._inner

    def _patience_s(
        self, location: Location, status: FileStatus, share_bytes: float = math.inf
    ) -> float:
        """Return how long a call may take that a package carries out file by file, unseen.

        Args:
            location: location of a file or directory.
            status: its status.
            share_bytes: bytes that may take one `patience_s`.
        """
        sizes = [status.size_bytes]
        if status.is_directory:
            found = self._run("list", location, _find)
            sizes = [int(info.get("size") or 0) for info in found]
        shares = len(sizes) / _FILES_PER_PATIENCE + sum(sizes) / share_bytes
        return self._config.patience_s * (1 + shares)

    def _start_range(
        self,
        location: Location,
        offset: int,
        length: int,
        arrived: Callable[[Callable[[], str]], None],
    ) -> Callable[[], bytes]:
        """Start to fetch a range; `arrived` gets, behind its bytes, what asks for the version."""
        path, inner = self._path(location), self._connected(location)

        def fetch() -> bytes:
            with _turns(location, inner):
                # By name: s3fs has the version before them.
                data = bytes(inner.cat_file(path, start=offset, end=offset + length))
                arrived(lambda: _version(_info(inner, path)))
            return data

        try:
            # Calls of other files may be slow without being lost: that is what patience is for.
            pending = _CALLS.start(fetch, self._config.patience_s)
        except CallTimeout as error:
            raise _given_up(inner, "read", location, error) from None

        def take() -> bytes:
            try:
                data = pending.result(self._config.patience_s)
            except CallTimeout as error:
                raise _given_up(inner, "read", location, error) from None
            except FileChanged:
                raise
            except Exception as error:  # some packages raise their own kinds
                raise _with_path(error, "read", location) from error
            if len(data) != length:
                raise FileChanged(
                    f"{location}: {len(data)} bytes came at {offset} instead of {length}; it was "
                    "replaced while it was read, or its server ignores ranges"
                )
            return data

        return take

    def _version_now(self, location: Location) -> str:
        return self._run("look at", location, lambda inner, path: _version(_info(inner, path)))

    def _path(self, location: Location) -> str:
        return str(self._inner._strip_protocol(str(location)))

    def _entry(self, directory: Location, info: dict[str, Any]) -> FileStatus | None:
        """Return the status of an entry of a listing; None: it has gone."""
        path = self._entry_path(directory, info["name"])
        if _is_directory(info) or info.get("size") is not None:
            return _status(path, info)
        return globbing.find(self, parse(path))  # listings of HTTP have no sizes

    def _entry_path(self, directory: Location, name: str) -> str:
        # Below the directory as it was asked for: names of some packages have no host or bucket.
        head = self._path(directory).rstrip("/") + "/"
        if name.startswith(head) and name != head:
            base = f"{directory.root}{directory.path.rstrip('/')}"
            return str(parse(f"{base}/{name.removeprefix(head)}"))
        rest = str(self._inner.unstrip_protocol(name)).partition("://")[2]  # s3a comes back as s3
        rest = rest.lstrip("/") if directory.authority else rest
        return str(parse(f"{directory.scheme}://{rest}"))


class FsspecReader(RemoteReader):
    """See RangeReader.

    The version is asked for again behind the range that ends the file, behind each 8th, and at the
    end of a `with` block, also one with damaged data, if ranges came since: what is the same then
    was the same before.

    Args:
        files: the file's file system.
        location: the file.
        status: its status, when it was opened.
    """

    def __init__(self, files: FsspecFileSystem, location: Location, status: FileStatus) -> None:
        super().__init__(status.path)
        self.size_bytes = status.size_bytes
        self.version = status.version
        self._files = files
        self._location = location
        self._lock = threading.Lock()
        self._num_begun = self._num_arrived = self._num_checked = 0
        self._has_failed = False

    def __exit__(self, *raised: object) -> None:
        is_damaged = any(isinstance(each, DataError) for each in raised)
        if self._has_failed or (any(raised) and not is_damaged):  # an error is not hidden
            return
        num_arrived = self._num_arrived
        if self.version and self._num_checked < num_arrived:
            self._num_checked = num_arrived  # a second call asks for nothing
            try:
                now = self._files._version_now(self._location)
            except OSError:
                if is_damaged:  # reported: no server says that the bytes are another version's
                    return
                raise
            self._compare(now)

    def close(self) -> None:
        """See RangeReader. Nothing is kept open, and nothing is asked: a store may be away."""

    def _start(self, offset: int, length: int) -> Callable[[], bytes]:
        with self._lock:
            self._num_begun += 1
            is_due = not self._num_begun % _RANGES_PER_CHECK or offset + length == self.size_bytes

        def arrived(version_now: Callable[[], str]) -> None:
            with self._lock:
                self._num_arrived += 1
                num_arrived = self._num_arrived
            if is_due and self.version:
                self._compare(version_now())
                with self._lock:
                    self._num_checked = max(self._num_checked, num_arrived)

        waiting = self._files._start_range(self._location, offset, length, arrived)

        def take() -> bytes:
            try:
                return waiting()
            except OSError:
                self._has_failed = True
                raise

        return take

    def _compare(self, now: str) -> None:
        if is_other(self.version, now):
            raise FileChanged(
                f"{self.path} was replaced while it was read: it was {self.version}, now {now}; "
                "read only files that are no longer written"
            )


def _inner(somewhere: Location) -> AbstractFileSystem:
    try:
        import fsspec
    except ImportError as error:
        raise MissingPackage(
            f"{somewhere.scheme}:// needs fsspec ({error}); run: pip install fsspec"
        ) from error
    try:
        return fsspec.core.url_to_fs(str(somewhere))[0]
    except ImportError as error:
        raise MissingPackage(f"{somewhere.scheme}:// needs another package: {error}") from error
    except OSError as error:  # some packages connect at once
        raise _with_path(error, "connect", somewhere) from error
    except Exception as error:  # ValueError, or what a package says of arguments that it lacks
        raise PathError(f"no file system is known for {somewhere}: {error}") from error


def _given_up(
    inner: AbstractFileSystem, action: str, location: Location, error: CallTimeout
) -> StorageUnavailable:
    """Return the error of a call without an answer, which on one connection keeps its turn."""
    if location.scheme in _ONE_CONNECTION:
        vars(inner)["_lost_to_tfos"] = True
        inner.clear_instance_cache()
    return StorageUnavailable(f"cannot {action} {location}: {error}")


def _turns(somewhere: Location, inner: AbstractFileSystem) -> AbstractContextManager[object]:
    """Return what holds other calls up: on one connection, they would get each other's bytes."""
    if somewhere.scheme not in _ONE_CONNECTION:
        return nullcontext()
    # fsspec gives a thread one object, and so one connection, for all file systems of an SFTP host.
    turns: Turns = vars(inner).setdefault("_turns_of_tfos", Turns())
    return turns


class Turns:
    """A lock that is given in the order of the requests.

    A write that takes it again for each piece would keep others from a plain one until its end.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_asked = self._num_ended = 0

    def __enter__(self) -> None:
        with self._changed:
            mine = self._num_asked
            self._num_asked += 1
            self._changed.wait_for(lambda: self._num_ended == mine)

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._num_ended += 1
            self._changed.notify_all()


def _info(inner: AbstractFileSystem, path: str) -> dict[str, Any]:
    _forget_listings(inner)
    found: dict[str, Any] = inner.info(path)
    return found


def _list(inner: AbstractFileSystem, path: str) -> list[dict[str, Any]]:
    _forget_listings(inner)
    found: list[dict[str, Any]] = inner.ls(path, detail=True)
    return found


def _find(inner: AbstractFileSystem, path: str) -> list[dict[str, Any]]:
    _forget_listings(inner)
    return list(inner.find(path, detail=True).values())


def _forget_listings(inner: AbstractFileSystem) -> None:
    """Make what other processes wrote visible; packages keep listings without end."""
    inner.invalidate_cache()
    inner.dircache.clear()  # not every package does that


def _make_directories(inner: AbstractFileSystem, path: str) -> None:
    inner.makedirs(path, exist_ok=True)


def _move(inner: AbstractFileSystem, path: str, target: str, status: FileStatus) -> None:
    """Rename a file or directory; `mv` of object stores takes `*`, `?` and `[` for a pattern."""
    from fsspec import AbstractFileSystem

    # SFTP and its like rename by one call, which takes names as they are; gcsfs is asynchronous.
    has_rename = type(inner).mv is not AbstractFileSystem.mv and not inner.async_impl
    # Other `mv` also copy the directory's own name, which S3 and its like do not have.
    if has_rename or not (has_magic(path) or status.is_directory):
        # By place, and nothing more for a file: packages name the arguments differently.
        inner.mv(path, target, **({"recursive": True} if status.is_directory else {}))
        return
    names = inner.find(path) if status.is_directory else [path]
    inner.copy(names, [f"{target}{name.removeprefix(path)}" for name in names])
    _remove(inner, path, status)


def _remove(inner: AbstractFileSystem, path: str, status: FileStatus) -> None:
    """Remove a file, or a directory with all below; `rm` takes `*`, `?` and `[` for a pattern."""
    if not has_magic(path):
        inner.rm(path, recursive=status.is_directory)
        return
    if not status.is_directory:
        inner.rm_file(path)
        return
    found = inner.find(path, withdirs=True, detail=True)
    directories = {path, *(name for name, info in found.items() if _is_directory(info))}
    for name in found.keys() - directories:
        inner.rm_file(name)
    for name in sorted(directories, reverse=True):
        for remove in (inner.rm_file, inner.rmdir):  # packages differ in which one works
            with suppress(Exception):  # a store without directories has none left
                remove(name)


def _is_directory(info: dict[str, Any]) -> bool:
    return info.get("type") == "directory"


def _status(path: str, info: dict[str, Any]) -> FileStatus:
    """Return what a package reports of a path.

    Raises:
        PathError: it is a file whose size is not reported; an empty one would have no rows.
    """
    is_directory = _is_directory(info)
    size = 0 if is_directory else info.get("size")
    if size is None:
        raise PathError(
            f"{path}: its server reports no size (for HTTP, no Content-Length), so it cannot be "
            "split or read in ranges; copy it to a file system that does"
        )
    return FileStatus(path, int(size), is_directory, "" if is_directory else _version(info))


def _version(info: dict[str, Any]) -> str:
    """Return a file's version as its package reports it; packages have no common name for it."""
    for key in ("generation", "ETag", "etag", "e_tag"):
        if info.get(key):
            # Some stores have it in quotes, but not in listings.
            value = str(info[key]).strip('"')
            return f"{key.lower()} {value}"
    stamp = _changed(info)
    return f"changed {stamp}" if stamp else ""


def _changed(info: dict[str, Any]) -> Any:
    """Return when a file was changed: seconds, or of another unit or kind if the key says so."""
    found: Any = next((info[key] for key in _CHANGED if info.get(key)), None)
    if not isinstance(found, datetime):
        return found
    # One without a zone is UTC: hosts of other zones tell the same.
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


_CHANGED = (
    *("LastModified", "last_modified", "Last-Modified", "modified", "mtime", "updated"),
    *("modificationTime", "created"),
)
"""Creation comes last: where nothing else is reported, a file is replaced to change it."""


def _with_path(error: Exception, action: str, location: Location) -> OSError:
    """Return an fsspec error, whose text is often only a path, as an OSError with its errno."""
    number = error.errno if isinstance(error, OSError) else errno.EIO
    for kind, meaning in _NUMBERS.items():
        if isinstance(error, kind):
            number = meaning
    return OSError(number or errno.EIO, f"cannot {action}: {error}", str(location))


_RANGES_PER_CHECK = 8
_ONE_CONNECTION = frozenset({"ftp", "sftp", "ssh"})
"""fsspec's FTP and SFTP have one, whose answers are for who asked last (ftplib) or reads first
(paramiko)."""
_COPIED_BYTES = 1 << 30
"""Bytes that a store copies within one `patience_s` even if it is slow: 7 MB/s."""
_FILES_PER_PATIENCE = 1000
"""Files that are copied or deleted within one `patience_s` even one by one: 0.15 s each."""
_NUMBERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
