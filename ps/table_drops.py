"""Which rows a segment has dropped since its last save: a delta must not bring them back.

Covers: keeping these ids, for one segment, in bounded memory.
Does not: drop rows (ps.table_segment) or write (ps.table_copy).
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
        self._is_saving = False

    def add(self, ids: Array) -> None:
        """Note dropped ids, an array of its own."""
        if self._ids is None:
            return
        self._ids.append(ids)
        self._num_ids += ids.size
        if self._num_ids > MAX_KEPT and not self._is_saving:
            self.forget()

    def begin(self, base: int | None) -> bool:
        """Begin a save; returns whether the log reaches back to the save that ended at `base`."""
        reaches = self._ids is not None and base == self._since
        if not reaches:
            self._ids, self._num_ids = [], 0
        self._is_saving = True
        return reaches

    def take(self) -> Array:
        """Return and remove what is in the log."""
        ids = self._ids or []
        self._ids, self._num_ids = [], 0
        return np.concatenate([np.empty(0, np.int64), *ids])

    def end(self, version: int) -> None:
        """Note that a save holds everything up to this version."""
        self._since = version
        self._is_saving = False

    def forget(self) -> None:
        """Drop the log: the next save is whole."""
        self._ids, self._num_ids, self._is_saving = None, 0, False
