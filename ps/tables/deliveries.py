"""Lookups to train on, remembered until their pushes come: how old rows became, and where they are.

Covers: which lookup a push belongs to; a histogram of updates between the two; the row numbers that
a lookup has found, kept for its push.
Does not: look rows up or change them (ps.tables.segment), show the histogram (ps.stats.prometheus).
Runs in: PS processes.
Threads: one lock guards RowStaleness, whose methods any thread may call. A segment's lock
serialises all calls of its RecentLookups.

A push brings gradients for the very ids of a lookup before it, so the ids themselves tell which
lookup that was: no request names it. The cost is that of a few numbers per request, whatever the
number of ids. Of each worker the newest deliveries are kept: those that are never pushed for would
else stay. What was forgotten is counted, for its push will not be.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np

from ps.manifest.manifest import WorkerRank
from ps.stats.server_stats import NUM_STALENESS_BINS

Array = np.ndarray[Any, Any]

MAX_OPEN = 32
"""Deliveries of one worker whose gradients may still come; the oldest one is forgotten first. More
than the batches that a worker has under way."""
MAX_KEPT, MAX_KEPT_IDS = 256, 1 << 17
"""Lookups of one segment, of all workers, and their row numbers that are kept at most: 1 MiB."""
_SAMPLES = 8
_Delivery = tuple[int, tuple[int, ...]]


class RowStaleness:
    """What one table's rows were delivered for, and how old they were when gradients came."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._updates = 0
        self._given: defaultdict[WorkerRank, OrderedDict[_Delivery, int]] = defaultdict(OrderedDict)
        self._forgotten = 0
        self._bins = [0] * NUM_STALENESS_BINS

    def delivered(self, worker: WorkerRank, ids: Array) -> None:
        """A worker is given the rows of these ids to train on: call it before they are read.

        Args:
            worker: rank.
            ids: [n] int64, in the order in which they will be pushed.
        """
        if not ids.size:
            return
        with self._lock:
            given, delivery = self._given[worker], _named(ids)
            given[delivery] = self._updates
            given.move_to_end(delivery)
            if len(given) > MAX_OPEN:
                given.popitem(last=False)
                self._forgotten += 1

    def pushed(self, worker: WorkerRank, ids: Array) -> None:
        """Gradients for these rows have come; counts them unless no delivery is known.

        Args:
            worker: rank.
            ids: [n] int64, as they were delivered.
        """
        if not ids.size:
            return
        with self._lock:
            since = self._given[worker].pop(_named(ids), None)
            if since is not None:
                staleness = self._updates - since
                self._bins[min(staleness.bit_length(), NUM_STALENESS_BINS - 1)] += 1

    def updated(self) -> None:
        """One push, or one clock, has changed rows of the table."""
        with self._lock:
            self._updates += 1

    @property
    def bins(self) -> tuple[int, ...]:
        """The histogram, as `TableStats.staleness`."""
        with self._lock:
            return tuple(self._bins)

    @property
    def forgotten(self) -> int:
        """Deliveries that were dropped before gradients came, as `TableStats.forgotten`."""
        with self._lock:
            return self._forgotten


class RecentLookups:
    """The row numbers that the newest lookups of one segment have found.

    A search in a large index takes a cache miss in its slots and one in the rows' ids; to confirm
    row numbers takes the second alone. They are not promised to be right: rows move and go, and two
    lookups may share a name.
    """

    def __init__(self) -> None:
        self._rows: OrderedDict[_Delivery, Array] = OrderedDict()
        self._num_ids = 0

    def keep(self, ids: Array, rows: Array) -> None:
        """Keep what a lookup has found, and forget the oldest ones beyond the limits.

        Args:
            ids: [n] int64, in the order in which they will be pushed.
            rows: [n] int64, the row of each id, below 0: none; from now on this object's.
        """
        if not 0 < ids.size <= MAX_KEPT_IDS:
            return
        delivery = _named(ids)
        self._remove(delivery)
        self._rows[delivery] = rows
        self._num_ids += rows.size
        while self._num_ids > MAX_KEPT_IDS or len(self._rows) > MAX_KEPT:
            self._remove(next(iter(self._rows)))

    def take(self, ids: Array) -> Array | None:
        """Return the row numbers of a lookup of probably these ids, once, or None and forget all.

        Args:
            ids: [n] int64, as they were looked up.
        """
        rows = self._remove(_named(ids))
        if rows is None:  # several workers' ids, merged: no lookup will be pushed as it was
            self._rows.clear()
            self._num_ids = 0
        return rows

    def _remove(self, delivery: _Delivery) -> Array | None:
        rows = self._rows.pop(delivery, None)
        if rows is not None:
            self._num_ids -= rows.size
        return rows


def _named(ids: Array) -> _Delivery:
    """Return what tells these ids from other batches: their number and some of them."""
    return ids.size, tuple(ids[:: max(1, ids.size // _SAMPLES)].tolist())
