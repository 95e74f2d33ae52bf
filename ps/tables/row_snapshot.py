"""Row snapshot: rows of a segment at one moment, kept when pushes change them later.

Covers: which rows a save still needs, their copies until the save takes them.
Does not: copy the rows that nobody changes (ps.checkpoint.snapshot), know a segment's parts.
Runs in: PS processes.      Threads: the segment's lock serialises all calls but `release`.

A row is needed while it stands below `stop` (the save goes from the last row down), has not changed
since the cut, and has changed since the save that a delta adds to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ps.tables.rows import RowBatch

Array = np.ndarray[Any, Any]


class RowSnapshot:
    """What a save still needs of one segment.

    Args:
        since: rows of this version or an older one are in an earlier save; -1: none is.
        version: the segment's at the cut.
        stop: its rows at the cut.
    """

    def __init__(self, since: int, version: int, stop: int) -> None:
        self.since = since
        self.version = version
        self.stop = stop
        """Rows from here on were copied."""
        self._kept: list[RowBatch] = []

    def keep(self, rows: Array, columns: Sequence[Array]) -> None:
        """Copy those of these rows that are needed, before they change.

        Args:
            rows: numbers of rows; below 0: none.
            columns: ids, rows and versions of the segment.
        """
        marked = rows[(rows >= 0) & (rows < self.stop)]
        versions = columns[2][marked]
        marked = marked[(versions > self.since) & (versions <= self.version)]
        if marked.size:
            self._kept.append(RowBatch(*(column[marked] for column in columns)))

    def take(self) -> RowBatch | None:
        """Return and forget what was kept, each id once."""
        kept, self._kept = self._kept, []
        if not kept:
            return None
        # A push that was refused half-way has changed nothing, and its rows are kept again.
        _, first = np.unique(np.concatenate([batch.ids for batch in kept]), return_index=True)
        return RowBatch(*(np.concatenate(column)[first] for column in zip(*kept, strict=True)))

    def release(self) -> None:
        """Need nothing any more."""
        self.stop = 0
        self._kept = []
