"""Whole values in open files: memfds and temporary files that two processes share.

Covers: reads and writes at a place, all bytes or an error.
Does not: open files, move the file's own position.
Threads: any, each with places of its own.

Linux moves at most 2 GiB - 4 KiB per call (read(2)): one call cuts a larger value silently.
"""

from __future__ import annotations

import errno
import os
from typing import TypeAlias

Data: TypeAlias = bytes | bytearray | memoryview


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Return `length` bytes from a place.

    Args:
        descriptor: open for reading.
        length: number of bytes.
        offset: offset of the first byte.

    Raises:
        OSError: the file ends before, or cannot be read.
    """
    pieces: list[bytes] = []
    at, stop = offset, offset + length
    while at < stop:
        piece = os.pread(descriptor, stop - at, at)
        if not piece:
            raise OSError(
                errno.EIO,
                f"the file ends {stop - at} bytes before byte {stop}, where {length} bytes should "
                "end: its writer ended too early",
            )
        pieces.append(piece)
        at += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write_at(descriptor: int, data: Data, offset: int) -> None:
    """Write all of `data` at a place.

    Args:
        descriptor: open for writing.
        data: bytes.
        offset: offset of the first byte.

    Raises:
        OSError: no space is left; a part may be written.
    """
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def contents(descriptor: int) -> bytes:
    """Return all bytes of a file."""
    return read_at(descriptor, os.fstat(descriptor).st_size, 0)


def replace(descriptor: int, data: Data) -> None:
    """Make `data` a file's only bytes."""
    os.ftruncate(descriptor, 0)
    write_at(descriptor, data, 0)
