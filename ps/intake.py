"""What a request's payload holds for a shard's buckets, read piece by piece.

Covers: the sizes that are accepted, reading in runs, the views of the buckets in what was read.
Does not: decide what becomes of it (ps.serving), apply (ps.dense), own staging memory (ps.staging).
Runs in: PS processes.
Threads: any; every call reads into memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps.dense import DenseShard
from ps.errors import ShapeError
from ps.incoming import Incoming
from ps.params import Bucket
from ps.staging import Run, StagedGradient, cut_runs

Array = np.ndarray[Any, Any]

READ_BYTES = 1 << 19
"""Read from the socket at once: few system calls, and it stays in the second-level cache beside
the buckets that it changes (1 MiB made a push 25 % slower)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One bucket's part of a payload; the array is overwritten when the next run is read."""

    index: int
    """Of the bucket, in the shard's order."""
    bucket: Bucket
    array: Array


class Intake:
    """Reads gradients and values for the buckets of one shard.

    Args:
        dense: the shard's buckets; its values are not touched.
    """

    def __init__(self, dense: DenseShard) -> None:
        self._dense = dense
        self._runs = cut_runs(dense.buckets, READ_BYTES)

    def check_size(self, got: int, what: str) -> None:
        """Refuse a payload that is not exactly one value per owned element."""
        if got != self._dense.value_nbytes:
            raise ShapeError(
                f"{what} brought {got} bytes, this shard's {len(self._dense.buckets)} buckets take "
                f"{self._dense.value_nbytes}; slice the flat buffers as ps.pieces does"
            )

    def runs(self, call: Incoming) -> Iterator[tuple[Run, Iterator[Part]]]:
        """Read the payload run by run; take what one holds before the next."""
        scratch = np.empty(max((run.nbytes for run in self._runs), default=0), np.uint8)
        for run in self._runs:
            call.read_into(scratch.data[: run.nbytes])
            yield run, self._parts(run, scratch)

    def stage(self, call: Incoming, staged: StagedGradient) -> None:
        """Read the whole payload into staging memory.

        Raises:
            NonFiniteGradient: the rest of the payload is not read.
        """
        for run in self._runs:
            call.read_into(staged.window(run))
            for index in range(run.start, run.stop):
                self._dense.check_finite(self._dense.buckets[index].id, staged.arrays[index])

    def _parts(self, run: Run, scratch: Array) -> Iterator[Part]:
        offset = 0
        for index in range(run.start, run.stop):
            bucket = self._dense.buckets[index]
            stop = offset + bucket.nbytes
            yield Part(index, bucket, scratch[offset:stop].view(self._dense.dtype(bucket.id)))
            offset = stop
