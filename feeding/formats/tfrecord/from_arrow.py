"""tf.Example encoder: Arrow columns to framed records, whole batches at a time.

Covers: ExampleEncoder, framed (records that are bytes already).
Does not: write files, know Spark's types (tfos.datasource).
Threads: an encoder has no state; most of its time is without the GIL.

Numbers become float and int64 lists, text and bytes become bytes lists, as to_arrow reads them. A
null is left out; an empty list is an empty list of its kind. Keys are written in sorted order, so
equal rows give equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from feeding.columnar.chunk import Array
from feeding.errors import RowError
from feeding.formats.tfrecord import frame_kernels
from feeding.formats.tfrecord import write_kernels as kernels
from feeding.formats.tfrecord.byte_kernels import gather
from feeding.formats.tfrecord.example import BYTES, FLOATS
from feeding.formats.tfrecord.to_arrow import column_of

_FRAME_BYTES = frame_kernels.FRAME_HEAD + frame_kernels.FRAME_FOOT


class ExampleEncoder:
    """Encodes batches as framed records.

    Args:
        schema: schema of the batches; every field becomes a feature.

    Raises:
        FeedSettingsError: a tf.Example cannot hold a column's type.
    """

    def __init__(self, schema: pa.Schema) -> None:
        columns = {field.name: column_of(field) for field in schema}
        self._columns = [columns[name] for name in sorted(columns)]
        self._keys = [np.frombuffer(column.name.encode(), np.uint8) for column in self._columns]

    def encode(self, batch: pa.RecordBatch) -> Array:
        """Return the joined frames of all rows, uint8[bytes].

        Raises:
            RowError: a list holds a null, which a tf.Example cannot.
        """
        sources = [
            _source(column.name, column.kind, batch.column(column.name)) for column in self._columns
        ]
        totals = np.zeros(batch.num_rows, np.int64)
        for key, source in zip(self._keys, sources, strict=True):
            kernels.add_entries(source.ranges, source.lists, len(key), totals)
        lengths = np.empty_like(totals)
        kernels.record_bytes(totals, lengths)
        out, starts = _room(lengths)
        cursors = starts.copy()
        kernels.open_records(out, totals, cursors)
        for key, source in zip(self._keys, sources, strict=True):
            source.write(out, cursors, key, source.ranges, source.lists, source.values)
        frame_kernels.seal(out, starts, lengths)
        return out


def framed(records: pa.Array) -> Array:
    """Return the joined frames of binary values that are records already, uint8[bytes].

    Raises:
        RowError: a value is null.
    """
    if records.null_count:
        row = records.is_null().index(True).as_py()
        raise RowError(f"row {row} of a batch holds no record, but null")
    ends, data = _strings(records)
    lengths = np.diff(ends).astype(np.int64)
    out, starts = _room(lengths)
    gather(data, ends[:-1].astype(np.int64), lengths, out, starts)
    frame_kernels.seal(out, starts, lengths)
    return out


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of a batch, for the kernels."""

    ranges: Array
    lists: Array
    """int64[n], bytes of each record's list."""
    values: Any
    write: Any


def _source(name: str, kind: int, array: pa.Array) -> _Column:
    ranges, items = _ranges(name, array)
    lists = np.empty(len(array), np.int64)
    if kind == BYTES:
        strings = _strings(items)
        kernels.byte_lists(ranges, strings[0], lists)
        return _Column(ranges, lists, strings, kernels.write_strings)
    if kind == FLOATS:
        floats = _numbers(items, pa.float32())
        kernels.float_lists(ranges, lists)
        return _Column(ranges, lists, floats.view(np.uint8), kernels.write_floats)
    ints = _numbers(items, pa.int64())
    kernels.int_lists(ranges, ints, lists)
    return _Column(ranges, lists, ints, kernels.write_ints)


def _ranges(name: str, array: pa.Array) -> tuple[Array, pa.Array]:
    """Return the ranges of each row's values, int64[2, n], and the values."""
    ranges = np.empty((2, len(array)), np.int64)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        flat = array.flatten()
        if flat.null_count:
            raise RowError(
                f"column {name!r} has a null inside a list, which a tf.Example cannot hold; "
                "fill or filter it"
            )
        offsets = array.offsets.to_numpy()
        ranges[0], ranges[1] = offsets[:-1], offsets[1:]
        items = array.values
    else:
        ranges[0] = np.arange(len(array))
        ranges[1] = ranges[0] + 1
        items = array
    if array.null_count:
        ranges[:, array.is_null().to_numpy(zero_copy_only=False)] = -1
    return ranges, items


def _numbers(items: pa.Array, kind: pa.DataType) -> Array:
    filled = pc.fill_null(items, _ZEROS.get(items.type, 0)) if items.null_count else items
    if pa.types.is_boolean(items.type):
        filled = filled.cast(pa.int8())
    return _as_read(filled.cast(kind, safe=False).to_numpy(zero_copy_only=False))


_ZEROS = {pa.bool_(): False}


def _strings(items: pa.Array) -> tuple[Array, Array]:
    """Return (ends, data) of byte strings: value i is data[ends[i]:ends[i + 1]]."""
    _, ends, data = items.buffers()
    is_large = pa.types.is_large_string(items.type) or pa.types.is_large_binary(items.type)
    dtype = np.int64 if is_large else np.int32
    if ends is None or not len(items):
        return _as_read(np.zeros(1, dtype)), _as_read(np.zeros(0, np.uint8))
    bounds = np.frombuffer(ends, dtype)[items.offset : items.offset + len(items) + 1]
    return bounds, np.frombuffer(data or b"", np.uint8)


def _as_read(values: Array) -> Array:
    """Return read-only values: numba would compile each kernel again for writable ones."""
    values = np.ascontiguousarray(values)
    values.flags.writeable = False
    return values


def _room(lengths: Array) -> tuple[Array, Array]:
    """Return a buffer for the frames of records, uint8, and the records' offsets, int64[n]."""
    ends = np.cumsum(lengths + _FRAME_BYTES)
    starts = ends - lengths - frame_kernels.FRAME_FOOT
    return np.empty(int(ends[-1]) if len(ends) else 0, np.uint8), starts
