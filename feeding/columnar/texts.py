"""Lists of texts: the texts of one row as one value of bytes.

Covers: packing of whole columns, unpacking of one row.
Does not: know Arrow or chunks.      Threads: any; pure.

    row    = text*                      of the row, in order; none: no bytes
    text   = length, UTF-8 bytes        length: uint32, little-endian, in bytes
"""

from __future__ import annotations

import numpy as np

from feeding.columnar.chunk import Array
from feeding.errors import ChunkError

_HEAD_BYTES = 4


def packed(data: Array, starts: Array, rows: Array) -> tuple[Array, Array]:
    """Return the packed rows of a column.

    Args:
        data: uint8[bytes], the texts, one behind the other.
        starts: int64[texts + 1], where each text begins and the last one ends.
        rows: int64[n + 1], offsets of the rows, in texts.

    Returns:
        The bytes of all rows, uint8, and their offsets, int64[n + 1].
    """
    heads = starts + _HEAD_BYTES * np.arange(starts.size)
    out = np.empty(int(heads[-1]), np.uint8)
    is_text = np.ones(out.size, np.bool_)
    places = heads[:-1, None] + np.arange(_HEAD_BYTES)
    is_text[places] = False
    out[places] = np.diff(starts).astype("<u4").view(np.uint8).reshape(-1, _HEAD_BYTES)
    out[is_text] = data
    return out, heads[rows]


def unpacked(row: memoryview, name: str) -> list[str]:
    """Return the texts of one row.

    Args:
        row: its bytes.
        name: name of the column, for errors.

    Raises:
        ChunkError: the lengths do not add up, or a text is not UTF-8.
    """
    found = []
    at = 0
    while at < len(row):
        begin = at + _HEAD_BYTES
        at = begin + int.from_bytes(row[at:begin], "little")
        if at > len(row):
            raise ChunkError(
                f"column {name!r}: a text ends at byte {at} of a row of {len(row)}; the feed task "
                "and the worker differ: install the same tfos for both"
            )
        try:
            found.append(str(row[begin:at], "utf-8"))
        except UnicodeDecodeError as error:
            raise ChunkError(f"column {name!r}: text that is not UTF-8: {error.reason}") from None
    return found
