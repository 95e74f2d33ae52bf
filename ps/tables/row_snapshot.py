"""Row snapshot: rows of a segment at one moment, copied when pushes change them later.

Covers: which rows a save still needs, their copies until the save takes them.
Does not: copy unchanged rows (ps.checkpoint.snapshot), know a segment.
Runs in: PS processes.      Threads: the segment's lock serialises all calls but `release`.

The save needs a row that is below `stop` (it reads from the last row down), has not changed since
the snapshot, and has changed since the base of a delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ps.tables.rows import RowBatch

Array = np.ndarray[Any, Any]


class RowSnapshot:
    """Rows of one segment that a save still needs.

    Args:
        since: newest version that an earlier save holds; -1: none.
        version: the segment's version at the snapshot.
        stop: the segment's number of rows at the snapshot.
    """

    def __init__(self, since: int, version: int, stop: int) -> None:
        self.since = since
        self.version = version
        self.stop = stop
        """The save has copied the rows from this number on."""
        self._kept: list[RowBatch] = []

    def keep(self, rows: Array, columns: Sequence[Array]) -> None:
        """Copy the needed ones of these rows, before they change.

        Args:
            rows: [n] int64, row numbers; those below 0 are skipped.
            columns: ids, rows and versions of the segment; see RowBatch.
        """
        marked = rows[(rows >= 0) & (rows < self.stop)]
        versions = columns[2][marked]
        marked = marked[(versions > self.since) & (versions <= self.version)]
        if marked.size:
            self._kept.append(RowBatch(*(column[marked] for column in columns)))

    def take(self) -> RowBatch | None:
        """Return and release the copies, each id once."""
        kept, self._kept = self._kept, []
        if not kept:
            return None
        # A push that failed half-way has changed no row; the next one copies its rows again.
        _, first = np.unique(np.concatenate([batch.ids for batch in kept]), return_index=True)
        return RowBatch(*(np.concatenate(column)[first] for column in zip(*kept, strict=True)))

    def release(self) -> None:
        """Release all copies; need no more rows."""
        self.stop = 0
        self._kept = []
