"""tf.Example kernels: compiled loops that find features in protobuf messages and copy their values.

Covers: protobuf's wire format as far as tf.Example needs it.
Does not: find records (frame_kernels), know columns' types and shapes (example).
Threads: any; pure, releases the GIL.

The bytes are untrusted: every read checks its bounds first.

Wire format (protobuf.dev/programming-guides/encoding): a tag is field * 8 + type; type 0 is a
varint, 1 and 5 are 8 and 4 bytes, 2 is a length and that many bytes.
    Example  { 1: Features }
    Features { 1: entry { 1: key, 2: Feature } repeated }
    Feature  { one of 1: BytesList, 2: FloatList, 3: Int64List }, each { 1: value repeated }
Of equal keys, and of lists of different kinds in one feature, the last one counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from feeding.columnar.chunk import Array
from feeding.formats.kernel_cache import kernel
from feeding.formats.tfrecord.byte_kernels import copy_bytes, word_at

OK, MALFORMED, WRONG_KIND = range(3)
"""Faults of a feature."""
_VARINT_BYTES = 10
_AT, _HEAD_BYTES, _ENTRY_BYTES, _FEATURE_BYTES, _COLUMN = range(5)
"""Fields of a remembered entry: its offset, its bytes up to the feature, all of its bytes, the
bytes of the feature, its column."""

_inline: Callable[[Any], Any] = numba.njit(nogil=True, forceinline=True, error_model="numpy")


@_inline
def _varint(buffer: Array, at: int, stop: int) -> tuple[Any, int]:
    """Return (value, next offset); the offset is -1 if the varint is truncated or too long."""
    if at < stop and buffer[at] < 128:
        return np.uint64(buffer[at]), at + 1
    value, shift = np.uint64(0), np.uint64(0)
    last = min(stop, at + _VARINT_BYTES)
    while at < last:
        byte = np.uint64(buffer[at])
        value |= (byte & np.uint64(127)) << shift
        shift += np.uint64(7)
        at += 1
        if byte < 128:
            return value, at
    return value, -1


@_inline
def _field(buffer: Array, at: int, stop: int) -> tuple[Any, Any, Any]:
    """Return (tag, start of the content, its end); the end is -1 if malformed."""
    tag, at = _varint(buffer, at, stop)
    if at < 0:
        return tag, -1, -1
    kind = tag & np.uint64(7)
    if kind == 2:
        length, at = _varint(buffer, at, stop)
        if at < 0 or length > np.uint64(stop - at):
            return tag, -1, -1
        return tag, at, at + np.int64(length)
    if kind == 0:
        _, end = _varint(buffer, at, stop)
        return tag, at, end
    width = 4 if kind == 5 else 8
    if (kind != 5 and kind != 1) or at + width > stop:
        return tag, -1, -1
    return tag, at, at + width


@_inline
def _same(buffer: Array, left: int, right: int, length: int) -> bool:
    index = 0
    while index + 8 <= length:
        if word_at(buffer, left + index) != word_at(buffer, right + index):
            return False
        index += 8
    while index < length and buffer[left + index] == buffer[right + index]:
        index += 1
    return index == length


@_inline
def _find(buffer: Array, start: int, length: int, names: Array, bounds: Array) -> int:
    for column in range(bounds.size - 1):
        first = bounds[column]
        index = 0 if bounds[column + 1] - first == length else -1
        while 0 <= index < length and buffer[start + index] == names[first + index]:
            index += 1
        if index == length:
            return column
    return -1


@_inline
def _entry(buffer: Array, at: int, stop: int) -> tuple[int, int, int, int]:
    """Return key and feature of a map entry as (start, stop, start, stop); -1 first: malformed."""
    key, key_stop, value, value_stop = 0, 0, 0, 0
    while at < stop:
        tag, begin, end = _field(buffer, at, stop)
        if end < 0:
            return -1, 0, 0, 0
        if tag == 10:
            key, key_stop = begin, end
        elif tag == 18:
            value, value_stop = begin, end
        at = end
    return key, key_stop, value, value_stop


@_inline
def _as_before(buffer: Array, at: int, stop: int, known: Array) -> Any:
    """Return whether an entry has the layout and name of that at its index in the last record."""
    return at + known[_ENTRY_BYTES] <= stop and _same(buffer, at, known[_AT], known[_HEAD_BYTES])


@_inline
def _features(
    buffer: Array, at: int, stop: int, before: Array, columns: tuple[Array, Array], spans: Array
) -> bool:
    """Store the spans of one record's features; False: malformed."""
    place = 0
    while at < stop:
        known = before[min(place, before.shape[0] - 1)]
        if known[_ENTRY_BYTES] == 0 or not _as_before(buffer, at, stop, known):
            tag, entry, end = _field(buffer, at, stop)
            if end < 0:
                return False
            if tag != 10:
                at = end
                continue
            key, key_stop, value, value_stop = _entry(buffer, entry, end)
            if key < 0:
                return False
            # The offsets can be reused for the next record only if the feature ends the entry.
            known[_ENTRY_BYTES] = end - at if value_stop == end and key < value else 0
            known[_HEAD_BYTES] = value - at
            known[_COLUMN] = _find(buffer, key, key_stop - key, columns[0], columns[1])
            known[_FEATURE_BYTES] = value_stop - value
        else:
            value = at + known[_HEAD_BYTES]
            end = at + known[_ENTRY_BYTES]
        known[_AT] = at
        if known[_COLUMN] >= 0:
            spans[known[_COLUMN], 0] = value
            spans[known[_COLUMN], 1] = value + known[_FEATURE_BYTES]
        place += 1
        at = end
    return True


