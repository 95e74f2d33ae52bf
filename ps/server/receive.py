"""What a request's payload holds for a shard's buckets, read piece by piece and unpacked.

Covers: the sizes that are accepted, reading in runs, unpacking, the views of the buckets.
Does not: decide what becomes of it (ps.server.shard), apply (ps.dense.shard), own staging memory
(ps.dense.staging).
Runs in: PS processes.
Threads: any; every call reads into memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps.compression import kernels
from ps.compression.format import Compression, packed_nbytes
from ps.dense.shard import DenseShard
from ps.dense.staging import BucketRun, StagedGradient, cut_runs
from ps.errors import PackingError, ShapeError
from ps.manifest.manifest import Bucket
from ps.server.request import Incoming

Array = np.ndarray[Any, Any]

READ_BYTES = 1 << 19
"""Values read from the socket at once: few system calls, and they stay in the second-level cache
beside the buckets that they change (1 MiB made a push 25 % slower)."""


@dataclass(frozen=True, slots=True)
class BucketPart:
    """One bucket's part of a payload; the array is overwritten when the next part is taken."""

    index: int
    """Of the bucket, in the shard's order."""
    bucket: Bucket
    array: Array


class Intake:
    """Reads payloads that have something for each bucket of one shard.

    Args:
        dense: the shard's buckets; its values are not touched.
        packed: read gradients, packed as the manifest's groups say. Else values, as they are.
    """

    def __init__(self, dense: DenseShard, *, packed: bool) -> None:
        self._dense = dense
        self._runs = cut_runs(dense.buckets, READ_BYTES)
        kinds = {spec.name: spec.compression for spec in dense.manifest.groups if packed}
        self._kinds: list[Compression] = [
            kinds.get(bucket.group, "none") for bucket in dense.buckets
        ]
        kernels.warm_server({kind for kind in self._kinds if kind != "none"})
        self._sizes = [
            bucket.nbytes if kind == "none" else packed_nbytes(kind, bucket.num_elements)
            for bucket, kind in zip(dense.buckets, self._kinds, strict=True)
        ]
        self._run_sizes = [sum(self._sizes[run.start : run.stop]) for run in self._runs]
        pairs = zip(dense.buckets, self._kinds, strict=True)
        packed_elements = (bucket.num_elements for bucket, kind in pairs if kind != "none")
        self._most_unpacked = max(packed_elements, default=0)

    def check_size(self, got: int, what: str) -> None:
        """Refuse a payload that has not exactly what every owned bucket takes."""
        expected = sum(self._sizes)
        if got != expected:
            packed = sorted({kind for kind in self._kinds if kind != "none"})
            how = f", packed as {', '.join(packed)}" if packed else ""
            raise ShapeError(
                f"{what} brought {got} bytes, this shard's {len(self._sizes)} buckets take "
                f"{expected}{how}; slice the flat buffers as ps.client.slices does"
            )

    def runs(self, call: Incoming) -> Iterator[tuple[BucketRun, Iterator[BucketPart]]]:
        """Read the payload run by run; take what one holds before the next.

        A part raises PackingError instead of coming if it is packed as no packer does.
        """
        scratch = self._scratch()
        unpacked = np.empty(self._most_unpacked, np.float32)
        for run, size in zip(self._runs, self._run_sizes, strict=True):
            call.read_into(scratch.data[:size])
            yield run, self._parts(run, scratch, unpacked)

    def stage(self, call: Incoming, staged: StagedGradient) -> None:
        """Read the whole payload into staging memory.

        Raises:
            NonFiniteGradient, PackingError: the rest of the payload is not read.
        """
        scratch = self._scratch()
        for run, size in zip(self._runs, self._run_sizes, strict=True):
            if self._kinds[run.start] == "none":
                call.read_into(staged.window(run))
            else:
                call.read_into(scratch.data[:size])
                for index, data in self._cut(run, scratch):
                    self._unpack(index, data, staged.arrays[index])
            for index in range(run.start, run.stop):
                self._dense.check_finite(self._dense.buckets[index].id, staged.arrays[index])

    def _scratch(self) -> Array:
        return np.empty(max(self._run_sizes, default=0), np.uint8)

    def _parts(self, run: BucketRun, scratch: Array, unpacked: Array) -> Iterator[BucketPart]:
        for index, data in self._cut(run, scratch):
            bucket = self._dense.buckets[index]
            if self._kinds[index] == "none":
                array = data.view(self._dense.dtype(bucket.id))
            else:
                array = unpacked[: bucket.num_elements]
                self._unpack(index, data, array)
            yield BucketPart(index, bucket, array)

    def _cut(self, run: BucketRun, scratch: Array) -> Iterator[tuple[int, Array]]:
        """Give each bucket of a run, by its index, with its bytes in what was read."""
        offset = 0
        for index in range(run.start, run.stop):
            stop = offset + self._sizes[index]
            yield index, scratch[offset:stop]
            offset = stop

    def _unpack(self, index: int, data: Array, out: Array) -> None:
        try:
            kernels.unpack(self._kinds[index], data, out)
        except PackingError as error:
            bucket = self._dense.buckets[index]
            raise PackingError(
                f"bucket {bucket.id} of group {bucket.group!r} is unchanged: {error.message}",
                {**error.details, "bucket": str(bucket.id), "group": bucket.group},
            ) from None
