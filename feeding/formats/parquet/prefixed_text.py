"""Text pages with prefixes: how many bytes their texts have when they are decoded.

Covers: decoded_bytes.
Does not: decode text (pyarrow does), find pages (page_headers).
Threads: any; pure.
Source: Parquet's Encodings.md, DELTA_BYTE_ARRAY and DELTA_BINARY_PACKED.

A page holds, for each text, how many bytes it repeats of the text before, and the rest. So a page
of a few bytes may stand for any number of copies of a long text.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from feeding.errors import DataError
from feeding.formats.parquet.thrift import signed, varint

_MAX_WIDTH_BITS = 32
"""Lengths are 32-bit integers."""
_CODECS = {"LZ4": "lz4_raw"}
_DAMAGED = "the lengths of a page's prefixes are damaged"


class PrefixedPage(NamedTuple):
    """A page of text with prefixes.

    Args:
        start: offset of its bytes behind its header, in the column's bytes.
        stop: offset behind them.
        size_bytes: before compression.
        num_values: with nulls.
        level_bytes: size of its uncompressed levels; None: they are compressed, before the text.
    """

    start: int
    stop: int
    size_bytes: int
    num_values: int
    level_bytes: int | None


def decoded_bytes(stored: memoryview, page: PrefixedPage, codec: str, num_levels: int) -> int:
    """Return what a page's texts have at most when they are decoded.

    Args:
        stored: the page's bytes, as they are in the file.
        page: what its header says.
        codec: name of the column's compression.
        num_levels: kinds of levels that its values have, 0 to 2.

    Raises:
        DataError: the page is damaged.
    """
    levels = page.level_bytes or 0
    size = page.size_bytes - levels
    if not 0 <= levels <= min(page.size_bytes, len(stored)):
        raise DataError("the levels of a page are damaged")
    data = _uncompressed(bytes(stored[levels:]), size, codec)
    if page.level_bytes is None:
        at = 0
        for _ in range(num_levels):
            if at + 4 > len(data):
                raise DataError("the levels of a page are damaged")
            at += 4 + struct.unpack_from("<I", data, at)[0]
        data = data[at:]
    return len(data) + _repeated_bytes(data, page.num_values)


def _uncompressed(data: bytes, size: int, codec: str) -> bytes:
    if codec == "UNCOMPRESSED":
        return data
    try:
        found = pa.Codec(_CODECS.get(codec, codec.lower())).decompress(data, size, asbytes=True)
    except (pa.ArrowException, OSError, ValueError):
        if len(data) == size:  # a page of the second kind may say that it is not compressed
            return data
        raise DataError(f"a page of text with prefixes is no {codec}") from None
    return bytes(found)


def _repeated_bytes(lengths: bytes, most_values: int) -> int:
    try:
        block_size, at = varint(lengths, 0)
        num_parts, at = varint(lengths, at)
        total, at = varint(lengths, at)
        first, at = _length(lengths, at)
        if total > most_values or not 0 < num_parts <= block_size <= 1 << 20:
            raise DataError(_DAMAGED)
        if not total:
            return 0
        steps = _steps(lengths, at, total - 1, (block_size, num_parts))
    except (DataError, IndexError, ValueError):
        raise DataError(_DAMAGED) from None
    values = first + np.cumsum(np.concatenate([np.zeros(1, np.int64), *steps])[:total])
    if values.min() < 0 or values.max() >= 1 << 31:
        raise DataError(_DAMAGED)
    return int(values.sum())


def _steps(
    data: bytes, at: int, total: int, shape: tuple[int, int]
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the differences between `total` neighbouring lengths, in blocks of `shape`."""
    block_size, num_parts = shape
    size = block_size // num_parts
    found, count = [], 0
    while count < total:
        least, at = _length(data, at)
        widths = [data[at + part] for part in range(num_parts)]
        at += num_parts
        for width in widths:
            if count >= total:
                break
            if width > _MAX_WIDTH_BITS:
                raise DataError(_DAMAGED)
            packed = np.frombuffer(data, np.uint8, width * size // 8, at)
            bits = np.unpackbits(packed, bitorder="little").reshape(size, width)
            found.append(least + bits @ (1 << np.arange(width, dtype=np.int64)))
            at += packed.size
            count += size
    return found


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Read a length or a difference of two, and return the offset behind it."""
    value, at = signed(data, at)
    if abs(value) >= 1 << 31:
        raise DataError(_DAMAGED)
    return value, at
