"""The files of a data set, as its readers share them out.

Covers: a path, directory or pattern → files (what Spark and Hadoop hide is left out).
Does not: know formats, or who reads what (splits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from feeding.errors import DataError
from feeding.filesystem.choose import filesystem_for
from feeding.filesystem.interface import FileStatus, FileSystem
from feeding.splits import SourceFile

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
