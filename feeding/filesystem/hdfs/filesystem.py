"""HDFS file system: one NameNode, name service or mount table through hdfs-native, without a JVM.

Covers: the operations of FileSystem. The configuration is that of HADOOP_CONF_DIR; on YARN,
hdfs-native takes the delegation tokens from the file that HADOOP_TOKEN_FILE_LOCATION names.
Threads: any.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.hdfs.client import HdfsRequest, Requests
from feeding.filesystem.hdfs.hadoop_conf import namenode_of, umask_of
from feeding.filesystem.hdfs.reader import HdfsReader, version_of
from feeding.filesystem.hdfs.writer import write_whole
from feeding.filesystem.interface import Buffer, FileStatus, Path, Pieces
from feeding.filesystem.location import Location
from feeding.filesystem.remote import RemoteFileSystem
from feeding.filesystem.temp_files import pieces_of

if TYPE_CHECKING:
    from hdfs_native import Client
    from hdfs_native import FileStatus as NativeStatus


class HdfsFileSystem(RemoteFileSystem):
    """See FileSystem."""

    renames_whole = True

    def __init__(self, somewhere: Location, config: FileSystemConfig) -> None:
        """Find the NameNode of a path, without connecting.

        Args:
            somewhere: any path on the file system.
            config: timeouts and read-ahead.
        """
        super().__init__(somewhere)
        self._requests = Requests(namenode_of(somewhere, os.environ), config)

    def status(self, path: Path) -> FileStatus:
        """See FileSystem."""
        location = self._own(path)
        request = HdfsRequest("look at", str(location))
        native = self._requests.ask(request, lambda client: client.get_file_info(location.path))
        return _status(location, native)

    def entries(self, directory: Path) -> list[FileStatus]:
        """See FileSystem."""
        location = self._own(directory)
        request = HdfsRequest("list", str(location))
        found = self._requests.ask(request, lambda client: list(client.list_status(location.path)))
        if len(found) == 1 and found[0].path == location.path and not found[0].isdir:
            raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(location))
        statuses = (_status(location, native) for native in found)
        return sorted(statuses, key=lambda status: status.path)

    def open(self, path: Path) -> HdfsReader:
        """See FileSystem."""
        location = self._own(path)
        return HdfsReader(self._requests, str(location), location.path)

    def write(self, path: Path, content: Buffer | Pieces, *, overwrite: bool = True) -> None:
        """See FileSystem."""
        target = self._writable(path, overwrite)

        def rename(staged: Location) -> None:
            self._rename(staged, target, overwrite, "write")

        umask = umask_of(os.environ)  # not before: reading needs none
        write_whole(self._requests, target, pieces_of(content), rename, umask=umask)

    def rename(self, source: Path, target: Path, *, overwrite: bool = False) -> None:
        """See FileSystem."""
        self._rename(self._own(source), self._own(target), overwrite, "rename")

    def mkdirs(self, path: Path) -> None:
        """See FileSystem."""
        location = self._own(path)
        request = HdfsRequest("make the directory", str(location))
        permission = 0o777 & ~umask_of(os.environ)
        self._requests.ask(request, lambda client: client.mkdirs(location.path, permission, True))

    def delete(self, path: Path, *, recursive: bool = False) -> bool:
        """See FileSystem."""
        location = self._own(path)
        attempts = 0

        def work(client: Client) -> bool:
            nonlocal attempts
            attempts += 1
            # An earlier attempt whose answer was lost may have done it.
            return client.delete(location.path, recursive) or attempts > 1

        return self._requests.ask(HdfsRequest("delete", str(location)), work)

    def _rename(self, source: Location, target: Location, overwrite: bool, action: str) -> None:
        attempts = 0

        def work(client: Client) -> None:
            nonlocal attempts
            attempts += 1
            try:
                client.rename(source.path, target.path, overwrite)
            except FileNotFoundError:
                # An earlier attempt whose answer was lost may have done it.
                if attempts == 1 or not _is_there(client, target) or _is_there(client, source):
                    raise

        place = target if action == "write" else source
        self._requests.ask(HdfsRequest(action, str(place)), work)


def _is_there(client: Client, location: Location) -> bool:
    try:
        client.get_file_info(location.path)
    except FileNotFoundError:
        return False
    return True


def _status(asked: Location, native: NativeStatus) -> FileStatus:
    path = str(asked.at(native.path))
    size = 0 if native.isdir else native.length
    version = "" if native.isdir else version_of(native.modification_time)
    return FileStatus(path, size, native.isdir, version)
