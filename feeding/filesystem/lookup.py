"""What is at a path, or nothing: the same over every file system.

Does not: know what patterns mean (patterns).      Threads: any.
"""

from __future__ import annotations

from feeding.filesystem.globbing import expand
from feeding.filesystem.interface import FileStatus, FileSystem
from feeding.filesystem.location import Location


def find(filesystem: FileSystem, location: Location) -> FileStatus | None:
    """Return a path's status, None if there is nothing."""
    try:
        return filesystem.status(str(location))
    except (FileNotFoundError, NotADirectoryError):
        return None


def glob(filesystem: FileSystem, pattern: Location) -> list[FileStatus]:
    """Return what a pattern matches, sorted by path, each once."""

    def listing(location: Location) -> list[FileStatus]:
        try:
            return filesystem.entries(str(location))
        except (FileNotFoundError, NotADirectoryError):
            return []

    return expand(pattern, listing, lambda location: find(filesystem, location))
