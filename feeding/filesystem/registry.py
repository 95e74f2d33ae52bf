"""Which file system a path is on.

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
    """Return the file system of a path or URL; cheap, and connects to nothing.

    Plain paths and `file://` are this host's, `hdfs://` and `viewfs://` go through hdfs-native, all
    other schemes through fsspec.

    Raises:
        PathError: the path is refused, or nothing serves its scheme.
        MissingPackage: what serves its scheme is not installed.
    """
    location = parse(path)
    if location.scheme == LOCAL:
        return LocalFileSystem()
    if location.scheme in HADOOP:
        from feeding.filesystem.hdfs.filesystem import HdfsFileSystem

        return HdfsFileSystem(location, config)
    return FsspecFileSystem(location, config)
