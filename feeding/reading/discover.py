"""Data file discovery: paths, directories and patterns to the list of a data set's files.

Covers: which files Spark and Hadoop hide, what is compressed by name or bytes.
Does not: know formats, or assign files to workers (splits).
Threads: any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from feeding.config import MIB
from feeding.errors import FeedSettingsError
from feeding.filesystem.globbing import alternatives
from feeding.filesystem.interface import FileStatus, FileSystem, Path
from feeding.filesystem.location import parse
from feeding.filesystem.registry import filesystem_for
from feeding.filesystem.walking import walk
from feeding.reading.splits import SourceFile

_MAGIC = set("*?[{")
_HELD_BYTES = 16 * MIB
"""Blocks that are read ahead, one that is decoded, and its columns; Parquet knows it better."""
_GZIP_NAMES = (".gz", ".gzip")
_GZIP_MAGIC = b"\x1f\x8b"
_COPYING = "._COPYING_"
"""How Hadoop's shell ends the name of a file until it is whole."""


def data_files(
    paths: Path | Iterable[Path], *, is_splittable: Callable[[FileStatus], bool]
) -> list[SourceFile]:
    """Return the files below paths, sorted by path.

    Directories are walked, `key=value` directories of partitioned data included. Names that begin
    with `_` or `.`, or end with `._COPYING_`, are skipped, as in Spark, except partitions
    (`_day=1`) and names that a path or pattern spells out. Patterns match names as in a shell.

    Args:
        paths: files, directories and patterns, with a scheme or local.
        is_splittable: returns whether a file can be read from the middle on.

    Raises:
        FileNotFoundError: a path or pattern matches no file.
        FeedSettingsError: `paths` is empty, or has a path twice.
        DataError: a directory is nested more than 32 deep.
    """
    found: dict[str, SourceFile] = {}
    for path in named_once(paths):
        base, files = _base(path), list(_below(path))
        if not files:
            raise FileNotFoundError(
                f"no data file at {path}; names that begin with _ or . or end with {_COPYING} do "
                "not count"
            )
        for status in files:
            before = found.get(status.path)
            if before is not None and len(before.base) <= len(base):
                continue  # of paths that overlap, the outer one has all keys of directories
            found[status.path] = SourceFile(
                status.path,
                status.size_bytes,
                is_splittable(status),
                base=base,
                held_bytes=min(status.size_bytes, _HELD_BYTES),
                version=status.version,
            )
    return sorted(found.values())


def is_plain(status: FileStatus) -> bool:
    """Return whether a file's name is not that of a compressed file.

    Shares are even only if the names of compressed files show it; each file is read once in any
    case.
    """
    return not status.path.endswith(_GZIP_NAMES)


def is_gzip(head: bytes) -> bool:
    """Return whether a file is gzip, by its first bytes."""
    return head.startswith(_GZIP_MAGIC)


def path_list(paths: Path | Iterable[Path]) -> list[str]:
    """Return one path or several as a list of text.

    Raises:
        FeedSettingsError: the list is empty, or holds something else than paths.
    """
    given: Any = [paths] if isinstance(paths, str | os.PathLike) else paths
    try:
        texts = [os.fspath(path) for path in given]
    except TypeError as error:
        raise FeedSettingsError(f"paths must be a path or a list of paths: {error}") from None
    if not texts:
        raise FeedSettingsError("no paths were given; name at least one file, directory or pattern")
    return texts


def named_once(paths: Path | Iterable[Path]) -> list[str]:
    """Return paths as `path_list` does, none of them twice.

    Raises:
        FeedSettingsError: see `path_list`; or a path is named twice, but files are read once.
    """
    texts = path_list(paths)
    seen: set[str] = set()
    for text in texts:
        place = str(parse(text))
        if place in seen:
            raise FeedSettingsError(
                f"{place} is named twice, but each file is read once an epoch: name it once. To "
                "read its rows twice, copy its files to another directory and name both"
            )
        seen.add(place)
    return texts


def _below(path: str) -> Iterable[FileStatus]:
    filesystem = filesystem_for(path)
    if not _MAGIC & set(path):
        yield from _files_of(filesystem, filesystem.status(path))
        return
    fixed = next(n for n, part in enumerate(_parts(path)) if _MAGIC & set(part))
    parts = [part for each in alternatives(path) for part in _parts(each)[fixed:]]
    spelled = {part[:1] for part in parts} | {part[-len(_COPYING) :] for part in parts}
    for head in filesystem.glob(path):
        if all(_hidden_by(part) <= spelled for part in _parts(head.path)[fixed:]):
            yield from _files_of(filesystem, head)


def _base(path: str) -> str:
    """Return the directory that a path or pattern reads: of a pattern, what precedes its magic."""
    location, parts = parse(path), _parts(path)
    fixed = next((n for n, part in enumerate(parts) if _MAGIC & set(part)), len(parts))
    return str(location.at("/".join(parts[:fixed]) or ("/" if fixed else ".")))


def _parts(path: str) -> list[str]:
    return parse(path).path.split("/")


def _hidden_by(name: str) -> set[str]:
    """Return what of a name hides it from Spark: its first character, its end.

    `_SUCCESS` and `.crc` are hidden, a partition `_day=1` is not.
    """
    found = {_COPYING} if name.endswith(_COPYING) else set()
    if name.startswith(".") or (name.startswith("_") and "=" not in name):
        found.add(name[0])
    return found


def _files_of(filesystem: FileSystem, status: FileStatus) -> Iterable[FileStatus]:
    if not status.is_directory:
        return [status]
    return walk(filesystem, status.path, lambda name: bool(_hidden_by(name)))
