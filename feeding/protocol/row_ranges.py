"""Row ranges: sets of row numbers, and the rows of a partition that a worker accepted.

Covers: RowRanges (disjoint ranges), AcceptedRows (for workers, feeders and the driver) and its
packed form.
Does not: decide which rows are fed again (tfos.feed.ledger).
Threads: pure; the owner serialises calls.

A worker reads the rows of an epoch in the order in which it accepted them. So one number per epoch,
the rows trained, tells for each row of each partition whether it was trained.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

Span = tuple[int, int]
"""(start, stop): rows from start to stop, stop excluded."""


class RowRanges:
    """Disjoint ranges in ascending order; adjacent ranges are merged."""

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
        """Number of rows in all ranges."""
        return sum(self._stops) - sum(self._starts)

    @property
    def first_gap(self) -> int:
        """Smallest row number from 0 on that is not in the set."""
        return self._stops[0] if self._starts and not self._starts[0] else 0

    @property
    def stop(self) -> int:
        """Largest row number plus one; 0 for an empty set."""
        return self._stops[-1] if self._stops else 0

    def add(self, start: int, stop: int) -> None:
        """Add rows `start` to `stop`, `stop` excluded; rows may be in the set already."""
        if stop <= start:
            return
        if self._stops and start == self._stops[-1]:  # the usual case: rows in order
            self._stops[-1] = stop
            return
        low, high = bisect_left(self._stops, start), bisect_right(self._starts, stop)
        if low < high:
            start, stop = min(start, self._starts[low]), max(stop, self._stops[high - 1])
        self._starts[low:high] = [start]
        self._stops[low:high] = [stop]

    def without(self, start: int, stop: int) -> RowRanges:
        """Return the set without the rows `start` to `stop`, `stop` excluded."""
        return RowRanges([*self.inside(0, start), *self.inside(stop, self.stop)])

    def inside(self, start: int, stop: int) -> list[Span]:
        """Return the parts of [start, stop) that are in the set.

        Args:
            start: the first row.
            stop: the row after the last.
        """
        if stop <= start:
            return []
        low, high = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        return [
            (max(start, self._starts[at]), min(stop, self._stops[at])) for at in range(low, high)
        ]

    def outside(self, start: int, stop: int) -> list[Span]:
        """Return the parts of [start, stop) that are not in the set.

        Args:
            start: the first row.
            stop: the row after the last.
        """
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
    """Rows of one partition that one worker accepted, in the order of acceptance."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self._entries: list[Entry] = list(entries)
        self.num_rows = sum(count for _, count, _ in entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def add(self, first_row: int, num_rows: int, position: int) -> None:
        """Add accepted rows.

        Args:
            first_row: in the partition.
            num_rows: consecutive rows.
            position: of the first row among all rows of the worker's epoch.
        """
        self.num_rows += num_rows
        if self._entries:
            row, count, at = self._entries[-1]
            if row + count == first_row and at + count == position:
                self._entries[-1] = (row, count + num_rows, at)
                return
        self._entries.append((first_row, num_rows, position))

    def page(self, start: int, most: int) -> tuple[Entry, ...]:
        """Return at most `most` entries from number `start` on.

        Args:
            start: number of the first entry.
            most: largest number of entries.
        """
        return tuple(self._entries[start : start + most])

    def spans(self) -> Iterator[Span]:
        """Yield the rows as ranges."""
        return ((row, row + count) for row, count, _ in self._entries)

    def rows_before(self, position: int) -> int:
        """Return the number of rows before a position of the epoch."""
        return sum(max(0, min(count, position - at)) for _, count, at in self._entries)

    def split(self, position: int) -> tuple[AcceptedRows, list[Span]]:
        """Return the rows before a position of the epoch, and the row numbers from it on."""
        before, after = AcceptedRows(), []
        for row, count, at in self._entries:
            kept = max(0, min(count, position - at))
            if kept:
                before.add(row, kept, at)
            if kept < count:
                after.append((row + kept, row + count))
        return before, after

    def between(self, start: int, stop: int) -> list[Span]:
        """Return the row numbers at these positions of the epoch.

        Args:
            start: the first position.
            stop: the position after the last.
        """
        parts = [(row + max(0, start - at), row + min(count, stop - at)) for row, count, at in self]
        return [(low, high) for low, high in parts if low < high]

    def pack(self) -> bytes:
        """Return a compressed form: entries are alike, so their differences compress well."""
        end = max((at + count for _, count, at in self._entries), default=0)
        numbers = np.array(self._entries, "<i8").reshape(-1, _NUMBERS)
        steps = np.diff(numbers, axis=0, prepend=0)
        return _HEAD.pack(self.num_rows, end) + zlib.compress(steps.tobytes(), 1)

    @classmethod
    def unpack(cls, packed: bytes) -> AcceptedRows:
        """Return the rows that `pack` encoded."""
        steps = np.frombuffer(zlib.decompress(packed[_HEAD.size :]), "<i8").reshape(-1, _NUMBERS)
        entries = np.cumsum(steps, axis=0).tolist()
        return cls([(row, count, at) for row, count, at in entries])


def rows_and_end(packed: bytes) -> tuple[int, int]:
    """Return the number of rows of a packed form, and the position after the last one."""
    num_rows, end = _HEAD.unpack_from(packed)
    return num_rows, end
