"""Transfer of whole files and directories between this host and a URL.

Covers: sending under a temporary name and renaming; fetching, for good or as long as it is used.
Does not: know what the files hold, retry (feeding.filesystem does).
Runs in: workers and drivers.      Threads: the caller's.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from feeding.filesystem.interface import FileSystem
from feeding.filesystem.location import LOCAL, Location
from feeding.filesystem.readahead import ReadAhead
from feeding.filesystem.registry import DEFAULTS, filesystem_for
from feeding.filesystem.temp_files import PIECE_BYTES, names_full_disk, staging_name
from feeding.filesystem.walking import walk

_logger = logging.getLogger(__name__)


def upload(source: Path, target: Location, *, last: str = "") -> None:
    """Copy a file or directory of this host to `target`, replacing the existing one.

    Below a directory, a link is copied as what it points to.

    A file is replaced atomically. An existing directory is renamed aside first and removed
    afterwards; between the two renames there is none. See replace_directory for stores that have
    no rename of directories.

    Args:
        source: an existing file or directory of this host.
        target: path or URL of the copy.
        last: the file of a directory without which nobody takes it for whole; empty: there is
            none.

    Raises:
        OSError, DataError: as replace_directory.
        PathError: a file's name is refused, here or in the existing one, which is unchanged.
    """
    fs = filesystem_for(str(target))
    if not source.is_dir():
        fs.write(str(target), partial(file_pieces, source))
        return
    found = list(_below(source))  # before the first write: a link may point to `target`
    staged = target.sibling(staging_name(target.name))
    try:
        fs.mkdirs(str(staged))
        for name, path in found:
            if path.is_dir():
                fs.mkdirs(str(staged.child(name)))
            else:
                fs.write(str(staged.child(name)), partial(file_pieces, path.resolve()))
        replace_directory(fs, staged, target, last)
    except BaseException:
        with suppress(OSError):
            fs.delete(str(staged), recursive=True)
        raise


def _below(
    directory: Path, prefix: str = "", above: tuple[Path, ...] = ()
) -> Iterator[tuple[str, Path]]:
    """Yield what is below a directory, as names from there and paths; a directory comes first.

    Sockets, pipes, broken links and links to a directory above are left out with a warning.
    """
    above = (*above, directory.resolve())
    for path in sorted(directory.iterdir()):
        name = f"{prefix}{path.name}"
        if path.is_file():
            yield name, path
        elif not path.is_dir():
            _logger.warning(
                "%s is not copied: it is a broken link, or neither a file nor a directory", path
            )
        elif path.resolve() in above:
            _logger.warning("%s is not copied: it is a link to a directory above it", path)
        else:
            yield name, path
            yield from _below(path, f"{name}/", above)


def download(source: Location, target: Path) -> None:
    """Copy a file or a whole directory to a new path of this host.

    Args:
        source: path or URL of the original.
        target: a path that does not exist yet.

    Raises:
        FileNotFoundError: `source` does not exist.
        PathError: a name below it could lead out of `target`.
    """
    fs = filesystem_for(str(source))
    status = fs.status(str(source))
    if not status.is_directory:
        _fetch(fs, str(source), target)
        return
    target.mkdir()
    for entry in fs.entries(str(source)):
        child = source.child(entry.name)
        download(child, target / child.name)


@contextmanager
def on_disk(place: Location, name: str) -> Iterator[Path]:
    """Yield the path of a file or directory on this host: its own, or that of a temporary copy.

    Args:
        place: path or URL of the original.
        name: a copy's name.

    Raises:
        FileNotFoundError: there is nothing at a URL; a path of this host is not looked at.
        PathError: as from `download`.
    """
    if place.scheme == LOCAL:
        yield Path(place.path)
        return
    with tempfile.TemporaryDirectory(prefix="tfos-copy-") as staging:
        copy = Path(staging, name)
        download(place, copy)
        yield copy


def file_pieces(path: Path, limit_bytes: int | None = None) -> Iterator[bytes]:
    """Read a regular file of this host, its first `limit_bytes` at most; a link is refused.

    Args:
        path: the file's path.
        limit_bytes: None: the whole file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        left = os.fstat(descriptor).st_size if limit_bytes is None else limit_bytes
        while piece := file.read(min(left, PIECE_BYTES)):
            left -= len(piece)
            yield piece


def _fetch(fs: FileSystem, source: str, target: Path) -> None:
    with (
        ReadAhead(fs.open(source), DEFAULTS) as file,
        names_full_disk(target),
        target.open("xb") as copy,
    ):
        for piece in file.ranges():
            copy.write(piece)


def replace_directory(fs: FileSystem, staged: Location, target: Location, last: str = "") -> None:
    """Rename a directory to `target`; what is there is moved aside first and then removed.

    Where a store has no rename of directories, the files are moved one by one, each with a deadline
    of its own: `last` goes before the first of them and comes after all others.

    Args:
        fs: the file system of both.
        staged: the new directory.
        target: the name that it gets.
        last: the file without which nobody takes the directory for whole; empty: there is none.

    Raises:
        OSError: the file system failed, or another writer was faster. What was there before is
            then unchanged or without `last`, or the other writer's directory is there.
        PathError: the name of a file in one of them is refused; what was there is unchanged.
        DataError: a directory whose files are moved one by one is more than 32 directories deep.
    """
    if not fs.renames_whole:
        _move_files(fs, staged, target, last)
        return
    if not fs.exists(str(target)):
        fs.rename(str(staged), str(target))
        return
    old = target.sibling(staging_name(target.name))
    fs.rename(str(target), str(old))
    try:
        fs.rename(str(staged), str(target))
    except OSError:
        try:
            fs.rename(str(old), str(target))
        except OSError:
            with suppress(OSError):  # another writer's may be there, whole and newer than the old
                if fs.exists(str(target)):
                    fs.delete(str(old), recursive=True)
        raise
    with suppress(OSError):
        fs.delete(str(old), recursive=True)


def _move_files(fs: FileSystem, staged: Location, target: Location, last: str) -> None:
    names, before = _files_below(fs, staged), _files_below(fs, target)
    # All names before the first change: one that is refused leaves the old directory whole.
    moves = {name: (staged.child(name), target.child(name)) for name in names}
    old = [] if last and last not in before else before  # they may be another program's
    stale = [target.child(name) for name in old if name not in moves]
    last_move = moves.pop(last, None)
    if last in before:
        fs.delete(str(target.child(last)))
    for move in moves.values():
        _move_file(fs, *move)
    for place in stale:
        fs.delete(str(place))
    if last_move is not None:
        _move_file(fs, *last_move)
    with suppress(OSError):
        fs.delete(str(staged), recursive=True)


def _move_file(fs: FileSystem, source: Location, target: Location) -> None:
    fs.mkdirs(str(target).rpartition("/")[0])
    fs.rename(str(source), str(target), overwrite=True)


def _files_below(fs: FileSystem, directory: Location) -> list[str]:
    """Return the names of all files below a directory, as paths from there; none without one."""
    root = str(directory)
    if not fs.exists(root):
        return []
    start = len(root.rstrip("/")) + 1
    return [file.path[start:] for file in walk(fs, root, lambda _: False)]
