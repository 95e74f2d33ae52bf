"""Shuffling: rows of a partition in another order in each epoch, between packer and feeder.

Covers: Shuffle; permuting the columns of a window of chunks.
Does not: order partitions (tfos.feed.sources), read Python rows.
Threads: any; pure.

The order is a pure function of seed, epoch, partition and the partition's rows. Rows are numbered
in the new order. A window ends where the schema changes, so rows of different types do not mix.
Source: PCG64 (O'Neill 2014), seeded with seed, epoch, partition and window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from feeding.columnar.chunk import Array, Chunk, Column, data_items
from feeding.columnar.ops import joined_offsets, reordered_rows
from feeding.columnar.schema import ColumnSpec

WINDOW_ROWS = 16_384
"""Default rows of a window, where the user names a seed alone: for rows of 3 KB, 50 MB."""
_PARTITIONS = -1
"""In place of a partition's number, for the order of the partitions themselves."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """Order of one feed's rows."""

    seed: int
    """Seed from 0 to 2**64 - 1."""
    window_rows: int = 1
    """Rows per permuted window, which the feed task holds in memory. 1: only the order of the
    partitions changes."""
    first_epoch: int = 0
    """Epochs that an interrupted run has trained: the order goes on behind theirs."""

    def partitions(self, epoch: int, count: int) -> list[int]:
        """Return the order of an epoch's partitions.

        Args:
            epoch: from 0, of this run.
            count: number of partitions.
        """
        return [int(index) for index in self._random(epoch, _PARTITIONS, 0).permutation(count)]

    def chunks(self, chunks: Iterator[Chunk], most_bytes: int) -> Iterator[Chunk]:
        """Yield the rows of a partition's chunks in their new order.

        Args:
            chunks: chunks of one partition, in row order.
            most_bytes: most bytes in a window; a larger window ends early.
        """
        if self.window_rows == 1:
            yield from chunks
            return
        for number, window in enumerate(_windows(chunks, self.window_rows, most_bytes)):
            meta = window[0].meta
            random = self._random(meta.epoch, meta.partition, number)
            yield from _permuted(window, random)

    def _random(self, epoch: int, partition: int, window: int) -> np.random.Generator:
        entropy = [self.seed, self.first_epoch + epoch, partition + 1, window]
        return np.random.Generator(np.random.PCG64(entropy))


def _windows(chunks: Iterator[Chunk], most_rows: int, most_bytes: int) -> Iterator[Sequence[Chunk]]:
    """Group the rows into windows, across the borders of chunks."""
    window: list[Chunk] = []
    num_rows = num_bytes = 0
    for whole in chunks:
        chunk = whole
        if window and (
            num_bytes + chunk.num_bytes > most_bytes or chunk.meta.schema != window[0].meta.schema
        ):
            yield window
            window, num_rows, num_bytes = [], 0, 0
        while num_rows + chunk.num_rows >= most_rows:
            room = most_rows - num_rows
            yield [*window, chunk.rows(0, room)]
            window, num_rows, num_bytes = [], 0, 0
            chunk = chunk.rows(room, chunk.num_rows)
        if chunk.num_rows:
            window.append(chunk)
            num_rows += chunk.num_rows
            num_bytes += chunk.num_bytes
    if window:
        yield window


def _permuted(window: Sequence[Chunk], random: np.random.Generator) -> Iterator[Chunk]:
    """Yield the window's rows, permuted, in chunks as large as its largest."""
    schema, first_row = window[0].meta.schema, window[0].meta.first_row
    columns = [
        _joined([chunk.columns[index] for chunk in window], spec)
        for index, spec in enumerate(schema.columns)
    ]
    num_rows = sum(chunk.num_rows for chunk in window)
    order = random.permutation(num_rows)
    ends = window[-1].meta.last_in_partition
    most_rows = max(chunk.num_rows for chunk in window)
    for start in range(0, num_rows, most_rows):
        stop = min(start + most_rows, num_rows)
        taken = tuple(_taken(column, order[start:stop]) for column in columns)
        meta = msgspec.structs.replace(
            window[0].meta,
            first_row=first_row + start,
            num_rows=stop - start,
            stored=tuple(
                column.values.dtype.name if spec.dtype else ""
                for column, spec in zip(taken, schema.columns, strict=True)
            ),
            data_items=data_items(taken),
            last_in_partition=ends and stop == num_rows,
        )
        yield Chunk(meta, taken)


def _joined(columns: Sequence[Column], spec: ColumnSpec) -> Column:
    if len(columns) == 1:
        return columns[0]
    dtype = np.result_type(*{column.values.dtype for column in columns})
    if spec.dtype and not np.can_cast(dtype, spec.dtype, "safe"):
        dtype = np.dtype(spec.dtype)  # as for int16 beside uint16 in a column of float32
    values = np.concatenate([column.values for column in columns], dtype=dtype)
    offsets = [column.offsets for column in columns if column.offsets is not None]
    return Column(values, joined_offsets(offsets) if offsets else None)


def _taken(column: Column, rows: Array) -> Column:
    """Return the rows of a column with indexes `rows`, int64[k], in that order."""
    if column.offsets is None:
        return Column(column.values[rows])
    return Column(*reordered_rows(column.values, column.offsets, rows))
