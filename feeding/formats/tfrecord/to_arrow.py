"""tf.Example to Arrow decoder: records to Arrow columns with nulls, whole columns at a time.

Covers: ArrowDecoder, records_as_binary.
Does not: read files (records), know Spark's types (tfos.datasource).
Threads: a decoder has no state; calls may run in parallel, without the GIL.

    column                      in a record
    float, double               a float list of one value
    int8 to int64, bool         an int64 list of one value
    string, binary              a bytes list of one value
    list of one of these        the same kind of list, with any number of values
A record without the feature, or with a feature without a list, gives null; so does an empty list
where one value is expected. In a list column an empty list is an empty list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from feeding.columnar.chunk import Array
from feeding.columnar.ops import row_of
from feeding.errors import FeedSettingsError
from feeding.formats.tfrecord import example_kernels as kernels
from feeding.formats.tfrecord.byte_kernels import gather
from feeding.formats.tfrecord.example import (
    BYTES,
    FLOATS,
    INTS,
    narrowed,
    numbers_of,
    packed_names,
    single_numbers,
    value_counts,
)
from feeding.formats.tfrecord.framing import RecordBlock
from feeding.formats.tfrecord.records import RecordDamage, without_damaged
from feeding.reading.bad_records import BadData

_MAX_OFFSET = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class ArrowColumn:
    """One requested column, and the kind of list that holds it."""

    name: str
    type: pa.DataType
    nullable: bool
    kind: int

    @property
    def item_type(self) -> pa.DataType:
        """Arrow type of one value."""
        return self.type.value_type if self.is_list else self.type

    @property
    def is_list(self) -> bool:
        """Whether a record may have any number of values."""
        return bool(pa.types.is_list(self.type))


def column_of(field: pa.Field) -> ArrowColumn:
    """Return the column of a field of a schema.

    Raises:
        FeedSettingsError: a tf.Example cannot hold values of its type.
    """
    item = field.type.value_type if pa.types.is_list(field.type) else field.type
    if pa.types.is_string(item) or pa.types.is_binary(item):
        kind = BYTES
    elif pa.types.is_float32(item) or pa.types.is_float64(item):
        kind = FLOATS
    elif pa.types.is_signed_integer(item) or pa.types.is_boolean(item):
        kind = INTS
    else:
        raise FeedSettingsError(
            f"column {field.name!r} is {field.type}; a tf.Example holds numbers, booleans, text, "
            "bytes, and lists of these"
        )
    return ArrowColumn(field.name, field.type, field.nullable, kind)


class ArrowDecoder:
    """Decodes records to Arrow columns.

    Args:
        schema: the columns; other features of the records are ignored.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = [column_of(field) for field in schema]
        self._names = packed_names(column.name for column in self._columns)

    def decode(self, block: RecordBlock, file: str, bad: BadData) -> tuple[int, list[pa.Array]]:
        """Return the number of good records n, and an array [n] for each field of the schema.

        Args:
            block: the records.
            file: their file, for messages.
            bad: policy for records that are no tf.Example or do not fit the schema.

        Raises:
            DataError: names file, record, byte and feature.
        """

        def make(starts: Array, lengths: Array) -> tuple[int, list[pa.Array]]:
            spans = np.empty((len(self._columns), 2, len(starts)), np.int64)
            record = kernels.locate(block.buffer, starts, lengths, self._names, spans)
            if record >= 0:
                raise RecordDamage(record, "it is not a tf.Example")
            columns = [
                arrow_column(block.buffer, column, spans[index])
                for index, column in enumerate(self._columns)
            ]
            return len(starts), columns

        return without_damaged(block, file, bad, make)


def records_as_binary(block: RecordBlock) -> pa.Array:
    """Return the records themselves as one binary column."""
    return _strings(pa.binary(), block.buffer, block.starts, block.lengths, None)


