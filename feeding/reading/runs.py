"""Row runs: the rows of one part of an epoch's work in the order of reading, with their places.

    splits of the part ─► lanes: rows in turns ─► without windows: in their order
                                               └► with windows: `window` rows held, in random order

A window's order depends on the seed, the epoch and the window's start. So a reader that continues
inside a window yields the rest of the same order, also where its host has the files elsewhere.

Covers: Source (the protocol of all formats), RowRun, windows.
Does not: make batches (reader), read splits side by side (lanes), decide what is read (positions).
Threads: one consumer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from feeding.columnar.ops import (
    Columns,
    joined,
    num_rows,
    reordered,
    rows_between,
    rows_within,
)
from feeding.columnar.schema import Schema
from feeding.errors import FileChanged
from feeding.reading.host_paths import below
from feeding.reading.lanes import Lanes, turn_rows
from feeding.reading.positions import EpochPosition, Front, WorkerPart
from feeding.reading.splits import SourceFile, Split


class Source(Protocol):
    """Files of one format."""

    @property
    def schema(self) -> Schema:
        """Schema of the rows; `read` yields the columns in this order."""

    @property
    def num_skipped(self) -> int:
        """Damaged records and files that were skipped so far."""

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
    width: int
    """Splits read side by side."""
    window_bytes: int
    """A window ends before it exceeds them."""
    directory: str
    """The files' common directory on this host, which is no part of a window's name."""


@dataclass(frozen=True, slots=True)
class RowRun:
    """Consecutive rows in the order of reading, with the places before and after them."""

    columns: Columns
    start: EpochPosition
    end: EpochPosition

    def after(self, count: int) -> EpochPosition:
        """Return the place after the first `count` rows, at least one."""
        start = self.start
        if count == num_rows(self.columns):
            return self.end
        if start.rows:
            return msgspec.structs.replace(start, taken=start.taken + count)
        (split, row), *others = start.front.lanes
        lanes = ((split, row + count), *others)
        front = msgspec.structs.replace(start.front, lanes=lanes)
        return msgspec.structs.replace(start, front=front)


def runs(source: Source, part: WorkerPart, number: int, order: Order) -> Iterator[RowRun]:
    """Yield the rest of a part.

    Args:
        source: source of the rows.
        part: the splits, and how much of them earlier runs have read.
        number: of the part within the epoch's work.
        order: order of its rows.

    Raises:
        FileChanged: a split has fewer rows than earlier runs have read from it.
    """
    # A window that was begun is read as it was, with as many lanes.
    width = part.place.width if part.place.taken else order.width
    lanes = Lanes(source, part, width, turn_rows(order.window))
    if order.window > 1:
        yield from _windows(lanes, part, number, order)
        return
    while lanes.is_ready():
        start = EpochPosition(order.epoch, number, lanes.front)
        columns = lanes.peek(_ALL)
        lanes.move(num_rows(columns))
        yield RowRun(columns, start, EpochPosition(order.epoch, number, lanes.front))


_ALL = 1 << 62


def _windows(lanes: Lanes, part: WorkerPart, number: int, order: Order) -> Iterator[RowRun]:
    place = part.place
    if place.taken:
        begin = lanes.front
        held = _held(lanes, place.rows, _ALL)
        found = sum(map(num_rows, held))
        if found < place.rows:
            raise FileChanged(
                f"a window from {part.splits[begin.lanes[0][0]]} on has {found} rows, it had "
                f"{place.rows}: a file has changed since the position was saved"
            )
        start = EpochPosition(order.epoch, number, begin, place.taken, width=place.width)
        yield _window(held, part, start, lanes.front, order)
        if part.ends_with_window:
            return
        lanes.widen(order.width)
    while lanes.is_ready():
        begin = lanes.front
        held = _held(lanes, order.window, order.window_bytes)
        start = EpochPosition(order.epoch, number, begin, width=order.width)
        yield _window(held, part, start, lanes.front, order)


def _held(lanes: Lanes, most_rows: int, most_bytes: int) -> list[Columns]:
    """Return the next rows up to a number of rows or bytes, at least one row if there is any."""
    held: list[Columns] = []
    while most_rows and lanes.is_ready():
        rows = lanes.peek(most_rows)
        count = num_rows(rows)
        fitting, size = rows_within(rows, most_bytes)
        if fitting < count:
            fitting = fitting if held else max(1, fitting)
            if fitting:
                held.append(rows_between(rows, 0, fitting))
                lanes.move(fitting)
            break
        held.append(rows)
        lanes.move(count)
        most_rows -= count
        most_bytes -= size
    return held


def _window(
    held: Sequence[Columns], part: WorkerPart, start: EpochPosition, end: Front, order: Order
) -> RowRun:
    columns = joined(held)
    rows = num_rows(columns)
    split, row = start.front.lanes[0]
    first = part.splits[split]
    path = below(order.directory, first.path)
    name = (zlib.crc32(path.encode()), first.piece or 0, first.start, row)
    generator = np.random.default_rng([abs(order.seed or 0), order.epoch, *name])
    numbers = generator.permutation(rows)[start.taken :]
    return RowRun(
        reordered(columns, numbers),
        msgspec.structs.replace(start, rows=rows, end=end),
        EpochPosition(order.epoch, start.part, end),
    )