@kernel
def locate(
    buffer: Array, starts: Array, lengths: Array, columns: tuple[Array, Array], spans: Array
) -> int:
    """Find the features of some columns in each record's tf.Example.

    Args:
        buffer: uint8, holds the records.
        starts: int64[n], offset of each record.
        lengths: int64[n], bytes of each.
        columns: joined names, uint8[bytes], and their offsets, int64[c + 1].
        spans: int64[c, 2, n], filled with start and end of each Feature; start -1 if there is none.
            spans[k], of one column, is contiguous: the other kernels are compiled for that alone.

    Returns:
        The index of a record that is not a tf.Example, -1 if all are.
    """
    before = np.zeros((4 * columns[1].size + 16, 5), np.int64)
    spans[:, 0] = -1
    for record in range(starts.size):
        at, stop = starts[record], starts[record] + lengths[record]
        while at < stop:
            tag, inner, at = _field(buffer, at, stop)
            if at < 0:
                return record
            if tag == 10 and not _features(buffer, inner, at, before, columns, spans[:, :, record]):
                return record
    return -1


@_inline
def _count_packed(buffer: Array, begin: int, end: int, kind: int) -> int:
    """Return the number of values in a packed list of floats (2) or varints (3), -1: malformed."""
    if kind == 2:
        return -1 if (end - begin) % 4 else (end - begin) // 4
    if end > begin and buffer[end - 1] >= 128:
        return -1
    count = 0
    for index in range(begin, end):
        count += buffer[index] < 128
    return count


@_inline
def _count_list(buffer: Array, at: int, stop: int, kind: int) -> int:
    """Return the number of values in a BytesList (1), FloatList (2) or Int64List (3), -1: bad."""
    count = 0
    while at < stop:
        tag, begin, at = _field(buffer, at, stop)
        if at < 0:
            return -1
        if tag == 10:
            more = 1 if kind == 1 else _count_packed(buffer, begin, at, kind)
            if more < 0:
                return -1
            count += more
        elif (kind == 2 and tag == 13) or (kind == 3 and tag == 8):
            count += 1
    return count


@_inline
def _listed(tag: Any) -> Any:
    """Return which list of a Feature a field is: 1 bytes, 2 floats, 3 integers, 0 none."""
    number = np.int64(tag >> np.uint64(3))
    return number if tag & np.uint64(7) == 2 and number <= 3 else np.int64(0)


@kernel
def count_values(buffer: Array, spans: Array, kind: int, counts: Array) -> tuple[int, int]:
    """Count the values of one column in each record.

    Args:
        buffer: uint8, holds the records.
        spans: int64[2, n], start and end of the column's feature in each record.
        kind: 1 bytes, 2 floats, 3 integers.
        counts: int64[n], filled; -1 for records without the feature.

    Returns:
        (index of a faulty record, its fault), or (-1, OK).
    """
    for record in range(spans.shape[1]):
        at, stop = spans[0, record], spans[1, record]
        found, count = 0, 0
        while 0 <= at < stop:
            tag, begin, end = _field(buffer, at, stop)
            if end < 0:
                return record, MALFORMED
            at = end
            listed = _listed(tag)
            if listed and listed != found:
                found, count = listed, 0
            if listed == kind:
                more = _count_list(buffer, begin, end, kind)
                if more < 0:
                    return record, MALFORMED
                count += more
        if found and found != kind:
            return record, WRONG_KIND
        counts[record] = count if found else -1
    return -1, OK


@_inline
def _copy_floats(buffer: Array, at: int, stop: int, out: Array, place: int, last: int) -> int:
    while at < stop:
        tag, begin, end = _field(buffer, at, stop)
        at = end
        if tag != 10 and tag != 13:
            continue
        width = min(end - begin, 4 * (last - place))
        copy_bytes(out, 4 * place, buffer, begin, width)
        place += width // 4
    return place


