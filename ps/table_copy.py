"""A segment's rows as they are at one moment, copied while pushes go on.

Covers: rounds of batches, the last of which is a cut.
Does not: write (ps.checkpoint), hold more rows in memory than one round's pushes have changed.
Runs in: PS processes.      Threads: one a copy; the segment's lock is held for a batch at a time.

First all rows are copied, in batches between which pushes go on; then those that were changed
meanwhile, and so on until few are left. These are copied under one hold of the lock, together with
the record: from then on rows and record are one cut. An id may come several times; the last counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ps.table import Table
from ps.table_batch import ROWS_AT_ONCE, Batch, Dropped

Array = np.ndarray[Any, Any]

MAX_ROUNDS = 8
"""Where pushes change rows faster than they are written, the ninth round holds them up."""


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
        """Of the segment at the cut; known after the last batch, as `counts`."""
        self.counts: Array = np.empty(0, np.uint16)
        """How often ids came that have no row yet; empty where the table does not count."""
        self._segment = table.segments[place[1]]
        self._base = base
        self._at_cut = at_cut

    def batches(self) -> Iterator[Batch | Dropped]:
        """Give rows, and ids whose rows are gone, in the order in which they are to be applied."""
        segment = self._segment
        try:
            with segment.lock:
                self.is_whole = not segment.drops.begin(self._base)
            since = -1 if self.is_whole or self._base is None else self._base
            for _ in range(MAX_ROUNDS):
                with segment.lock:
                    if segment.num_changed(since) <= ROWS_AT_ONCE:
                        break
                    start, stop, gone = segment.version, segment.num_rows, segment.drops.take()
                yield from _pieces(Dropped(gone))
                while stop:
                    with segment.lock:
                        batch, stop = segment.dump(stop, ROWS_AT_ONCE, since)
                    yield from _pieces(batch)
                since = start
            gone, batch = self._cut(since)
        except BaseException:
            with segment.lock:
                segment.drops.forget()
            raise
        yield from _pieces(Dropped(gone))
        yield from _pieces(batch)

    def _cut(self, since: int) -> tuple[Array, Batch]:
        segment = self._segment
        with segment.lock:
            batch, _ = segment.dump(segment.num_rows, segment.num_rows, since)
            gone = segment.drops.take()
            self.version, self.counts = segment.version, segment.counts.copy()
            self._at_cut()
            segment.drops.end(segment.version)
        return gone, batch


def _pieces(batch: Batch | Dropped) -> Iterator[Batch | Dropped]:
    for start in range(0, batch.ids.size, ROWS_AT_ONCE):
        yield type(batch)(*(column[start : start + ROWS_AT_ONCE] for column in batch))
