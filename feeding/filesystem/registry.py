"""File system registry: the file system of a path, by its scheme.

Threads: any.
"""

from __future__ import annotations

from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.fsspec_files import FsspecFileSystem
from feeding.filesystem.interface import FileSystem, Path
from feeding.filesystem.local import LocalFileSystem
from feeding.filesystem.location import HADOOP, LOCAL, parse

DEFAULTS = FileSystemConfig()


def filesystem_for(path: Path, config: FileSystemConfig = DEFAULTS) -> FileSystem:
    """Return the file system of a path or URL, without connecting.

    Plain paths and `file://` are on this host, `hdfs://` and `viewfs://` use hdfs-native, all other
    schemes use fsspec.

    Args:
        path: a local path or a URL.
        config: how long calls may take; its ranges are for a ReadAhead of a file.

    Raises:
        PathError: the path is refused, or no package knows its scheme.
        MissingPackage: the package for its scheme is not installed.
    """
    location = parse(path)
    if location.scheme == LOCAL:
        return LocalFileSystem()
    if location.scheme in HADOOP:
        from feeding.filesystem.hdfs.filesystem import HdfsFileSystem

        return HdfsFileSystem(location, config)
    return FsspecFileSystem(location, config)
