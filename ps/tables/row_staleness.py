"""Staleness of one table's rows: its updates between the delivery of rows and their gradients.

Covers: which rows a worker was given when, and a histogram over its pushes of gradients for them.
Does not: look rows up or change them (ps.tables.table), show it (ps.stats.prometheus).
Runs in: PS processes.
Threads: every method may be called from any thread; one lock guards it.

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


def _named(ids: Array) -> _Delivery:
    """Return what tells these ids from other batches of their worker: their number and some."""
    return ids.size, tuple(ids[:: max(1, ids.size // _SAMPLES)].tolist())
