"""Staging buffers of incoming gradients: runs of buckets read at once, and whole gradients.

Covers: joining a shard's buckets into reads, staging memory and its reuse.
Does not: read (ps.server.shard), decide (ps.consistency.gate).
Threads: a pool may be used from any thread; a staged gradient belongs to one thread until it
arrives at the gate, and to the gate after.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps.manifest.manifest import Bucket

Array = np.ndarray[Any, Any]

_ALIGNMENT = 64
PERIOD = 16
"""Pushes per buffer after which those are freed that none of them has needed: 16 clocks in sync."""


@dataclass(frozen=True, slots=True)
class BucketRun:
    """Buckets [start, stop) of a shard, of one group, that are read with one call."""

    start: int
    stop: int
    nbytes: int


def split_into_runs(buckets: Sequence[Bucket], max_bytes: int) -> tuple[BucketRun, ...]:
    """Join neighbouring buckets of one group into runs of at most `max_bytes` (or one bucket).

    Pure. Runs end at groups, so that each run's elements have one dtype and stay aligned.

    Args:
        buckets: buckets of a shard, ascending.
        max_bytes: largest run.
    """
    runs: list[BucketRun] = []
    for index, bucket in enumerate(buckets):
        last = runs[-1] if runs else None
        if (
            last is not None
            and buckets[last.start].group == bucket.group
            and last.nbytes + bucket.nbytes <= max_bytes
        ):
            runs[-1] = BucketRun(last.start, index + 1, last.nbytes + bucket.nbytes)
        else:
            runs.append(BucketRun(index, index + 1, bucket.nbytes))
    return tuple(runs)


class StagedGradient:
    """Memory for one gradient of all of a shard's buckets; each group starts aligned.

    Args:
        buckets: buckets of a shard, ascending.
        dtype_of: returns the dtype of a bucket by its number.
    """

    def __init__(self, buckets: Sequence[Bucket], dtype_of: Callable[[int], np.dtype[Any]]) -> None:
        starts: list[int] = []
        end = 0
        group = ""
        for bucket in buckets:
            if bucket.group != group:
                end += -end % _ALIGNMENT
                group = bucket.group
            starts.append(end)
            end += bucket.nbytes
        self._memory: Array = np.empty(end, np.uint8)
        self._starts = starts
        self.arrays: list[Array] = [
            self._memory[start : start + bucket.nbytes].view(dtype_of(bucket.id))
            for start, bucket in zip(starts, buckets, strict=True)
        ]
        """One view per bucket, in the shard's order."""

    def window(self, run: BucketRun) -> memoryview:
        """The bytes of a run, to read into."""
        start = self._starts[run.start]
        return self._memory.data[start : start + run.nbytes]


class StagingPool:
    """Keeps staging memory for the next push, so that pages are touched once.

    The last thread that writes or reads a buffer gives it back. A reader that is stuck on a dead
    connection keeps its own; a retry gets another. So after a bad moment there are more than are
    needed: those that lay unused for a while are freed.

    Args:
        buckets: buckets of a shard, ascending.
        dtype_of: returns the dtype of a bucket by its number.
    """

    def __init__(self, buckets: Sequence[Bucket], dtype_of: Callable[[int], np.dtype[Any]]) -> None:
        self._buckets = buckets
        self._dtype_of = dtype_of
        self._free: list[StagedGradient] = []
        self._all = weakref.WeakSet[StagedGradient]()
        """All buffers, also those in use; one whose push has failed is not given back."""
        self._num_unused = 0
        """Fewest that lay here at any moment of this period."""
        self._takes_left = 0
        """Takes until this period ends."""
        self._lock = threading.Lock()

    def take(self) -> StagedGradient:
        """Return a buffer; its content is arbitrary."""
        with self._lock:
            found = self._free.pop() if self._free else None
            self._num_unused = min(self._num_unused, len(self._free))
            self._takes_left -= 1
            if self._takes_left <= 0:
                del self._free[: self._num_unused]  # the last given back is the first taken
                self._num_unused = len(self._free)
                self._takes_left = PERIOD * len(self._all)
        if found is None:
            found = StagedGradient(self._buckets, self._dtype_of)
            with self._lock:
                self._all.add(found)
        return found

    def give(self, staged: StagedGradient) -> None:
        """Return a buffer that nobody uses any more."""
        with self._lock:
            self._free.append(staged)
