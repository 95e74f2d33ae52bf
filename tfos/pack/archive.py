"""The archive itself: the same files give the same bytes, wherever and whenever it is made.

Covers: order, times, owners and modes of a tar file, gzip's header, writing beside the target.
Does not: choose what goes in.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from tfos.errors import SettingsError
from tfos.pack.contents import Entry

SUFFIXES = (".tar.gz", ".tgz", ".tar")
"""What Spark and YARN unpack; a zip file has no links."""
TIME_S = 315_532_800
"""1980-01-01, the time of every file."""
_BUFFER_BYTES = 1 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_target(target: Path) -> None:
    """Refuse a file that cannot be the archive.

    Raises:
        SettingsError: the file cannot be the archive; with possible names, or the reason.
    """
    if not target.name.endswith(SUFFIXES):
        raise SettingsError(
            f"{target.name} does not end in {', '.join(SUFFIXES)}, by which Spark and YARN know how"
            " to unpack it"
        )
    if not target.parent.is_dir():
        raise SettingsError(f"there is no directory {target.parent} for {target.name}; make it")
    if target.is_dir():
        raise SettingsError(f"{target} is a directory; name a file in it, or remove it")
    partial = _partial(target)
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        raise SettingsError(
            f"{target} cannot be written: {error.strerror}; name a file that you may create"
        ) from error


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def write(
    target: Path, entries: Iterable[Entry], level: int, on_bytes: Callable[[int], None]
) -> None:
    """Write the archive; a failure leaves an older one of the same name as it was.

    Args:
        target: file to write.
        entries: what goes in, one per name.
        level: gzip's level, 1 to 9.
        on_bytes: called with the size of each file that was added.

    Raises:
        OSError: a file cannot be read, or the archive written; with the path.
    """
    partial = _partial(target)
    try:
        with (
            _opened(partial, level, target.suffix != ".tar") as out,
            tarfile.open(fileobj=out, mode="w|") as tar,
        ):
            known: set[str] = set()
            for entry in sorted(entries, key=lambda each: each.name):
                for name in _new_parents(entry.name, known):
                    tar.addfile(_header(name, tarfile.DIRTYPE, 0o755))
                on_bytes(_add(tar, entry))
        partial.replace(target)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, error.strerror, str(target)) from error  # a write names no file
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path, level: int, is_zipped: bool) -> Iterator[IO[bytes]]:
    with path.open("wb") as file:
        if not is_zipped:
            yield file
            return
        with (
            gzip.GzipFile("", "wb", level, file, mtime=0) as zipped,
            io.BufferedWriter(zipped, _BUFFER_BYTES) as buffered,
        ):
            yield buffered


def _new_parents(name: str, known: set[str]) -> list[str]:
    parents = [str(each) for each in PurePosixPath(name).parents][-2::-1]
    new = [each for each in parents if each not in known]
    known.update(new)
    return new


def _add(tar: tarfile.TarFile, entry: Entry) -> int:
    if entry.source is None:
        header = _header(entry.name, tarfile.SYMTYPE, 0o777)
        header.linkname = entry.link
        tar.addfile(header)
        return 0
    with entry.source.open("rb") as file:
        header = _header(entry.name, tarfile.REGTYPE, 0o755 if entry.is_executable else 0o644)
        header.size = os.fstat(file.fileno()).st_size
        tar.addfile(header, file)
    return header.size


def _header(name: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    header = tarfile.TarInfo(name)
    header.type, header.mode, header.mtime = kind, mode, TIME_S
    return header
