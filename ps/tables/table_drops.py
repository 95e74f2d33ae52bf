"""Which rows a segment has dropped since its last save: a delta must not bring them back.

Covers: keeping these ids, for one segment, in bounded memory.
Does not: drop rows (ps.tables.segment) or write (ps.checkpoint.table_copy).
Threads: none; the segment's lock serialises all calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

MAX_KEPT = 1 << 20
"""Ids between two saves: 8 MiB. A segment that drops more is saved whole the next time."""


class DropLog:
    """Ids in the order in which they were dropped; nothing is kept before the first save."""

    def __init__(self) -> None:
        self._ids: list[Array] | None = None
        self._num_ids = 0
        self._since = 0

    def add(self, ids: Array) -> None:
        """Note dropped ids, an array of its own."""
        if self._ids is None:
            return
        self._ids.append(ids)
        self._num_ids += ids.size
        if self._num_ids > MAX_KEPT:
            self._ids, self._num_ids = None, 0

    def cut(self, base: int | None, version: int) -> Array | None:
        """Return what was dropped since the save that ended at `base`, and begin anew.

        None: the log does not reach back so far, so the segment has to be saved whole.

        Args:
            base: a version; None: of no save.
            version: where this save ends.
        """
        ids = self._ids
        reaches = ids is not None and base == self._since
        self._ids, self._num_ids, self._since = [], 0, version
        return np.concatenate([np.empty(0, np.int64), *(ids or [])]) if reaches else None
