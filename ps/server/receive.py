"""The layout of a payload for a shard's buckets: sizes, runs that are read at once, unpacking.

Covers: the sizes that are accepted, where each bucket's bytes lie, unpacking, whole payloads.
Does not: decide what becomes of it (ps.server.shard), apply (ps.dense.shard), own staging memory
(ps.dense.staging).
Runs in: PS processes.
Threads: any; every call reads into memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from ps.compression import kernels
from ps.compression.format import Compression, packed_nbytes
from ps.dense.shard import DenseBucket, DenseShard
from ps.dense.staging import BucketRun, StagedGradient, split_into_runs
from ps.errors import PackingError, ShapeError
from ps.server.request import Incoming

Array = np.ndarray[Any, Any]

READ_BYTES = 1 << 19
"""Values read from the socket at once: few system calls, and they stay in the second-level cache
beside the buckets that they change (1 MiB made a push 25 % slower)."""


class BucketPart(msgspec.Struct, frozen=True):
    """One bucket's part of a payload."""

    at: int
    """Position of the bucket in the shard's order."""
    bucket: DenseBucket
    kind: Compression
    dtype: np.dtype[Any]
    start: int
    """Its bytes [start, stop) in what is read with its run."""
    stop: int


class PayloadRun(msgspec.Struct, frozen=True):
    """Neighbouring buckets that are read with one call."""

    buckets: BucketRun
    nbytes: int
    parts: tuple[BucketPart, ...]


class Intake:
    """The layout of payloads that have something for each bucket of one shard.

    Args:
        dense: the shard's buckets; its values are not touched.
        packed: read gradients, packed as the manifest's groups say. Else values, as they are.
    """

    def __init__(self, dense: DenseShard, *, packed: bool) -> None:
        self._dense = dense
        kinds = {spec.name: spec.compression for spec in dense.manifest.groups if packed}
        self.runs = tuple(
            _run_of(dense, run, kinds) for run in split_into_runs(dense.buckets, READ_BYTES)
        )
        parts = [part for run in self.runs for part in run.parts]
        self._kinds = {part.kind for part in parts if part.kind != "none"}
        kernels.warm_server(self._kinds)
        self.nbytes = sum(run.nbytes for run in self.runs)
        """Size of a whole payload."""
        self._scratch_nbytes = max((run.nbytes for run in self.runs), default=0)
        packed_sizes = [part.bucket.values.size for part in parts if part.kind != "none"]
        self._most_unpacked = max(packed_sizes, default=0)

    def check_size(self, got: int, what: str) -> None:
        """Refuse a payload that has not exactly what every owned bucket takes.

        Args:
            got: bytes of the payload.
            what: names the payload in the message.
        """
        if got != self.nbytes:
            how = f", packed as {', '.join(sorted(self._kinds))}" if self._kinds else ""
            raise ShapeError(
                f"{what} brought {got} bytes, this shard's {len(self._dense.buckets)} buckets take "
                f"{self.nbytes}{how}; slice the flat buffers as ps.client.slices does"
            )

    def scratch(self) -> tuple[Array, Array]:
        """Return memory of the caller's own: for the bytes of a run, and for an unpacked bucket."""
        return np.empty(self._scratch_nbytes, np.uint8), np.empty(self._most_unpacked, np.float32)

    def unpack(self, part: BucketPart, data: Array, out: Array) -> Array:
        """Unpack one part into the first elements of `out`, and return those.

        Args:
            part: the bucket and its place in the payload.
            data: [nbytes] uint8 as received.
            out: of the group's dtype, at least the bucket's elements; filled.

        Raises:
            PackingError: it is packed as no packer does.
        """
        out = out[: part.bucket.values.size]
        try:
            kernels.unpack(part.kind, data, out)
        except PackingError as error:
            bucket = part.bucket.bucket
            raise PackingError(
                f"bucket {bucket.id} of group {bucket.group!r} is unchanged: {error.message}",
                {**error.details, "bucket": str(bucket.id), "group": bucket.group},
            ) from None
        return out

    def values(self, call: Incoming) -> Iterator[tuple[int, Array]]:
        """Read values as they are; give each bucket's id, and its part until the next is taken."""
        scratch, _ = self.scratch()
        for run in self.runs:
            call.read_into(scratch.data[: run.nbytes])
            for part in run.parts:
                yield part.bucket.bucket.id, scratch[part.start : part.stop].view(part.dtype)

    def stage(self, call: Incoming, staged: StagedGradient) -> None:
        """Read the whole payload into staging memory.

        Args:
            call: the request, whose payload is read.
            staged: memory for the whole gradient; filled.

        Raises:
            NonFiniteGradient, PackingError: the rest of the payload is not read.
        """
        scratch, _ = self.scratch()
        for run in self.runs:
            if run.parts[0].kind == "none":
                call.read_into(staged.window(run.buckets))
            else:
                call.read_into(scratch.data[: run.nbytes])
                for part in run.parts:
                    self.unpack(part, scratch[part.start : part.stop], staged.arrays[part.at])
            for part in run.parts:
                self._dense.check_finite(part.bucket.bucket.id, staged.arrays[part.at])


def _run_of(dense: DenseShard, run: BucketRun, kinds: Mapping[str, Compression]) -> PayloadRun:
    parts: list[BucketPart] = []
    stop = 0
    for index in range(run.start, run.stop):
        owned = dense.owned[index]
        kind = kinds.get(owned.bucket.group, "none")
        plain = kind == "none"
        size = owned.bucket.nbytes if plain else packed_nbytes(kind, owned.values.size)
        parts.append(BucketPart(index, owned, kind, owned.values.dtype, stop, stop + size))
        stop += size
    return PayloadRun(run, stop, tuple(parts))