@_inline
def _copy_ints(buffer: Array, at: int, stop: int, out: Array, place: int, last: int) -> int:
    while at < stop:
        tag, begin, end = _field(buffer, at, stop)
        at = end
        if tag != 10 and tag != 8:
            continue
        while begin < end and place < last:
            value, begin = _varint(buffer, begin, end)
            if begin < 0:
                return -1
            out[place] = np.int64(value)
            place += 1
    return place


@_inline
def _last_run(buffer: Array, at: int, stop: int, kind: int) -> int:
    """Return the start of the lists of this kind that no list of another kind follows."""
    run = at
    while at < stop:
        tag, _, at = _field(buffer, at, stop)
        listed = _listed(tag)
        if listed and listed != kind:
            run = at
    return run


@kernel
def copy_floats(buffer: Array, spans: Array, offsets: Array, out: Array) -> None:
    """Copy a column's floats.

    Args:
        buffer: uint8, holds the records.
        spans: int64[2, n], start and end of the feature in each record.
        offsets: int64[n + 1], in values, from `count_values`.
        out: float32[items] viewed as uint8.
    """
    for record in range(spans.shape[1]):
        place, last, stop = offsets[record], offsets[record + 1], spans[1, record]
        if spans[0, record] < 0 or place == last:
            continue
        at = _last_run(buffer, spans[0, record], stop, 2)
        while at < stop:
            tag, begin, end = _field(buffer, at, stop)
            at = end
            if tag == 18:
                place = _copy_floats(buffer, begin, end, out, place, last)


@kernel
def copy_single_floats(buffer: Array, spans: Array, out: Array) -> bool:
    """Copy a column of one float per record to float32[n] as uint8; False if a record differs.

    Args:
        buffer: [bytes] uint8, whole records.
        spans: [2, n] int64, start and end of the column's feature in each record.
        out: [4 * n] uint8; filled.
    """
    for record in range(spans.shape[1]):
        at = spans[0, record]
        if at < 0 or spans[1, record] - at != 8 or not _opens(buffer, at, 18, 8):
            return False
        copy_bytes(out, 4 * record, buffer, at + 4, 4)
    return True


@kernel
def copy_single_ints(buffer: Array, spans: Array, out: Array) -> bool:
    """Copy a column of one integer per record to int64[n]; False if a record differs.

    Args:
        buffer: [bytes] uint8, whole records.
        spans: [2, n] int64, start and end of the column's feature in each record.
        out: [n] int64; filled.
    """
    for record in range(spans.shape[1]):
        at, stop = spans[0, record], spans[1, record]
        if at < 0 or not 5 <= stop - at <= 14 or not _opens(buffer, at, 26, stop - at):
            return False
        value, end = _varint(buffer, at + 4, stop)
        if end != stop:
            return False
        out[record] = np.int64(value)
    return True


@_inline
def _opens(buffer: Array, at: int, tag: int, num_bytes: int) -> Any:
    """Return whether a feature is one packed list: tag, length, tag, length, values."""
    return (
        buffer[at] == tag
        and buffer[at + 1] == num_bytes - 2
        and buffer[at + 2] == 10
        and buffer[at + 3] == num_bytes - 4
    )


@kernel
def copy_ints(buffer: Array, spans: Array, offsets: Array, out: Array) -> int:
    """Copy a column's integers to out[offsets[i]:], int64[items]; arguments: see `copy_floats`.

    Returns:
        The index of a record with a varint of more than ten bytes, -1 if there is none.
    """
    for record in range(spans.shape[1]):
        place, last, stop = offsets[record], offsets[record + 1], spans[1, record]
        if spans[0, record] < 0 or place == last:
            continue
        at = _last_run(buffer, spans[0, record], stop, 3)
        while at < stop:
            tag, begin, end = _field(buffer, at, stop)
            at = end
            if tag == 26:
                place = _copy_ints(buffer, begin, end, out, place, last)
                if place < 0:
                    return record
    return -1


@kernel
def find_bytes(buffer: Array, spans: Array, offsets: Array, found: Array) -> None:
    """Store start and end of a column's byte strings in found, int64[2, items].

    Args:
        buffer: [bytes] uint8, whole records.
        spans: [2, n] int64, start and end of the column's feature in each record.
        offsets: [n + 1] int64, number of the first item of each record.
        found: [2, items] int64; filled with starts and ends in `buffer`.
    """
    for record in range(spans.shape[1]):
        place, last, stop = offsets[record], offsets[record + 1], spans[1, record]
        if spans[0, record] < 0 or place == last:
            continue
        at = _last_run(buffer, spans[0, record], stop, 1)
        while at < stop:
            tag, inner, at = _field(buffer, at, stop)
            if tag != 10:
                continue
            inner_stop = at
            while inner < inner_stop and place < last:
                tag, begin, inner = _field(buffer, inner, inner_stop)
                if tag == 10:
                    found[0, place] = begin
                    found[1, place] = inner
                    place += 1
