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

Columns = tuple[BatchColumn, ...]
Order = npt.NDArray[np.int64]


def num_rows(columns: Columns) -> int:
    """Return the number of rows n of columns: arrays [n, ...] or Ragged."""
    first = columns[0]
    return len(first.offsets) - 1 if isinstance(first, Ragged) else len(first)


def split_rows(columns: Columns, most_rows: int) -> tuple[Columns, Columns | None]:
    """Return the first rows and the rest.

    Args:
        columns: of n rows each.
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
    """Return how many of the first rows take at most so many bytes, and how many bytes they take.

    Args:
        columns: of n rows each, n at least 1; a text or bytes takes its length.
        most_bytes: may be negative.
    """
    count = num_rows(columns)
    fixed, varying = 0, np.zeros(0, np.int64)
    for column in columns:
        if isinstance(column, Ragged):
            sizes = np.diff(column.offsets) * column.values.itemsize
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
    lengths = np.concatenate([np.diff(column.offsets) for column in ragged])
    values = np.concatenate([column.values for column in ragged])
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths)]))


def reordered(columns: Columns, order: Order) -> Columns:
    """Return copies of the rows in another order.

    Args:
        columns: of n rows each.
        order: int64[k], indexes of rows; they may repeat.
    """
    return tuple(_ordered(column, order) for column in columns)


def _ordered(column: BatchColumn, order: Order) -> BatchColumn:
    if not isinstance(column, Ragged):
        return column[order]
    lengths = np.diff(column.offsets)[order]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(offsets[-1]) + np.repeat(column.offsets[:-1][order] - offsets[:-1], lengths)
    return Ragged(column.values[places], offsets)
