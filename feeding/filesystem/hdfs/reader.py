"""HDFS reader: one open file, read by ranges, with retries while replicas are unavailable.

hdfs-native goes on with another replica on its own. If all replicas or the NameNode are unavailable
for a while, the reader repeats the range on a new client.
Threads: any.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from feeding.errors import FileChanged
from feeding.filesystem.bounded_calls import BoundedCall, CallTimeout
from feeding.filesystem.hdfs.client import HdfsRequest, RequestBudget, Requests
from feeding.filesystem.remote import RemoteReader

if TYPE_CHECKING:
    from hdfs_native import Client, FileReader

_BYTES_PER_TIMEOUT = 64 << 20
"""A longer range may take more than `call_timeout_s`, in proportion."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """hdfs-native's reader with its client, and the size and time that identify the file."""

    client: Client
    reader: FileReader
    size_bytes: int
    modified_ms: int


def open_file(client: Client, path: str) -> OpenFile:
    """Open a file by its path on the NameNode.

    Args:
        client: of the path's NameNode.
        path: absolute, without scheme and host.
    """
    status = client.get_file_info(path)
    if status.isdir:
        raise IsADirectoryError("Path is not a file")
    return OpenFile(client, client.read(path), status.length, status.modification_time)


def version_of(modified_ms: int) -> str:
    """Return a file's version; see FileStatus."""
    return f"changed {modified_ms}"


class HdfsReader(RemoteReader):
    """See RangeReader."""

    def __init__(self, requests: Requests, path: str, inner_path: str) -> None:
        """Open the file.

        Args:
            requests: to the NameNode.
            path: the user's, with its scheme.
            inner_path: on the NameNode.
        """
        super().__init__(path)
        self._requests = requests
        self._inner_path = inner_path
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._first: tuple[int, int] | None = None
        opened = self._opened()
        self.size_bytes = opened.size_bytes
        self.version = version_of(opened.modified_ms)
        self._first = (opened.size_bytes, opened.modified_ms)

    def close(self) -> None:
        """See RangeReader."""
        with self._lock:
            self._file = None

    def _start(self, offset: int, length: int) -> Callable[[], bytes]:
        first = _Range(self, offset, length)
        first.start()
        return first.take

    def _opened(self) -> OpenFile:
        """Return the open file, opening it (again) if it is not."""
        with self._lock:
            file = self._file
        if file is not None:
            return file
        request = HdfsRequest("open", self.path)
        file = self._requests.ask(request, lambda client: open_file(client, self._inner_path))
        if self._first not in (None, (file.size_bytes, file.modified_ms)):  # no later range has it
            raise FileChanged(
                f"{self.path} was replaced while it was read: it had {self.size_bytes} bytes, "
                f"now {file.size_bytes}"
            )
        with self._lock:
            if self._file is None:
                self._file = file
            return self._file

    def _drop(self, file: OpenFile) -> None:
        with self._lock:
            if self._file is file:
                self._file = None


class _Range:
    """One range, from its first attempt to its bytes."""

    def __init__(self, owner: HdfsReader, offset: int, length: int) -> None:
        self._owner = owner
        self._offset = offset
        self._length = length
        self._file: OpenFile | None = None
        self._pending: BoundedCall[bytes] | None = None
        config = owner._requests.config
        self._timeout_s = config.call_timeout_s * (1 + length / _BYTES_PER_TIMEOUT)

    def start(self) -> None:
        """Begin an attempt."""
        self._file = file = self._owner._opened()
        work = partial(file.reader.read_range, self._offset, self._length)
        with contextlib.suppress(CallTimeout):  # no thread is free; `take` reports it
            self._pending = self._owner._requests.start(work)

    def take(self) -> bytes:
        """Wait for the bytes; retry while servers are unavailable."""
        requests = self._owner._requests
        waiting = RequestBudget(requests, HdfsRequest("read", self._owner.path))
        while True:
            if self._pending is None:
                self.start()
            try:
                return self._arrived()
            except Exception as error:  # noqa: BLE001 - hdfs-native raises RuntimeError and OSError
                self._pending = None
                if self._file is not None:
                    self._owner._drop(self._file)
                    requests.failed(self._file.client, error)
                waiting.after(error)

    def _arrived(self) -> bytes:
        if self._pending is None:
            raise CallTimeout("too many earlier calls are still not answered")
        data = self._pending.result(self._timeout_s)
        if len(data) != self._length:
            raise OSError(f"{len(data)} bytes came at {self._offset} instead of {self._length}")
        return data
