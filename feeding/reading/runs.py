"""The rows of one part of an epoch's work in the order in which they are handed out, with places.

    splits of the part ─► rows, some at a time ─► without windows: as they come
                                               └► with: `window` rows held, in a random order

A window's order follows from the seed, the epoch and where the window begins, so that whoever reads
on from a place inside it gives the rest of the same order.

Covers: RowRun, skipping what was handed out before.      Does not: make batches (direct), say
what is read (positions).      Threads: one consumer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from feeding.columnar.ops import Columns, cut, joined, num_rows, reordered
from feeding.columnar.schema import Schema
from feeding.errors import FileChanged
from feeding.reading.positions import Place, WorkerPart
from feeding.reading.splits import SourceFile, Split


class Source(Protocol):
    """Files of one format."""

    @property
    def schema(self) -> Schema:
        """What its rows look like; `read` gives the columns in this order."""

    def files(self) -> Sequence[SourceFile]:
        """Return the files to read; the same for every worker.

        Where the format knows how many rows each piece has (`SourceFile.piece_rows`), shares are
        exact to the row, and `read` gets splits that name a piece and rows within it.
        """

    def read(self, split: Split) -> Iterator[Columns]:
        """Yield the rows of a split as columns, some rows at a time; the same ones every time.

        The call may begin to fetch what the first rows need: it comes before the split's turn.
        """


@dataclass(frozen=True, slots=True)
class Order:
    """In what order rows are handed out."""

    seed: int | None
    window: int
    """Rows that are held and shuffled; 1: none."""
    epoch: int


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows that are handed out one after the other."""

    columns: Columns
    start: Place
    end: Place
    is_window: bool = False

    def after(self, count: int) -> Place:
        """Return the place behind so many of the rows, at least one."""
        if count == num_rows(self.columns):
            return self.end
        start = self.start
        if self.is_window:
            return msgspec.structs.replace(start, taken=start.taken + count)
        return msgspec.structs.replace(start, row=start.row + count)


def runs(source: Source, part: WorkerPart, number: int, order: Order) -> Iterator[RowRun]:
    """Yield what is left of a part.

    Args:
        source: gives the rows.
        part: the splits, and what of them was handed out.
        number: of the part within the epoch's work.
        order: of its rows.

    Raises:
        FileChanged: a split has fewer rows than were handed out of it before.
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
    """Yield the split's number, how many of its rows come before, and rows."""
    for split, rows in enumerate(_begun_ahead(source, part.splits)):
        at, skipped = 0, 0 if split else part.row
        for columns in rows:
            count = num_rows(columns)
            wanted = cut(columns, skipped - at)[1] if at < skipped else columns
            if wanted is not None and count:
                yield split, at + count - num_rows(wanted), wanted
            at += count
        if at < skipped:
            raise FileChanged(
                f"{part.splits[0]} has {at} rows, {skipped} of it were handed out before: it is "
                "another file than when the position was saved"
            )


def _begun_ahead(source: Source, splits: Sequence[Split]) -> Iterator[Iterator[Columns]]:
    """Yield each split's rows, with the next split begun."""
    coming: Iterator[Columns] | None = None
    for split in splits:
        ready, coming = coming, source.read(split)
        if ready is not None:
            yield ready
    if coming is not None:
        yield coming


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
            some, left = cut(rest, order.window - count)
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
    dice = np.random.default_rng([abs(order.seed or 0), order.epoch, *name])
    numbers = dice.permutation(num_rows(columns))[taken:]
    start = Place(order.epoch, number, split, row, taken, last + 1)
    end = Place(order.epoch, number, last, end_row, 0, last + 1)
    return RowRun(reordered(columns, numbers), start, end, is_window=True)
