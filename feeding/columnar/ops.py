"""Column operations: split, join and reorder the rows of columns.

Covers: arrays and ragged columns.
Does not: read files (reading.reader), make columns of chunks (receiver.batch_reader).
Threads: any; pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from feeding.columnar.batch import BatchColumn, Ragged
from feeding.columnar.builder import offsets_of
from feeding.columnar.chunk import Array

Columns = tuple[BatchColumn, ...]
Order = npt.NDArray[np.int64]


def num_rows(columns: Columns) -> int:
    """Return the number of rows n of columns: arrays [n, ...] or Ragged."""
    first = columns[0]
    return len(first.offsets) - 1 if isinstance(first, Ragged) else len(first)


def split_rows(columns: Columns, most_rows: int) -> tuple[Columns, Columns | None]:
    """Return the first rows and the rest.

    Args:
        columns: columns of n rows each.
        most_rows: rows of the first part, at most.

    Returns:
        Views of the first min(n, most_rows) rows and of the others; None if there are no others.
    """
    count = num_rows(columns)
    if count <= most_rows:
        return columns, None
    return rows_between(columns, 0, most_rows), rows_between(columns, most_rows, count)


def rows_between(columns: Columns, start: int, stop: int) -> Columns:
    """Return views of the rows from `start` to `stop`, `stop` excluded."""
    return tuple(_rows(column, start, stop) for column in columns)


def rows_within(columns: Columns, most_bytes: int) -> tuple[int, int]:
    """Return how many of the first rows take at most this many bytes, and how many they take.

    Args:
        columns: columns of n rows each, n at least 1; a text or bytes takes its length.
        most_bytes: may be negative.
    """
    count = num_rows(columns)
    fixed, varying = 0, np.zeros(0, np.int64)
    for column in columns:
        if isinstance(column, Ragged):
            values = column.values
            if values.dtype == object:
                sizes = np.diff(offsets_of(values)[column.offsets])
            else:
                sizes = np.diff(column.offsets) * values.itemsize
        elif column.dtype == object:
            items = np.fromiter(map(len, column.ravel()), np.int64, column.size)
            sizes = items.reshape(count, -1).sum(axis=1)
        else:
            fixed += column.nbytes // count
            continue
        varying = varying + sizes if varying.size else sizes
    if not varying.size:
        fitting = count if not fixed else max(0, min(count, most_bytes // fixed))
        return fitting, fitting * fixed
    ends = (fixed + varying).cumsum()
    fitting = int(np.searchsorted(ends, most_bytes, side="right"))
    return fitting, int(ends[fitting - 1]) if fitting else 0


def _rows(column: BatchColumn, start: int, stop: int) -> BatchColumn:
    if not isinstance(column, Ragged):
        return column[start:stop]
    bounds = column.offsets[start : stop + 1]
    return Ragged(column.values[bounds[0] : bounds[-1]], bounds - bounds[0])


def joined(parts: Sequence[Columns]) -> Columns:
    """Return the concatenation of the parts' rows; a copy if there are several parts."""
    if len(parts) == 1:
        return parts[0]
    return tuple(_joined_column(columns) for columns in zip(*parts, strict=True))


def _joined_column(columns: Sequence[BatchColumn]) -> BatchColumn:
    ragged = [column for column in columns if isinstance(column, Ragged)]
    if not ragged:
        return np.concatenate(columns)  # type: ignore[arg-type]  # none is Ragged
    if len(ragged) != len(columns):
        raise TypeError(f"{len(ragged)} of {len(columns)} parts of a column are ragged")
    values = np.concatenate([column.values for column in ragged])
    return Ragged(values, joined_offsets([column.offsets for column in ragged]))


def joined_offsets(parts: Sequence[Order]) -> Order:
    """Return the offsets of rows that are joined; each part's begin at 0."""
    starts = np.cumsum([0, *(part[-1] for part in parts)])
    ends = [part[1:] + start for part, start in zip(parts, starts, strict=False)]
    return np.concatenate([np.zeros(1, np.int64), *ends])


def row_of(offsets: Order | None, item: int) -> int:
    """Return the row that an item is in; empty rows have none.

    Args:
        offsets: int64[n + 1], of the rows, in items; None: each row is one.
        item: its place among all items.
    """
    if offsets is None:
        return item
    return int(np.searchsorted(offsets, item, "right")) - 1


def reordered(columns: Columns, order: Order) -> Columns:
    """Return copies of the rows in another order.

    Args:
        columns: columns of n rows each.
        order: int64[k], indexes of rows; they may repeat.
    """
    return tuple(_ordered(column, order) for column in columns)


def _ordered(column: BatchColumn, order: Order) -> BatchColumn:
    if not isinstance(column, Ragged):
        return column[order]
    return Ragged(*reordered_rows(column.values, column.offsets, order))


def reordered_rows(values: Array, offsets: Order, order: Order) -> tuple[Array, Order]:
    """Return copies of rows of differing lengths in another order, and their offsets.

    Args:
        values: the items of all rows.
        offsets: int64[n + 1], of the rows, in items.
        order: int64[k], indexes of rows; they may repeat.
    """
    lengths = np.diff(offsets)[order]
    ends = np.zeros(order.size + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    places = np.arange(ends[-1]) + np.repeat(offsets[:-1][order] - ends[:-1], lengths)
    return values[places], ends
