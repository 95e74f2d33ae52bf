"""A segment's rows as they are at one moment, copied while pushes go on.

Covers: the moment, the rows that nobody changes after it, and those that were kept
(ps.tables.row_snapshot).
Does not: write (ps.checkpoint.writer), decide when (ps.checkpoint.snapshot).
Runs in: PS processes.      Threads: one a copy; the segment's lock is held for a batch at a time.

From the cut on a push first copies the rows that it changes and that are not written yet, so it is
held up by no more than its own rows. Copies are written with the next batch, which frees them. An
id may come several times, always with the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ps.tables.row_snapshot import RowCut
from ps.tables.rows import ROWS_AT_ONCE, Batch, Dropped
from ps.tables.table import Table

Array = np.ndarray[Any, Any]


class SegmentCopy:
    """One segment of a table on its way into a checkpoint.

    Args:
        table: this server's share.
        place: the table's number in the manifest, and the segment's in the table.
        base: the version that an earlier save ended at, to copy what has changed since; None: all.
        at_cut: called under the segment's lock at the moment that the copy is of.
    """

    def __init__(
        self, table: Table, place: tuple[int, int], base: int | None, at_cut: Callable[[], None]
    ) -> None:
        self.spec = table.spec
        self.place = place
        self.is_whole = True
        """Whether the batches are all rows, not only what has changed since the base."""
        self.version = 0
        """Of the segment at the cut."""
        self.counts: Array = np.empty(0, np.uint16)
        """How often ids came that have no row yet; empty where the table does not count."""
        self._segment = table.segments[place[1]]
        self._base = base
        self._at_cut = at_cut
        self._gone: Array = np.empty(0, np.int64)
        self._rows: RowCut | None = None
        self._is_released = False

    def begin(self) -> RowCut:
        """Make the cut if that was not done; the caller holds the segment's lock."""
        if self._rows is None:
            segment = self._segment
            gone = segment.drops.cut(self._base, segment.version)
            self.is_whole = gone is None
            since = -1 if gone is None or self._base is None else self._base
            self._gone = self._gone if gone is None else gone
            self.version, self.counts = segment.version, segment.counts.copy()
            self._rows = segment.cut = RowCut(since, segment.version, segment.num_rows)
            self._at_cut()
            if self._is_released:  # since its caller looked
                self._rows.release()
        return self._rows

    def batches(self) -> Iterator[Batch | Dropped]:
        """Give ids whose rows are gone, then rows: the order in which they are to be applied."""
        segment = self._segment
        with segment.lock:
            cut = self.begin()
        yield from _pieces(Dropped(self._gone))
        while cut.stop:
            with segment.lock:
                batch, cut.stop = segment.dump(cut.stop, ROWS_AT_ONCE, cut.since, cut.version)
                kept = cut.take()
            yield from _pieces(batch)
            if kept is not None:
                yield from _pieces(kept)

    def release(self) -> None:
        """Keep nothing any more: the save is over, or given up."""
        self._is_released = True
        if self._rows is not None:
            self._rows.release()


def _pieces(batch: Batch | Dropped) -> Iterator[Batch | Dropped]:
    for start in range(0, batch.ids.size, ROWS_AT_ONCE):
        yield type(batch)(*(column[start : start + ROWS_AT_ONCE] for column in batch))
