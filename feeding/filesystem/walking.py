"""The files below a directory, directory by directory.

Covers: the walk, which no hidden name is part of; the depth that is too much.
Does not: say which names are hidden (feeding.reading.discover).
Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from feeding.errors import DataError
from feeding.filesystem.interface import FileStatus, FileSystem

MAX_DEPTH = 32


def walk(
    filesystem: FileSystem, directory: str, is_hidden: Callable[[str], bool], depth: int = 0
) -> Iterator[FileStatus]:
    """Yield the files of a whole tree; hidden directories are not listed.

    Args:
        filesystem: filesystem of the directory.
        directory: an existing one.
        is_hidden: returns whether a file or directory of a name is left out, with all below.
        depth: depth of the directory below the first one.

    Raises:
        DataError: the tree is more than 32 directories deep.
    """
    if depth == MAX_DEPTH:
        raise DataError(f"{directory} is nested more than {MAX_DEPTH} directories deep")
    for entry in filesystem.entries(directory):
        if is_hidden(entry.name):
            continue
        if entry.is_directory:
            yield from walk(filesystem, entry.path, is_hidden, depth + 1)
        else:
            yield entry
