"""tf.Example write kernels: compiled loops that write columns of a whole batch as messages.

Covers: the size of each record, and its bytes; packed integers.
Does not: frame records (frame_kernels), know columns' types (from_arrow).
Threads: any; pure, releases the GIL.

example_kernels has the format. A column is written for all records before the next column; each
record has a cursor. `ranges`, int64[2, n], has the range of each record's values in a column: from
ranges[0, i] to ranges[1, i], excluded; a start of -1: the record does not have the feature.

Arguments of all kernels, for n records:
    out        uint8, gets the messages             cursors  int64[n], write position of each record
    key        uint8, the column's name             lists    int64[n], bytes of each record's list
    values     int64[items]; floats as uint8        ends     int32 or int64[k + 1], ends of strings
    totals     int64[n], bytes of a record's entries          lengths  int64[n], bytes of a record
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from feeding.columnar.chunk import Array
from feeding.formats.kernel_cache import kernel
from feeding.formats.tfrecord.byte_kernels import copy_bytes

_BYTES, _FLOATS, _INTS = 10, 18, 26
"""Tags of a Feature's lists."""

_inline: Callable[[Any], Any] = numba.njit(nogil=True, forceinline=True, error_model="numpy")


@_inline
def _varint_bytes(value: Any) -> Any:
    rest, count = np.uint64(value), 1
    while rest >= 128:
        rest >>= np.uint64(7)
        count += 1
    return count


@_inline
def _write_varint(out: Array, at: int, value: Any) -> Any:
    rest = np.uint64(value)
    while rest >= 128:
        out[at] = np.uint8(rest & np.uint64(127)) | np.uint8(128)
        rest >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(rest)
    return at + 1


@kernel
def pack_varints(values: Array, out: Array) -> int:
    """Write int64 values as varints into `out`; returns the bytes.

    Args:
        values: [n] int64.
        out: [10 * n] uint8; filled from its start.
    """
    at = 0
    for value in values:
        at = _write_varint(out, at, value)
    return at


@_inline
def _field_bytes(length: Any) -> Any:
    """Return the bytes of a field of `length` bytes, with its tag and length."""
    return 1 + _varint_bytes(length) + length


@kernel
def float_lists(ranges: Array, lists: Array) -> None:
    """Fill lists[i] with the bytes of record i's FloatList."""
    for index in range(lists.size):
        count = ranges[1, index] - ranges[0, index]
        lists[index] = _field_bytes(4 * count) if count else 0


@kernel
def int_lists(ranges: Array, values: Array, lists: Array) -> None:
    """Fill lists[i] with the bytes of record i's Int64List."""
    for index in range(lists.size):
        size = 0
        if ranges[0, index] >= 0:
            for place in range(ranges[0, index], ranges[1, index]):
                size += _varint_bytes(values[place])
        lists[index] = _field_bytes(size) if size else 0


@kernel
def byte_lists(ranges: Array, ends: Array, lists: Array) -> None:
    """Fill lists[i] with the bytes of record i's BytesList; value k ends at ends[k + 1]."""
    for index in range(lists.size):
        size = 0
        if ranges[0, index] >= 0:
            for place in range(ranges[0, index], ranges[1, index]):
                size += _field_bytes(np.int64(ends[place + 1]) - np.int64(ends[place]))
        lists[index] = size


@_inline
def _entry_bytes(key_bytes: int, list_bytes: Any) -> Any:
    return _field_bytes(key_bytes) + _field_bytes(_field_bytes(list_bytes))


@kernel
def add_entries(ranges: Array, lists: Array, key_bytes: int, totals: Array) -> None:
    """Add the bytes of one column's map entries to each record's total."""
    for index in range(totals.size):
        if ranges[0, index] >= 0:
            totals[index] += _field_bytes(_entry_bytes(key_bytes, lists[index]))


@kernel
def record_bytes(totals: Array, lengths: Array) -> None:
    """Fill lengths[i] with the bytes of a whole Example whose entries have totals[i]."""
    for index in range(totals.size):
        lengths[index] = _field_bytes(totals[index])


@kernel
def open_records(out: Array, totals: Array, cursors: Array) -> None:
    """Write the beginning of each Example at its cursor."""
    for index in range(cursors.size):
        out[cursors[index]] = 10
        cursors[index] = _write_varint(out, cursors[index] + 1, totals[index])


@_inline
def _open_entry(out: Array, at: int, key: Array, list_bytes: Any, tag: int) -> Any:
    """Write a map entry up to the content of its list; return the next place."""
    feature_bytes = _field_bytes(list_bytes)
    out[at] = 10
    at = _write_varint(out, at + 1, _entry_bytes(key.size, list_bytes))
    out[at] = 10
    at = _write_varint(out, at + 1, key.size)
    for index in range(key.size):
        out[at + index] = key[index]
    at += key.size
    out[at] = 18
    at = _write_varint(out, at + 1, feature_bytes)
    out[at] = tag
    return _write_varint(out, at + 1, list_bytes)


@kernel
def write_floats(
    out: Array, cursors: Array, key: Array, ranges: Array, lists: Array, values: Array
) -> None:
    """Write one column of floats, given as bytes, at the cursors."""
    for index in range(cursors.size):
        start, stop = ranges[0, index], ranges[1, index]
        if start < 0:
            continue
        at = _open_entry(out, cursors[index], key, lists[index], _FLOATS)
        if stop > start:
            out[at] = 10
            at = _write_varint(out, at + 1, 4 * (stop - start))
            copy_bytes(out, at, values, 4 * start, 4 * (stop - start))
            at += 4 * (stop - start)
        cursors[index] = at


@kernel
def write_ints(
    out: Array, cursors: Array, key: Array, ranges: Array, lists: Array, values: Array
) -> None:
    """Write one column of int64 at the cursors."""
    for index in range(cursors.size):
        start, stop = ranges[0, index], ranges[1, index]
        if start < 0:
            continue
        at = _open_entry(out, cursors[index], key, lists[index], _INTS)
        if stop > start:
            size = 0
            for place in range(start, stop):
                size += _varint_bytes(values[place])
            out[at] = 10
            at = _write_varint(out, at + 1, size)
            for place in range(start, stop):
                at = _write_varint(out, at, values[place])
        cursors[index] = at


@kernel
def write_strings(
    out: Array,
    cursors: Array,
    key: Array,
    ranges: Array,
    lists: Array,
    strings: tuple[Array, Array],
) -> None:
    """Write one column of byte strings, given as (ends, data), at the cursors."""
    ends, data = strings
    for index in range(cursors.size):
        start, stop = ranges[0, index], ranges[1, index]
        if start < 0:
            continue
        at = _open_entry(out, cursors[index], key, lists[index], _BYTES)
        for place in range(start, stop):
            length = np.int64(ends[place + 1]) - np.int64(ends[place])
            out[at] = 10
            at = _write_varint(out, at + 1, length)
            copy_bytes(out, at, data, ends[place], length)
            at += length
        cursors[index] = at
