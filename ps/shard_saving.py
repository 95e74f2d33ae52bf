"""One server's part of a save and of a restore: values, slots, clock and the exactly-once record.

Covers: a cut in which values and record agree, in both modes.
Does not: write files (ps.checkpoint), commit (ps.client), start serving (ps.service).
Runs in: PS processes.
Threads: any; saves of one server come one after the other (`ps.service` holds a lock).

async: each bucket is copied together with its column of the record, while pushes go on in the other
buckets. Per bucket the cut is exact; the push that was in flight is found half applied after a
restore and resumed, if its sender still lives.
sync: all buckets are copied in memory between two clocks, then written while training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ps.applied import AppliedRecord, Column, SessionCut
from ps.checkpoint import write_shard
from ps.checkpoint_format import Checkpoint, ShardRecord, new_arrays
from ps.checkpoint_reader import read_extra, restore_shard
from ps.dense import DenseShard
from ps.errors import CheckpointError
from ps.params import UNREADABLE
from ps.serving import ServingShard

Array = np.ndarray[Any, Any]


class ShardExtra(msgspec.Struct, frozen=True):
    """What a server saves beside its values."""

    clock: int
    sessions: tuple[SessionCut, ...]


def save_shard(
    shard: ServingShard, root: str | Path, save_id: str, *, rank: int
) -> tuple[ShardRecord, int]:
    """Write this server's file; returns its manifest record and its clock.

    Raises:
        CheckpointError: disk full, no permission, or a value is not finite; nothing is left.
    """
    if shard.manifest.consistency == "sync":
        source: _Source = _MemoryCopy(shard)
    else:
        source = _LiveCopy(shard)
    record = write_shard(root, save_id, rank=rank, shard=source, extra=source.extra)
    return record, source.clock


def restore_into(
    root: str | Path, checkpoint: Checkpoint, dense: DenseShard, *, rank: int, num_servers: int
) -> ShardExtra:
    """Fill a shard that nobody uses yet; returns its clock and record.

    With another number of servers the sessions are not taken over: their numbers count requests to
    one server, and those servers are gone.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    restore_shard(root, checkpoint, dense)
    saved = len(checkpoint.shards)
    extras = [_decode(read_extra(root, checkpoint, server), server) for server in range(saved)]
    clock = max((extra.clock for extra in extras), default=0)
    own = extras[rank] if rank < saved else ShardExtra(0, ())
    buckets = {len(session.applied) for session in own.sessions}
    is_same_cut = buckets <= {len(dense.buckets)} and saved == num_servers
    return ShardExtra(clock, own.sessions if is_same_cut else ())


class _Source:
    """What ps.checkpoint.write_shard copies from."""

    def __init__(self, shard: ServingShard) -> None:
        self._shard = shard
        self.manifest = shard.manifest
        self.layout = shard.dense.layout
        self.buckets = shard.dense.buckets
        self.clock = 0
        self._columns: list[Column] = []

    @property
    def bucket_ids(self) -> tuple[int, ...]:
        """As ps.dense.DenseShard."""
        return self._shard.dense.bucket_ids

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        """Copy a bucket and note what was applied to it."""
        with self._shard.holding(bucket_id):
            self._columns.append(self._shard.column_at(bucket_id))
            return self._shard.dense.dump(bucket_id, out)

    def extra(self) -> bytes:
        """The clock and the record, once all buckets are copied."""
        return msgspec.msgpack.encode(ShardExtra(self.clock, AppliedRecord.cut(self._columns)))


class _LiveCopy(_Source):
    """Buckets as they are at the moment each is copied."""

    def extra(self) -> bytes:
        self.clock = self._shard.gate.clock
        return super().extra()


class _MemoryCopy(_Source):
    """All buckets as they were between two clocks."""

    def __init__(self, shard: ServingShard) -> None:
        super().__init__(shard)
        self._copies: dict[int, tuple[int, list[Array]]] = {}
        # Memory first: its pages are touched before the barrier is held.
        fresh = {
            bucket.id: new_arrays(self.layout, self.manifest, bucket.id) for bucket in self.buckets
        }
        with shard.gate.between_clocks() as clock:
            self.clock = clock
            for bucket_id, arrays in fresh.items():
                self._copies[bucket_id] = (super().dump(bucket_id, arrays), arrays)

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        step, arrays = self._copies.pop(bucket_id)
        for target, source in zip(out, arrays, strict=True):
            np.copyto(target, source)
        return step


def _decode(data: bytes, server: int) -> ShardExtra:
    try:
        return msgspec.msgpack.decode(data, type=ShardExtra)
    except UNREADABLE as error:
        raise CheckpointError(f"the records of ps:{server} cannot be read: {error}") from error