def arrow_column(buffer: Array, column: ArrowColumn, spans: Array) -> pa.Array:
    """Return one column of n records.

    Args:
        buffer: uint8, holds the records.
        column: to decode.
        spans: int64[2, n], start and end of its feature in each record (kernels.locate).
    """
    if not column.is_list and column.kind != BYTES:
        single = single_numbers(buffer, column.kind, spans)
        if single is not None:
            return _numbers(column, single, None, None)
    counts = _counts(buffer, column, spans)
    lacking = counts < 0
    if not column.is_list:
        _check_single(column, counts)
        lacking |= counts == 0
    if not column.nullable and lacking.any():
        raise RecordDamage(
            int(lacking.argmax()),
            f"it lacks feature {column.name!r}, which is not nullable in the schema",
        )
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(np.maximum(counts, 0), out=offsets[1:])
    if offsets[-1] > _MAX_OFFSET:
        raise RecordDamage(0, f"{offsets[-1]} values of {column.name!r} in one block are too many")
    validity = _bitmap(~lacking) if lacking.any() else None
    if column.is_list:
        items = _items(buffer, column, spans, offsets, None)
        ends = pa.py_buffer(offsets.astype(np.int32))
        return pa.ListArray.from_buffers(
            column.type, len(counts), [validity, ends], children=[items]
        )
    return _items(buffer, column, spans, offsets, lacking if validity else None)


def _counts(buffer: Array, column: ArrowColumn, spans: Array) -> Array:
    why = (
        f"from which {column.type} is read; floats are in a float list, integers and booleans in "
        "an int64 list, text and bytes in a bytes list"
    )
    return value_counts(buffer, column.name, column.kind, spans, why)


def _check_single(column: ArrowColumn, counts: Array) -> None:
    record = int(counts.argmax()) if len(counts) else 0
    if len(counts) and counts[record] > 1:
        raise RecordDamage(
            record,
            f"it has {counts[record]} values of feature {column.name!r}, where {column.type} is "
            "one; give a schema with an array type",
        )


def _items(
    buffer: Array, column: ArrowColumn, spans: Array, offsets: Array, lacking: Array | None
) -> pa.Array:
    """Return all values; with `lacking`, bool[n], one value or null per record."""
    if column.kind != BYTES:
        numbers = numbers_of(buffer, column.name, column.kind, spans, offsets)
        return _numbers(column, numbers, offsets, lacking)
    found = np.empty((2, int(offsets[-1])), np.int64)
    kernels.find_bytes(buffer, spans, offsets, found)
    starts, lengths = found[0], found[1] - found[0]
    if lacking is not None:
        starts, lengths = _spread(starts, lacking), _spread(lengths, lacking)
    strings = _strings(column.item_type, buffer, starts, lengths, lacking)
    if pa.types.is_string(column.item_type):
        _check_text(column.name, strings, offsets if lacking is None else None)
    return strings


def _numbers(
    column: ArrowColumn, values: Array, offsets: Array | None, lacking: Array | None
) -> pa.Array:
    item = column.item_type
    # to_pandas_dtype() says the same, but pyarrow 18 imports pandas for it.
    dtype = pa.array([], item).to_numpy(zero_copy_only=False).dtype.name
    values = narrowed(column.name, dtype, values, offsets)
    if lacking is not None:
        values = _spread(values, lacking)
    data = _bitmap(values) if dtype == "bool" else pa.py_buffer(values)
    validity = None if lacking is None else _bitmap(~lacking)
    return pa.Array.from_buffers(item, len(values), [validity, data])


def _strings(
    kind: pa.DataType, buffer: Array, starts: Array, lengths: Array, lacking: Array | None
) -> pa.Array:
    ends = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    if ends[-1] > _MAX_OFFSET:
        raise RecordDamage(0, f"{ends[-1]} bytes in one block are too many")
    data = np.empty(ends[-1], np.uint8)
    gather(buffer, starts, lengths, data, ends)
    validity = None if lacking is None else _bitmap(~lacking)
    buffers = [validity, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(data)]
    return pa.Array.from_buffers(kind, len(starts), buffers)


def _check_text(name: str, strings: pa.Array, offsets: Array | None) -> None:
    try:
        strings.validate(full=True)
    except pa.ArrowInvalid:
        at = next(index for index, value in enumerate(strings.view(pa.binary())) if _is_bad(value))
        raise RecordDamage(
            row_of(offsets, at),
            f"its feature {name!r} holds bytes that are not UTF-8, which a string column must be; "
            "read it as binary",
        ) from None


def _is_bad(value: pa.Scalar) -> bool:
    try:
        (value.as_py() or b"").decode()
    except UnicodeDecodeError:
        return True
    return False


def _spread(values: Array, lacking: Array) -> Array:
    """Return one value per record, 0 for records without it."""
    out = np.zeros(len(lacking), values.dtype)
    out[~lacking] = values
    return out


def _bitmap(flags: Array) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
