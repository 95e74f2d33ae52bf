"""A file's content as pieces that can be asked for again, and its collection on this host.

A write to a remote file system may fail half way, and is then done again from the beginning; so
what is written is either in memory, or can be made again, or is collected in a file of this host
first.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from feeding.filesystem.interface import Buffer, Pieces

PIECE_BYTES = 8 << 20
"""Of one write. hdfs-native takes 16 MiB at a time nearly twice as fast as 1 MiB."""


def pieces_of(content: Buffer | Pieces) -> Pieces:
    """Return what makes the content, whatever a caller gave."""
    if callable(content):
        return content
    view = memoryview(content).cast("B")
    return lambda: (
        view[begin : begin + PIECE_BYTES] for begin in range(0, view.nbytes, PIECE_BYTES)
    )


def staging_name(name: str) -> str:
    """Return a new hidden name for a file that will be called `name` when it is whole."""
    short = name.encode("utf-8", "surrogateescape")[:200].decode("utf-8", "ignore")
    return f".{short}.{secrets.token_hex(6)}.tmp"


@contextmanager
def collected(publish: Callable[[Pieces], None]) -> Iterator[BinaryIO]:
    """Collect a file on this host and publish it when the block ends without an exception."""
    with tempfile.TemporaryFile(prefix="tfos-") as file:
        yield cast(BinaryIO, file)
        file.flush()
        publish(lambda: pieces_of_file(cast(BinaryIO, file)))


def pieces_of_file(file: BinaryIO) -> Iterator[bytes]:
    """Read a file of this host from its beginning, whatever its position is."""
    # Its own descriptor: a write that was given up may read on after the file is closed, but must
    # not begin to read what then has the file's number.
    own = os.dup(file.fileno())
    try:
        offset = 0
        while piece := os.pread(own, PIECE_BYTES, offset):
            yield piece
            offset += len(piece)
    finally:
        os.close(own)
