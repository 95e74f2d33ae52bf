"""Stored columns: Arrow columns of CSV and Parquet files to numpy columns of a batch.

Covers: StoredColumn (a column by its dotted name), ColumnReader (an Arrow array to a column), the
checks that a value fits its column, and that no file has more columns than the first.
Does not: read files (formats.parquet, formats.csv), skip bad records (reading.bad_records).
Threads: any.

Types as in a feed (encoder): numbers and bool keep their dtype, decimals become float64, dates
int32 days and timestamps int64 microseconds since 1970-01-01, text and binary become object arrays,
lists of numbers and Spark's vectors a tensor or Ragged, lists of strings a Ragged of objects.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from feeding.arrow.arrays import DTYPES, LISTS, TEXTS, bounds, numbers, plain
from feeding.arrow.spark_vectors import BadVector, is_vector, lengths, spread
from feeding.columnar.batch import BatchColumn, Ragged
from feeding.columnar.chunk import Array
from feeding.columnar.ops import row_of
from feeding.columnar.schema import ColumnSpec
from feeding.errors import DataError, FeedSettingsError

_REFUSED = (
    "is {type}; a column is numbers, text, binary, dates, timestamps, decimals, vectors or lists "
    "of numbers or texts: name the columns that you need, or convert this one where the file is "
    "written"
)


_MOST_NAMED = 10


class BadValue(Exception):
    """A value that its column cannot hold.

    Args:
        row: number of the row within its batch, from 0.
        column: name of the column.
        text: the value and why it does not fit, for the message.
    """

    def __init__(self, row: int, column: str, text: str) -> None:
        super().__init__(f"column {column!r}: {text}")
        self.row = row


@dataclass(frozen=True, slots=True)
class StoredColumn:
    """A column of a file. A struct's fields are columns of their own, named `parent.child`."""

    name: str
    type: pa.DataType
    path: tuple[str, ...]
    """Field names from the top of the row."""

    def of(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the column's values in a batch, converted to numbers where the type has them."""
        array = batch.column(self.path[0])
        if self.path[1:]:
            array = pc.struct_field(array, list(self.path[1:]))
        return array if array.type.id == pa.lib.Type_DICTIONARY else plain(array)

    @property
    def is_vector(self) -> bool:
        """Whether it holds Spark's vectors."""
        return is_vector(self.type)

    @property
    def has_rows_of_items(self) -> bool:
        """Whether each value is several numbers, or texts."""
        return self.is_vector or self.type.id in LISTS

    @property
    def has_lists_of_texts(self) -> bool:
        """Whether each value is several texts."""
        return self.type.id in LISTS and TEXTS.get(self.item_type.id) == "str"

    @property
    def item_type(self) -> pa.DataType:
        """Arrow type of the values, or of a list's items, after conversion to numbers."""
        if self.is_vector:
            return pa.float64()
        return plain(pa.nulls(0, self._stored_item)).type

    @property
    def first_day(self) -> str | None:
        """First day on which all calendars and time zones agree; None: it has no days."""
        kind = self._stored_item
        if pa.types.is_date(kind):
            return "1582-10-15"
        return "1900-01-01" if pa.types.is_timestamp(kind) else None

    def as_read(self, value: Any) -> Any:
        """Return a date or datetime as the number that batches have for it; others as they are."""
        stored, kind = self._stored_item, None
        if type(value) is datetime.date and pa.types.is_date(stored):
            kind = pa.date32()
        if isinstance(value, datetime.datetime) and pa.types.is_timestamp(stored):
            kind = pa.timestamp("us")  # not the file's unit, which may be too coarse or end in 2262
        if kind is None:
            return value
        try:
            return plain(pa.array([value], kind))[0].as_py()
        except ValueError:  # pandas' NaT
            return value

    @property
    def _stored_item(self) -> pa.DataType:
        """Arrow type of the values, or of a list's items, as the file has it."""
        return self.type.value_type if self.type.id in LISTS else self.type


def stored_columns(schema: pa.Schema, file: str) -> dict[str, StoredColumn]:
    """Return all columns of a file by name.

    Args:
        schema: schema of the file.
        file: its path, for the error.

    Raises:
        DataError: two columns have the same name.
    """
    found: dict[str, StoredColumn] = {}
    for field in schema:
        for column in _below(field, ()):
            if column.name in found:
                raise DataError(f"{file} has two columns {column.name!r}")
            found[column.name] = column
    return found


def _below(field: pa.Field, above: tuple[str, ...]) -> Iterator[StoredColumn]:
    path = (*above, field.name)
    if pa.types.is_struct(field.type) and field.type.num_fields and not is_vector(field.type):
        for child in field.type:
            yield from _below(child, path)
    else:
        yield StoredColumn(".".join(path), field.type, path)


@dataclass(frozen=True, slots=True)
class ColumnReader:
    """Makes one column of batches.

    Args:
        column: column of the file.
        spec: spec of the batch: dtype, and shape of one row.
        fill: value that replaces a null; None refuses nulls.
    """

    column: StoredColumn
    spec: ColumnSpec
    fill: Any = None

    def __call__(self, batch: pa.RecordBatch) -> BatchColumn:
        """Return the column: [n, *shape], object [n] or Ragged; may be a view of the batch.

        Raises:
            BadValue: a row's value does not fit.
            ValueError, pyarrow.ArrowException: the batch is damaged.
        """
        array = self.column.of(batch)
        if self.column.has_rows_of_items:
            return self._rows_of_items(array)
        array = self._filled(array)
        return numbers(array) if self.spec.dtype else objects(array)

    def _filled(self, array: pa.Array, bounds: Array | None = None) -> pa.Array:
        """Return the array with nulls replaced; `bounds`: offsets of rows, for items of lists."""
        if not array.null_count:
            return array
        if self.fill is None:
            what = "null" if bounds is None else "null inside a list"
            raise self._bad(
                row_of(bounds, first_null(array)),
                f"{what}; pass nulls={{{self.column.name!r}: value}} to replace it, or filter such "
                "rows out",
            )
        if array.type.id == pa.lib.Type_DICTIONARY:
            array = array.dictionary_decode()
        return pc.fill_null(array, pa.scalar(self.fill, array.type))

    def _rows_of_items(self, array: pa.Array) -> BatchColumn:
        if array.null_count:
            raise self._bad(
                first_null(array), "null where a list is expected; drop such rows before"
            )
        if self.column.is_vector:
            try:
                values, offsets = spread(array)
            except BadVector as error:
                raise self._bad(error.row, str(error)) from None
        else:
            found = bounds(array)
            offsets = found - found[0]
            items = plain(array.values.slice(found[0], found[-1] - found[0]))
            filled = self._filled(items, offsets)
            values = numbers(filled) if self.spec.dtype else objects(filled)
        if self.spec.kind == "ragged" or not self.spec.dtype:
            return Ragged(values, offsets)
        size = math.prod(self.spec.shape)
        wrong = np.diff(offsets) != size
        if wrong.any():
            row = int(wrong.argmax())
            raise self._bad(
                row,
                f"{offsets[row + 1] - offsets[row]} values, expected {size} (shape "
                f"{self.spec.shape}); pass shapes={{{self.column.name!r}: None}} for any number",
            )
        return values.reshape(len(array), *self.spec.shape)

    def _bad(self, row: int, text: str) -> BadValue:
        return BadValue(row, self.column.name, text)


def column_spec(column: StoredColumn, shape: tuple[int, ...] | None = None) -> ColumnSpec:
    """Return the spec of a column in batches.

    Args:
        column: column of the file.
        shape: shape of one row of a list column; None: ragged.

    Raises:
        FeedSettingsError: no batch column can hold its type.
    """
    kind = column.item_type
    if column.has_lists_of_texts:
        return ColumnSpec(column.name, "bytes", "texts")
    if kind.id in DTYPES and not column.has_rows_of_items:
        return ColumnSpec(column.name, "tensor", "scalar", DTYPES[kind.id])
    if kind.id in DTYPES and shape is None:
        return ColumnSpec(column.name, "ragged", "array", DTYPES[kind.id])
    if kind.id in DTYPES and shape is not None:
        return ColumnSpec(column.name, "tensor", "array", DTYPES[kind.id], shape)
    if kind.id in TEXTS and not column.has_rows_of_items:
        if TEXTS[kind.id] == "str":
            return ColumnSpec(column.name, "str", "str")
        return ColumnSpec(column.name, "bytes", "bytes")
    raise FeedSettingsError(f"column {column.name!r} {_REFUSED.format(type=column.type)}")


def refuse_alike(columns: Iterable[StoredColumn], stored: Iterable[str], file: str) -> None:
    """Refuse list columns whose parts in the file could belong to another column.

    Args:
        columns: the columns that are read.
        stored: names of all columns of the file.
        file: its path, for the error.

    Raises:
        DataError: the file has `a.b` beside the list `a`.
    """
    lists = {column.name for column in columns if column.has_rows_of_items}
    for other in stored:
        before, dot, _ = other.rpartition(".")
        if dot and (name := owner_of(before, lists)) is not None:
            raise DataError(
                f"{file}: columns {name!r} and {other!r} cannot be distinguished; rename one"
            )


def owner_of(path: str, columns: Container[str]) -> str | None:
    """Return which of the columns a stored path is a part of, as `a.list.element` is of `a`."""
    while path not in columns:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return None
    return path


def refuse_more(found: Iterable[str], names: Iterable[str], file: str, first: str) -> None:
    """Refuse columns that would be left out without a word, where all columns are to be read.

    Args:
        found: all columns of a file.
        names: those that are read.
        file: its path.
        first: path of the file that the names are from.

    Raises:
        FeedSettingsError: names the columns and both files.
    """
    read = set(names)
    if more := [name for name in found if name not in read]:
        shown = ", ".join(map(repr, more[:_MOST_NAMED]))
        left = f" and {len(more) - _MOST_NAMED} more" if len(more) > _MOST_NAMED else ""
        raise FeedSettingsError(
            f"{file} has columns that {first} lacks: {shown}{left}; name the columns that you "
            "need, as in columns=[...], or read the files separately"
        )


def refuse_julian(column: StoredColumn, batch: pa.RecordBatch) -> None:
    """Refuse dates and timestamps of the Julian calendar, which would be other days.

    Args:
        column: column of dates or timestamps, or lists of them.
        batch: rows of a file whose writer used that calendar.

    Raises:
        BadValue: one is so early that the calendars differ.
    """
    array, rows = column.of(batch), None
    if array.type.id in LISTS:
        found = bounds(array)
        rows = found - found[0]
        array = plain(array.values.slice(found[0], rows[-1]))
    is_date = column.first_day == "1582-10-15"
    first = np.datetime64(column.first_day, "D" if is_date else "us").astype(np.int64)
    at = pc.less(array, pa.scalar(int(first), array.type)).index(True).as_py()
    if at >= 0:
        kind = "date" if is_date else "timestamp"
        raise BadValue(
            row_of(rows, at),
            column.name,
            f"a {kind} before {column.first_day}, by the Julian calendar of Spark 2 or its LEGACY "
            "mode; write the file again with Spark 3 or newer, or filter such rows out",
        )


def held(name: str, value: Any, kind: pa.DataType) -> Any:
    """Return the value that replaces nulls, converted to the column's type.

    Args:
        name: name of the column.
        value: from `nulls=`.
        kind: Arrow type of the column.

    Raises:
        FeedSettingsError: the column cannot hold the value.
    """
    try:
        found = pa.scalar(value, kind).as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        found = None
    is_cut = pa.types.is_integer(kind) and found != value
    becomes_infinite = isinstance(found, float) and math.isinf(found) and found != value
    if found is None or is_cut or becomes_infinite:
        raise FeedSettingsError(
            f"nulls={{{name!r}: {value!r}}}: the column is {kind}, which cannot hold that"
        )
    return found


def objects(array: pa.Array) -> Array:
    """Return text or binary as object [n]; equal values of a dictionary array share one object."""
    if array.type.id == pa.lib.Type_DICTIONARY:
        places, entries = array.indices.to_numpy(), array.dictionary
        if len(entries) > len(places):
            used, places = np.unique(places, return_inverse=True)
            entries = entries.take(pa.array(used))
        return np.asarray(objects(entries)[places])
    found: Array = array.to_numpy(zero_copy_only=False)
    return found


def item_counts(array: pa.Array) -> set[int]:
    """Return the distinct lengths of an array's lists or vectors, in items."""
    counts = lengths(array.drop_null()) if is_vector(array.type) else np.diff(bounds(array))
    return {int(count) for count in np.unique(counts)}


def vector_bytes(column: StoredColumn, batch: pa.RecordBatch, most_bytes: int) -> Array:
    """Return the bytes that each of n vectors takes once it is dense, int64[n]; of a null, 0.

    Args:
        column: of Spark's vectors.
        batch: n rows.
        most_bytes: most bytes of one vector.

    Raises:
        BadValue: a vector would take more.
    """
    try:
        found = 8 * lengths(column.of(batch))
    except BadVector as error:
        raise BadValue(error.row, column.name, str(error)) from None
    if (wrong := found > most_bytes).any():
        row = int(wrong.argmax())
        text = f"a vector of {found[row] // 8} items takes {found[row]} bytes, at most {most_bytes}"
        raise BadValue(row, column.name, f"{text} are read (max_row_group_bytes)")
    return found


def first_null(array: pa.Array) -> int:
    """Return the index of the first null."""
    return int(array.is_null().index(True).as_py())


def one_line(error: BaseException) -> str:
    """Return the text of a pyarrow error as one line of at most 400 characters."""
    return " ".join(str(error).split())[:400]
