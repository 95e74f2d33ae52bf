"""Eviction of table rows: time to live, least recently used, and the tombstones that deltas need.

Covers: TtlClock, which maps row versions to ages by up to 65 marks (time, first version);
lru_victims, the eviction order (least recently pushed first, of one age the largest id first);
Tombstones, the ids dropped since the last save, in bounded memory.
Does not: drop rows (ps.tables.segment), write (ps.checkpoint.snapshot).
Threads: none; the segment's lock serialises all calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

MARKS = 64
"""Resolution of ages: a row may outlast its time to live by 1/64."""


class TtlClock:
    """Times at which one segment reached its versions.

    Args:
        ttl_s: time to live of a version in seconds; None: unlimited.
        clock: returns monotonic seconds.
    """

    def __init__(self, ttl_s: float | None, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()

    def expired(self, version: int) -> int | None:
        """Return the newest version whose time to live has ended since the last call, or None.

        Call it before version + 1 exists.
        """
        if self._ttl_s is None:
            return None
        now_s, grain_s = self._clock(), self._ttl_s / MARKS
        expired = None
        while self._marks and now_s - self._marks[0][0] >= self._ttl_s + grain_s:
            self._marks.popleft()
            # The versions before the next mark are within a grain of this one.
            expired = self._marks[0][1] - 1 if self._marks else version
        if not self._marks or now_s - self._marks[-1][0] >= grain_s:
            self._marks.append((now_s, version + 1))
        return expired

    def ages(self) -> tuple[tuple[float, int], ...]:
        """Return the marks for a save: seconds since each, and its first version."""
        now_s = self._clock()
        return tuple((now_s - mark_s, version) for mark_s, version in self._marks)

    def restore(self, ages: Sequence[tuple[float, int]]) -> None:
        """Go on from the marks of a save, as if no time had passed since it.

        Args:
            ages: what `ages` returned; empty: the save has none, and the time restarts.
        """
        self.restart()
        if ages and self._ttl_s is not None:
            now_s = self._clock()
            self._marks = deque((now_s - age_s, version) for age_s, version in ages)

    def set_ttl(self, ttl_s: float | None) -> None:
        """Have another time to live; without one so far, that of existing versions starts now.

        Args:
            ttl_s: seconds; None: unlimited.
        """
        had_none, self._ttl_s = self._ttl_s is None, ttl_s
        if had_none or ttl_s is None:
            self.restart()
            return
        # A longer time has a coarser grain: marks within one become the last of them, so that a
        # save has room for all.
        merged: deque[tuple[float, int]] = deque()
        start_s = 0.0
        for mark_s, version in self._marks:
            if merged and mark_s - start_s < ttl_s / MARKS:
                merged[-1] = (mark_s, merged[-1][1])
            else:
                start_s = mark_s
                merged.append((mark_s, version))
        self._marks = merged

    def restart(self) -> None:
        """Restart the time to live of all existing versions."""
        self._marks.clear()
        if self._ttl_s is not None:
            self._marks.append((self._clock(), 0))


Array = np.ndarray[Any, Any]


class RowAges(NamedTuple):
    """Ids and versions of one segment's rows, as copies."""

    ids: Array
    """int64[n]; for a table of uint64 ids their bits."""
    versions: Array
    """int64[n]: the push that changed the row last."""

    def without(self, ids: Array) -> RowAges:
        """Return the rows of all other ids."""
        is_other = ~np.isin(self.ids, ids)
        return RowAges(self.ids[is_other], self.versions[is_other])


def lru_victims(segments: Sequence[RowAges], num_rows: int) -> list[Array]:
    """Return for each segment the ids of its rows among the oldest `num_rows` of all.

    Every push is the next version of all segments, so versions are comparable between segments.

    Args:
        segments: ids and versions of each segment's rows.
        num_rows: rows to evict in total.

    Returns:
        One int64 array of ids per segment.
    """
    ids = np.concatenate([each.ids for each in segments])
    versions = np.concatenate([each.versions for each in segments])
    is_chosen: Array = np.zeros(ids.size, np.bool_)
    if num_rows >= ids.size:
        is_chosen[:] = True
    elif num_rows > 0:
        youngest = np.partition(versions, num_rows - 1)[num_rows - 1]
        is_chosen = versions < youngest
        (equal,) = np.nonzero(versions == youngest)
        rest = equal.size - (num_rows - np.count_nonzero(is_chosen))
        order = np.argsort(ids[equal].view(np.uint64))
        is_chosen[equal[order[rest:]]] = True
    ends = np.cumsum([each.ids.size for each in segments])[:-1]
    return [
        each.ids[chosen] for each, chosen in zip(segments, np.split(is_chosen, ends), strict=True)
    ]


MAX_KEPT = 1 << 20
"""Ids kept between two saves: 8 MiB. A segment that drops more is saved whole the next time."""


class Taken(NamedTuple):
    """What a save takes of the tombstones."""

    number: int
    """Number of this take, from 1: the base of a save that adds to this one."""
    since: int
    """Version at the base; -1: the segment must be saved whole."""
    gone: Array
    """[n] int64, ids dropped since the base; none if the segment is saved whole."""


class Tombstones:
    """Dropped ids in order; empty before the first save."""

    def __init__(self) -> None:
        self._ids: list[Array] | None = None
        self._num_ids = 0
        self._num_takes = 0
        self._since = 0
        """Version at the last take."""

    def add(self, ids: Array) -> None:
        """Add dropped ids, [n] int64; the array must be a copy."""
        if self._ids is None:
            return
        self._ids.append(ids)
        self._num_ids += ids.size
        if self._num_ids > MAX_KEPT:
            self._ids, self._num_ids = None, 0

    def forget(self) -> None:
        """Let the next save be whole: it must hold rows that no version tells from older ones."""
        self._ids, self._num_ids = None, 0

    def take(self, base: int | None, version: int) -> Taken:
        """Take the ids dropped since the last take, if that is the base, and start over.

        Two takes may be at one version, so the number of the take tells the base.

        Args:
            base: number of the base's take; None: there is no base.
            version: version of the segment now.
        """
        reaches = self._ids is not None and base == self._num_takes
        since = self._since if reaches else -1
        gone = [np.empty(0, np.int64), *((reaches and self._ids) or [])]
        self._num_takes += 1
        self._ids, self._num_ids, self._since = [], 0, version
        return Taken(self._num_takes, since, np.concatenate(gone))
