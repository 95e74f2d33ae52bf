"""Repeatable file content, temporary files that collect it on this host, and their full disk.

A write to a remote file system may fail half way and is then repeated from the beginning. So its
content is in memory, or can be made again, or is first collected in a temporary file of this host.
Threads: any.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from feeding.filesystem.interface import Buffer, Pieces

PIECE_BYTES = 8 << 20
"""Bytes of one write. hdfs-native is nearly twice as fast with 16 MiB as with 1 MiB."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def pieces_of(content: Buffer | Pieces) -> Pieces:
    """Return content as a function that yields its pieces."""
    if callable(content):
        return content
    view = memoryview(content).cast("B")
    return lambda: (
        view[begin : begin + PIECE_BYTES] for begin in range(0, view.nbytes, PIECE_BYTES)
    )


def staging_name(name: str) -> str:
    """Return a new hidden name for the temporary file of `name`."""
    short = name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")
    return f".{short}.{secrets.token_hex(6)}.tmp"


@contextmanager
def names_full_disk(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put a file's path into the error of a full disk: that of a write says nothing of its place.

    Args:
        path: where the block writes.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL and error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def collected(publish: Callable[[Pieces], None]) -> Iterator[BinaryIO]:
    """Return a temporary file of this host; publish its content if the block does not raise.

    Where no space is left for it, the file raises OSError with the directory of temporary files.
    """
    with (
        tempfile.TemporaryFile(prefix="tfos-", buffering=0) as unnamed,
        io.BufferedRandom(_NamesPlace(unnamed.fileno(), "r+", closefd=False)) as file,
    ):
        yield cast(BinaryIO, file)
        file.flush()
        publish(lambda: pieces_of_file(cast(BinaryIO, file)))


class _NamesPlace(io.FileIO):
    """A file without a name, whose write errors have no path of their own."""

    def write(self, data: Buffer, /) -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            text = "no space is left for content on its way; free some, or set TMPDIR elsewhere"
            raise OSError(errno.ENOSPC, text, tempfile.gettempdir()) from error


def pieces_of_file(file: BinaryIO) -> Iterator[bytes]:
    """Read a file of this host from its beginning, whatever its position is."""
    # A descriptor of its own: an abandoned write may read on after the file is closed, and its
    # number may then belong to another file.
    own = os.dup(file.fileno())
    try:
        offset = 0
        while piece := os.pread(own, PIECE_BYTES, offset):
            yield piece
            offset += len(piece)
    finally:
        os.close(own)
