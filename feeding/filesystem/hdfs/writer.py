"""HDFS writer: writes one whole file under a temporary name, with retries, then renames it.

hdfs-native does not repair a pipeline of DataNodes, so the death of a DataNode fails the write, and
the NameNode may offer it again for 10 to 20 s. A failed file is removed at the end only: its writer
may still block in closing it.
Threads: any; the content is made on another thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from feeding.filesystem.bounded_calls import CallTimeout
from feeding.filesystem.hdfs.client import HdfsRequest, RequestBudget, Requests
from feeding.filesystem.interface import Buffer, Pieces
from feeding.filesystem.location import Location
from feeding.filesystem.temp_files import staging_name

if TYPE_CHECKING:
    from hdfs_native import Client


class ContentError(Exception):
    """The maker of the content raised; its error is the cause."""


@dataclass(slots=True)
class _Attempt:
    """One file under a temporary name, written on a thread of its own."""

    client: Client
    inner_path: str
    pieces: Pieces
    permission: int
    written_bytes: int = 0
    """Grows while the attempt makes progress; the waiting thread reads it."""

    def run(self) -> None:
        from hdfs_native import WriteOptions

        options = WriteOptions(permission=self.permission, create_parent=True)
        writer = self.client.create(self.inner_path, options)
        for piece in _made(self.pieces):
            writer.write(piece)
            self.written_bytes += memoryview(piece).nbytes
        writer.close()
        found = self.client.get_file_info(self.inner_path).length
        if found != self.written_bytes:
            raise OSError(f"{found} bytes are in the file after {self.written_bytes} were written")


def write_whole(
    requests: Requests,
    target: Location,
    pieces: Pieces,
    rename: Callable[[Location], None],
    *,
    umask: int,
) -> None:
    """Write a file beside `target`, as often as it takes, then rename it.

    Args:
        requests: to the NameNode.
        target: the file's final location.
        pieces: makes the content; called once per attempt, on another thread.
        rename: renames the temporary file to `target`.
        umask: permissions that the file does not get.
    """
    waiting: RequestBudget | None = None
    failed: list[Location] = []
    while True:
        staged = target.sibling(staging_name(target.name))
        error = _attempt(requests, staged, pieces, 0o666 & ~umask)
        if error is None:
            break
        failed.append(staged)
        # From the first failure on: an attempt that moves takes as long as it takes.
        waiting = waiting or RequestBudget(requests, HdfsRequest("write", str(target)))
        try:
            waiting.after(error)
        except BaseException:
            _remove(requests, failed)
            raise
    try:
        rename(staged)
    except BaseException:
        failed.append(staged)
        raise
    finally:
        _remove(requests, failed)


def _attempt(
    requests: Requests, staged: Location, pieces: Pieces, permission: int
) -> Exception | None:
    """Write the file once; return the error, None if it is whole."""
    client = None
    try:
        client = requests.client()
        attempt = _Attempt(client, staged.path, pieces, permission)
        pending = requests.start(attempt.run)
        limit_s = requests.config.call_timeout_s
        pending.result_while_moving(limit_s, lambda: attempt.written_bytes, seen=-1)
        return None
    except ContentError as error:
        _remove(requests, [staged])
        cause = error.__cause__
        raise (cause if cause is not None else error) from None
    except (OSError, RuntimeError, CallTimeout) as error:
        requests.failed(client, error)
        return error


def _made(pieces: Pieces) -> Iterator[Buffer]:
    """Yield the content; an error in making it becomes a ContentError, unlike one in writing it."""
    try:
        yield from pieces()
    except Exception as error:
        raise ContentError(str(error)) from error


def _remove(requests: Requests, files: list[Location]) -> None:
    for file in files:
        request = HdfsRequest("remove", str(file))
        with contextlib.suppress(OSError):
            requests.ask(request, lambda client, at=file.path: client.delete(at, False), once=True)  # type: ignore[misc]
