"""Row runs: the rows of one part of an epoch's work in the order of reading, with their places.

    splits of the part ─► rows, in blocks ─► without windows: in their order
                                          └► with windows: `window` rows held, in random order

A window's order depends on the seed, the epoch and the window's start. So a reader that continues
inside a window yields the rest of the same order.

Covers: Source (the protocol of all formats), RowRun, skipping rows that were yielded before.
Does not: make batches (reader), decide what is read (positions).
Threads: one consumer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from feeding.columnar.ops import Columns, joined, num_rows, reordered, split_rows
from feeding.columnar.schema import Schema
from feeding.errors import FileChanged
from feeding.reading.positions import Place, WorkerPart
from feeding.reading.splits import SourceFile, Split


class Source(Protocol):
    """Files of one format."""

    @property
    def schema(self) -> Schema:
        """Schema of the rows; `read` yields the columns in this order."""

    def files(self) -> Sequence[SourceFile]:
        """Return the files to read; the same for every worker.

        If the format knows the rows of each piece (`SourceFile.piece_rows`), shares are exact to
        the row, and `read` gets splits of rows within a piece.
        """

    def read(self, split: Split) -> Iterator[Columns]:
        """Yield the rows of a split as columns, in blocks; the same rows at each call.

        The call comes before the split's turn, so it may start to fetch the first rows.
        """


@dataclass(frozen=True, slots=True)
class Order:
    """Order of the rows."""

    seed: int | None
    window: int
    """Rows per shuffled window; 1: no shuffling."""
    epoch: int


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows in the order of reading, with the places before and after them."""

    columns: Columns
    start: Place
    end: Place
    is_window: bool = False

    def after(self, count: int) -> Place:
        """Return the place after the first `count` rows, at least one."""
        if count == num_rows(self.columns):
            return self.end
        start = self.start
        if self.is_window:
            return msgspec.structs.replace(start, taken=start.taken + count)
        return msgspec.structs.replace(start, row=start.row + count)


def runs(source: Source, part: WorkerPart, number: int, order: Order) -> Iterator[RowRun]:
    """Yield the rest of a part.

    Args:
        source: of the rows.
        part: the splits, and how much of them earlier runs have read.
        number: of the part within the epoch's work.
        order: of its rows.

    Raises:
        FileChanged: a split has fewer rows than earlier runs have read from it.
    """
    placed = _placed(source, part)
    if order.window > 1:
        yield from _windows(placed, part, number, order)
        return
    for split, row, columns in placed:
        start = Place(order.epoch, number, split, row, 0, split + 1)
        end = msgspec.structs.replace(start, row=row + num_rows(columns))
        yield RowRun(columns, start, end)


def _placed(source: Source, part: WorkerPart) -> Iterator[tuple[int, int, Columns]]:
    """Yield blocks of rows with the index of their split and of their first row in it."""
    for split, rows in enumerate(_begun_ahead(source, part.splits)):
        at, skipped = 0, 0 if split else part.row
        for columns in rows:
            count = num_rows(columns)
            wanted = split_rows(columns, skipped - at)[1] if at < skipped else columns
            if wanted is not None and count:
                yield split, at + count - num_rows(wanted), wanted
            at += count
        if at < skipped:
            raise FileChanged(
                f"{part.splits[0]} has {at} rows, {skipped} of them were read before: the file "
                "has changed since the position was saved"
            )


def _begun_ahead(source: Source, splits: Sequence[Split]) -> Iterator[Iterator[Columns]]:
    """Yield each split's rows; the next split is begun ahead."""
    ahead: Iterator[Columns] | None = None
    for split in splits:
        ready, ahead = ahead, source.read(split)
        if ready is not None:
            yield ready
    if ahead is not None:
        yield ahead


def _windows(
    placed: Iterator[tuple[int, int, Columns]], part: WorkerPart, number: int, order: Order
) -> Iterator[RowRun]:
    held: list[Columns] = []
    count, begin, end = 0, (0, 0), (0, 0)
    taken = part.taken
    for split, first, columns in placed:
        row, rest = first, columns
        while True:
            if not held:
                begin = (split, row)
            some, left = split_rows(rest, order.window - count)
            held.append(some)
            count += num_rows(some)
            row += num_rows(some)
            end = (split, row)
            if count == order.window:
                yield _window(held, part, (number, begin, end), order, taken)
                held, count, taken = [], 0, 0
            if left is None:
                break
            rest = left
    if held:
        yield _window(held, part, (number, begin, end), order, taken)


def _window(
    held: Sequence[Columns],
    part: WorkerPart,
    where: tuple[int, tuple[int, int], tuple[int, int]],
    order: Order,
    taken: int,
) -> RowRun:
    number, (split, row), (last, end_row) = where
    columns = joined(held)
    first = part.splits[split]
    name = (zlib.crc32(first.path.encode()), first.piece or 0, first.start, row)
    generator = np.random.default_rng([abs(order.seed or 0), order.epoch, *name])
    numbers = generator.permutation(num_rows(columns))[taken:]
    start = Place(order.epoch, number, split, row, taken, last + 1)
    end = Place(order.epoch, number, last, end_row, 0, last + 1)
    return RowRun(reordered(columns, numbers), start, end, is_window=True)
