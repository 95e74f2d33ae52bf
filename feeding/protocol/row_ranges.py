"""Sets of row numbers as ranges: what was accepted, what was trained, what is to be fed again.

Covers: RowRanges.      Does not: know what the numbers count.      Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

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
