"""Sets of row numbers as ranges: what was accepted, what was trained, what is to be fed again.

Covers: RowRanges.      Does not: know what the numbers count.      Pure.

[merged feeding/protocol/row_ranges.py] Which rows of a partition a worker accepted, and where
they stand among all it accepted.

Covers: AcceptedRows, as worker, feed task and driver keep it; its packed form.
Does not: decide what is fed again (tfos.feed.ledger).      Pure.

A worker hands out the rows of an epoch in the order in which it accepted them. So one number per
epoch, how many rows were trained, tells of each row of each partition whether it was.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

Span = tuple[int, int]
"""Rows from the first number up to, and without, the second."""


class RowRanges:
    """Disjoint ranges in rising order; those that touch are one."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in spans:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Span]:
        return iter(zip(self._starts, self._stops, strict=True))

    def __bool__(self) -> bool:
        return bool(self._starts)

    @property
    def num_rows(self) -> int:
        """How many numbers there are."""
        return sum(self._stops) - sum(self._starts)

    @property
    def first_gap(self) -> int:
        """The smallest number from 0 on that is not in here."""
        return self._stops[0] if self._starts and not self._starts[0] else 0

    @property
    def stop(self) -> int:
        """One more than the largest number; 0 if there is none."""
        return self._stops[-1] if self._stops else 0

    def add(self, start: int, stop: int) -> None:
        """Add numbers; those that are in here already stay."""
        if stop <= start:
            return
        if self._stops and start == self._stops[-1]:  # as nearly always
            self._stops[-1] = stop
            return
        low, high = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def inside(self, start: int, stop: int) -> list[Span]:
        """Return the parts of a range that are in here."""
        if stop <= start:
            return []
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return [
            (max(start, self._starts[at]), min(stop, self._stops[at])) for at in range(low, high)
        ]

    def outside(self, start: int, stop: int) -> list[Span]:
        """Return the parts of a range that are not in here."""
        found: list[Span] = []
        for low, high in self.inside(start, stop):
            if start < low:
                found.append((start, low))
            start = high
        if start < stop:
            found.append((start, stop))
        return found


Entry = tuple[int, int, int]
"""First row in the partition, number of rows, position of the first in the worker's epoch."""
_NUMBERS = 3
_HEAD = struct.Struct("<qq")


class AcceptedRows:
    """Rows of one partition at one worker, in the order in which they were accepted."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries: list[Entry] = list(entries)
        self.num_rows = sum(count for _, count, _ in entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, first_row: int, num_rows: int, position: int) -> None:
        """Note rows that were accepted."""
        self.num_rows += num_rows
        if self._entries:
            row, count, place = self._entries[-1]
            if row + count == first_row and place + count == position:
                self._entries[-1] = (row, count + num_rows, place)
                return
        self._entries.append((first_row, num_rows, position))

    def page(self, start: int, most: int) -> tuple[Entry, ...]:
        """Return some entries from number `start` on."""
        return tuple(self._entries[start : start + most])

    def spans(self) -> Iterator[Span]:
        """Yield the rows as ranges."""
        return ((row, row + count) for row, count, _ in self._entries)

    def rows_before(self, position: int) -> int:
        """Return how many rows stand before this position."""
        return sum(max(0, min(count, position - place)) for _, count, place in self._entries)

    def split(self, position: int) -> tuple[AcceptedRows, list[Span]]:
        """Return what stands before this position, and the rows that stand behind it."""
        before, behind = AcceptedRows(), []
        for row, count, place in self._entries:
            kept = max(0, min(count, position - place))
            if kept:
                before.add(row, kept, place)
            if kept < count:
                behind.append((row + kept, row + count))
        return before, behind

    def pack(self) -> bytes:
        """Return a compact form: chunks are much alike, so their differences shrink well."""
        end = max((place + count for _, count, place in self._entries), default=0)
        numbers = np.array(self._entries, "<i8").reshape(-1, _NUMBERS)
        steps = np.diff(numbers, axis=0, prepend=0)
        return _HEAD.pack(self.num_rows, end) + zlib.compress(steps.tobytes(), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> AcceptedRows:
        """Return what was packed."""
        steps = np.frombuffer(zlib.decompress(packed[_HEAD.size :]), "<i8").reshape(-1, _NUMBERS)
        entries = np.cumsum(steps, axis=0).tolist()
        return cls([(row, count, place) for row, count, place in entries])


def rows_and_end(packed: bytes) -> tuple[int, int]:
    """Return the number of rows that were packed, and the position behind all of them."""
    num_rows, end = _HEAD.unpack_from(packed)
    return num_rows, end
