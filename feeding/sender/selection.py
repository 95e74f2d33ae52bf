"""Which rows of a partition a feed task sends: all, or what is wanted and was not accepted before.

Covers: Selection.      Does not: make chunks (packer, shuffle), send them (feeder).      Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from feeding.columnar.chunk import Chunk
from feeding.protocol.accepted import Accepted
from feeding.protocol.row_ranges import RowRanges, Span


class Selection:
    """Rows by number, in the order in which the partition is fed.

    Args:
        only: these rows; None: all.
    """

    def __init__(self, only: Iterable[Span] | None = None) -> None:
        self._only = None if only is None else RowRanges(only)
        self._done = RowRanges()

    @property
    def num_rows(self) -> int | None:
        """How many rows are wanted; None: all of the partition."""
        return None if self._only is None else self._only.num_rows

    @property
    def last_done(self) -> int:
        """One more than the last row that was accepted before."""
        return self._done.stop

    def ends_before(self, row: int) -> bool:
        """Whether no row from this one on is wanted."""
        return self._only is not None and row >= self._only.stop

    def leave_out(self, accepted: Accepted) -> Accepted:
        """Leave out what a worker accepted before; return what of it is wanted here."""
        found = Accepted()
        for row, count, position in accepted:
            for start, stop in self._wanted(row, row + count):
                found.add(start, stop - start, position + start - row)
                self._done.add(start, stop)
        return found

    def pick(self, chunk: Chunk) -> Iterator[Chunk]:
        """Yield the parts of a chunk that are to be sent."""
        if self._only is None and not self._done:  # as nearly always
            yield chunk
            return
        first = chunk.meta.first_row
        for start, stop in self._wanted(first, first + chunk.num_rows):
            for low, high in self._done.outside(start, stop):
                yield chunk.cut(low - first, high - first)

    def _wanted(self, start: int, stop: int) -> list[Span]:
        return [(start, stop)] if self._only is None else self._only.inside(start, stop)
