"""Parquet plan: which columns and row groups of each file are read, and as which batch columns.

Covers: ParquetRequest (the user's), ParquetPlan (from the first file; all other files must fit).
Does not: read pages (row_groups).
Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from feeding.arrow.columns import (
    ColumnReader,
    StoredColumn,
    column_spec,
    held,
    item_counts,
    refuse_alike,
    refuse_julian,
    refuse_more,
    stored_columns,
    vector_bytes,
)
from feeding.columnar.batch import BatchColumn
from feeding.columnar.schema import Schema, is_shape
from feeding.errors import DataError, FeedSettingsError
from feeding.formats.parquet.filter import RowFilter
from feeding.formats.parquet.footer import Footer
from feeding.reading.partitions import PartitionColumn, refuse_both

Shape = tuple[int, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetRequest:
    """How to read Parquet files.

    Args:
        columns: names; None: all stored columns, and the keys of directories.
        filters: see RowFilter.
        nulls: value that replaces a null, by column; other columns refuse nulls.
        shapes: shape of one row of a list column, by name; None as a shape: ragged. Other list
            columns get their shape from the files.
        partitions: whether keys of directories are columns.
    """

    columns: Sequence[str] | None = None
    filters: Any = None
    nulls: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    partitions: bool = True

    def __post_init__(self) -> None:
        given = self.columns
        if isinstance(given, str) or not all(isinstance(name, str) for name in given or ()):
            raise FeedSettingsError(f"columns must be a list of names, got {given!r}")
        if given is not None and not len(given):
            raise FeedSettingsError("no columns were requested; name at least one")
        if given is not None and len(set(given)) < len(given):
            raise FeedSettingsError(f"a column is requested twice: {list(given)}")
        for name, shape in self.shapes.items():
            given_shape: object = shape
            if given_shape is not None and not is_shape(given_shape, least=1):
                raise FeedSettingsError(
                    f"the shape of {name!r} must be None or a tuple of ints >= 1, got {shape!r}"
                )

    def fill(self, column: StoredColumn | PartitionColumn) -> Any:
        """Return the value that replaces nulls of a column; None: the column refuses nulls."""
        value = self.nulls.get(column.name)
        if value is None:
            return None
        if isinstance(column, StoredColumn):
            value = column.as_read(value)
        return held(column.name, value, _held_type(column))


class ParquetPlan:
    """The columns of a data set, from its first file.

    Args:
        request: the user's.
        footer: footer of the first file.
        partitions: the columns of directory names.

    Raises:
        DataError: a requested column does not exist.
        FeedSettingsError: a column cannot be read, or a setting does not fit.
    """

    def __init__(
        self, request: ParquetRequest, footer: Footer, partitions: Mapping[str, PartitionColumn]
    ) -> None:
        self._request = request
        self._first = footer.path
        self._filter = None if request.filters is None else RowFilter(request.filters)
        stored = stored_columns(_arrow_schema(footer), footer.path)
        self._names = names = _names(request.columns, stored, partitions, footer.path)
        self._keys = [
            name
            for name in partitions
            if name in names or (self._filter and self._filter.names(name))
        ]
        self._stored = {name: stored[name] for name in names if name in stored}
        self._given = {name: partitions[name] for name in names if name in partitions}
        for name in request.nulls:
            if name not in names:
                raise FeedSettingsError(f"nulls: {name!r} is not one of the columns {list(names)}")
        for name in request.shapes:
            column = self._stored.get(name)
            if column is None or not column.has_rows_of_items or column.has_lists_of_texts:
                raise FeedSettingsError(f"shapes: {name!r} is not a requested list of numbers")
        self._needed = self._stored | {
            name: column
            for name, column in stored.items()
            if self._filter and self._filter.may_use(column.path)
        }
        """Stored columns to decode."""
        self._constants = {
            name: column
            for name, column in partitions.items()
            if name not in stored and self._filter and self._filter.may_use([name])
        }
        self._lengths = ListLengths(
            column
            for name, column in self._stored.items()
            if column.has_rows_of_items
            and not column.has_lists_of_texts
            and name not in request.shapes
        )
        self._julian: dict[str, list[StoredColumn]] = {}
        """Columns of dates and timestamps that may use the Julian calendar, by file."""
        self._readers: list[ColumnReader] = []
        for column in self._stored.values():
            column_spec(column)  # raises for a type that cannot be read
        refuse_alike(self._stored.values(), stored, footer.path)
        for given in self._given.values():
            if request.fill(given) is None:
                given.refuse_null(f"pass nulls={{{given.name!r}: …}}, or partitions=False")

    @property
    def paths(self) -> list[str]:
        """Names of the stored columns to decode."""
        return list(self._needed)

    @property
    def choice(self) -> str:
        """Which rows are read; see SourceFile."""
        return "" if self._filter is None else self._filter.choice

    @property
    def has_filter(self) -> bool:
        """Whether a filter drops rows."""
        return self._filter is not None

    @property
    def vectors(self) -> list[StoredColumn]:
        """Columns of Spark's vectors."""
        return [column for column in self._stored.values() if column.is_vector]

    @property
    def dense(self) -> list[str]:
        """Columns that refuse nulls; not lists, because statistics count empty ones as nulls."""
        return [
            name
            for name, column in self._stored.items()
            if self._request.fill(column) is None and not column.has_rows_of_items
        ]

    def check(self, footer: Footer) -> None:
        """Refuse a file whose columns differ from the first file's; note the lengths of its lists.

        Raises:
            DataError: names file, column, expected and found.
            FeedSettingsError: all columns are to be read, and the first file lacks some; or a
                column is a key of directories, too.
        """
        stored = stored_columns(_arrow_schema(footer), footer.path)
        for name in self._keys:
            if name in stored:
                raise refuse_both(name, footer.path, only_filtered=name not in self._names)
        for column in self._needed.values():
            found = stored.get(column.name)
            if found is None or _nullable(found.type) != _nullable(column.type):
                what = "no such column" if found is None else f"{found.type}"
                raise DataError(
                    f"{footer.path}: column {column.name!r}: expected {column.type}, as in "
                    f"{self._first}, found {what}"
                )
        if self._request.columns is None:
            refuse_more(stored, self._names, footer.path, self._first)
        refuse_alike(self._stored.values(), stored, footer.path)
        if julian := footer.julian:
            dated = [each for each in self._stored.values() if each.first_day is not None]
            kinds = footer.kinds([column.name for column in dated])
            self._julian[footer.path] = [each for each in dated if julian & kinds[each.name]]
        self._lengths.add(footer)

    def groups(self, footer: Footer) -> set[int]:
        """Return the row groups of a file that may hold matching rows."""
        if self._filter is None:
            return set(range(footer.metadata.num_row_groups))
        schema = _arrow_schema(footer)
        values = {}
        for name, column in self._constants.items():
            schema = schema.append(pa.field(name, _held_type(column)))
            values[name] = column.value(footer.path)
        return self._filter.groups(footer.alone, schema, values)

    @property
    def to_sample(self) -> list[StoredColumn]:
        """List columns whose shape the first rows must confirm."""
        return self._lengths.unsure

    def settle(self, sample: pa.RecordBatch | None) -> None:
        """Decide the shape of list columns.

        Args:
            sample: the first rows of `to_sample`; None: the footers decide.
        """
        shapes = {**self._request.shapes, **self._lengths.shapes(sample)}
        self._readers = [
            ColumnReader(column, column_spec(column, shapes.get(name)), self._request.fill(column))
            for name, column in self._stored.items()
        ]

    @property
    def schema(self) -> Schema:
        """Schema of the batches."""
        specs = {each.spec.name: each.spec for each in self._readers}
        specs |= {name: column.spec for name, column in self._given.items()}
        return Schema.of_dict(specs[name] for name in self._names)

    def wanted(self, batch: pa.RecordBatch, path: str) -> pa.RecordBatch:
        """Return the rows of a batch that pass the filter.

        Args:
            batch: decoded rows.
            path: path of their file.
        """
        if self._filter is None:
            return batch
        constants = {
            name: pa.scalar(column.value(path), _held_type(column))
            for name, column in self._constants.items()
        }
        return self._filter.rows(batch, constants)

    def parts(
        self, batch: pa.RecordBatch, most_bytes: int, most_row_bytes: int
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a batch in parts, since sparse vectors take far more bytes once dense.

        Args:
            batch: n rows.
            most_bytes: most bytes of the dense vectors of a part of several rows.
            most_row_bytes: most bytes of a dense vector.

        Raises:
            BadValue: a vector would take more.
        """
        if not self.vectors:
            yield batch
            return
        row_bytes = np.zeros(batch.num_rows, np.int64)
        for column in self.vectors:
            row_bytes += vector_bytes(column, batch, most_row_bytes)
        ends, start = row_bytes.cumsum(), 0
        while start < batch.num_rows:
            before = ends[start - 1] if start else 0
            stop = max(start + 1, int(ends.searchsorted(before + most_bytes, side="right")))
            yield batch[start:stop]
            start = stop

    def columns(self, batch: pa.RecordBatch, path: str) -> tuple[BatchColumn, ...]:
        """Return the rows of a batch as columns [n, *shape], object[n] or Ragged.

        Args:
            batch: n decoded rows.
            path: path of their file.

        Raises:
            BadValue: a value does not fit; names the column.
        """
        found: dict[str, BatchColumn] = {}
        for column in self._julian.get(path, ()):
            refuse_julian(column, batch)
        for reader in self._readers:
            found[reader.spec.name] = reader(batch)
        for name, given in self._given.items():
            fill = self._request.fill(given)
            found[name] = given.repeated(path, batch.num_rows, fill)
        return tuple(found[name] for name in self._names)


class ListLengths:
    """Finds out which list columns have rows of one length in all files.

    Args:
        columns: columns of lists or vectors, without a shape in the request.
    """

    def __init__(self, columns: Iterable[StoredColumn]) -> None:
        self._columns = {column.name: column for column in columns}
        self._seen: dict[str, set[int]] = {name: set() for name in self._columns}

    def add(self, footer: Footer) -> None:
        """Note the items per row of a file's row groups; -1 if that is no whole number."""
        lists = [name for name, column in self._columns.items() if not column.is_vector]
        leaves = footer.owners(lists) if lists else {}
        for group in range(footer.metadata.num_row_groups if lists else 0):
            found = footer.metadata.row_group(group)
            for leaf, name in leaves.items() if found.num_rows else ():
                items, rest = divmod(found.column(leaf).num_values, found.num_rows)
                self._seen[name].add(-1 if rest else items)

    @property
    def unsure(self) -> list[StoredColumn]:
        """Columns that may have rows of one length; footers do not tell for vectors."""
        return [
            column
            for name, column in self._columns.items()
            if column.is_vector or (len(self._seen[name]) == 1 and -1 not in self._seen[name])
        ]

    def shapes(self, sample: pa.RecordBatch | None) -> dict[str, Shape]:
        """Return the shape of each column's rows; None: ragged."""
        found: dict[str, Shape] = dict.fromkeys(self._columns)
        for column in self.unsure:
            lengths = set() if sample is None else item_counts(column.of(sample))
            lengths |= self._seen[column.name]
            if len(lengths) == 1:
                found[column.name] = (lengths.pop(),)
        return found


def _names(
    asked: Sequence[str] | None,
    stored: Mapping[str, StoredColumn],
    partitions: Mapping[str, PartitionColumn],
    path: str,
) -> tuple[str, ...]:
    """Return the columns to read; refuse those that the first file does not have."""
    names = tuple({**stored, **partitions} if asked is None else asked)
    for name in names:
        if name not in stored and name not in partitions:
            raise DataError(f"{path} has no column {name!r}; it has {_listing(stored, partitions)}")
    return names


def _held_type(column: StoredColumn | PartitionColumn) -> pa.DataType:
    """Return the Arrow type of a column's values after conversion to numbers."""
    if isinstance(column, PartitionColumn):
        return {"int64": pa.int64(), "float64": pa.float64()}.get(column.dtype, pa.string())
    return column.item_type


def _arrow_schema(footer: Footer) -> pa.Schema:
    try:
        return footer.metadata.schema.to_arrow_schema()
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{footer.path}: its footer is damaged: {error}") from None


def _listing(stored: Mapping[str, StoredColumn], partitions: Mapping[str, PartitionColumn]) -> str:
    shown = [f"{name}: {column.type}" for name, column in stored.items()]
    shown += [f"{name} (of directories)" for name in partitions]
    more = f" and {len(shown) - 40} more" if len(shown) > 40 else ""
    return ", ".join(shown[:40]) + more


def _nullable(kind: pa.DataType) -> pa.DataType:
    """Return a type whose items may be null: writers differ in what they declare of equal data."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _nullable(field.type)) for field in kind])
    if pa.types.is_large_list(kind):
        return pa.large_list(_nullable(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_nullable(kind.value_type), kind.list_size)
    return pa.list_(_nullable(kind.value_type)) if pa.types.is_list(kind) else kind
