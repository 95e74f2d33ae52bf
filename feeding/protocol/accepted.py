"""Which rows of a partition a worker accepted, and where they stand among all it accepted.

Covers: Accepted, as worker, feed task and driver keep it; its packed form.
Does not: decide what is fed again (tfos.feed.ledger).      Pure.

A worker hands out the rows of an epoch in the order in which it accepted them. So one number per
epoch, how many rows were trained, tells of each row of each partition whether it was.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from feeding.protocol.row_ranges import Span

Entry = tuple[int, int, int]
"""First row in the partition, number of rows, position of the first in the worker's epoch."""
_NUMBERS = 3
_HEAD = struct.Struct("<qq")


class Accepted:
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

    def split(self, position: int) -> tuple[Accepted, list[Span]]:
        """Return what stands before this position, and the rows that stand behind it."""
        before, behind = Accepted(), []
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
    def unpack(cls, packed: bytes) -> Accepted:
        """Return what was packed."""
        steps = np.frombuffer(zlib.decompress(packed[_HEAD.size :]), "<i8").reshape(-1, _NUMBERS)
        entries = np.cumsum(steps, axis=0).tolist()
        return cls([(row, count, place) for row, count, place in entries])


def rows_and_end(packed: bytes) -> tuple[int, int]:
    """Return the number of rows that were packed, and the position behind all of them."""
    num_rows, end = _HEAD.unpack_from(packed)
    return num_rows, end
