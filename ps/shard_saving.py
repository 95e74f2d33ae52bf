"""One server's part of a save and of a restore: values, slots, clock and the exactly-once record.

Covers: a cut in which values, rows and record agree, in both modes.
Does not: write files (ps.checkpoint), commit (ps.client), start serving (ps.service).
Runs in: PS processes.
Threads: any; saves of one server come one after the other (`ps.service` holds a lock).

async: each bucket is copied together with its column of the record, while pushes go on in the other
buckets. Per bucket the cut is exact; the push that was in flight is found half applied after a
restore and resumed, if its sender still lives.
sync: all buckets are copied in memory between two clocks, then written while training goes on.
tables: in both modes segment by segment after the buckets, each with its column (ps.table_copy).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ps import decoding, messages
from ps.applied import AppliedRecord, Column, SessionCut
from ps.checkpoint import Portion, write_shard
from ps.checkpoint_format import Checkpoint, ShardRecord, new_arrays
from ps.checkpoint_restore import read_extra, restore_shard
from ps.decoding import UNREADABLE
from ps.dense import DenseShard
from ps.errors import CheckpointError
from ps.lifecycle import ServerSettings
from ps.serving import ServingShard
from ps.table import Table
from ps.table_copy import SegmentCopy
from ps.table_restore import is_same_cut, restore_tables

Array = np.ndarray[Any, Any]

SETTLE_TIMEOUT_S = 10.0
"""For workers between the two rounds of a clipped push: one round trip."""
_MAX_REMEMBERED = 4
"""Saves that a delta may add to: the last one, or one before it if that failed."""


class ShardExtra(msgspec.Struct, frozen=True):
    """What a server saves beside its values."""

    clock: int
    sessions: tuple[SessionCut, ...] | None
    """None: after a restore into another number of servers; their numbers mean nothing here."""
    saved_at_s: float = 0.0
    """When the cut was made, in seconds since 1970: only to tell users how much was lost."""


Place = int | tuple[int, int]
"""A bucket's id, or a table's number and a segment's."""


class SavedVersions:
    """Which version of each bucket and segment this server's last saves hold."""

    def __init__(self) -> None:
        self._by_save: OrderedDict[str, dict[Place, int]] = OrderedDict()

    def of(self, save_id: str) -> Mapping[Place, int]:
        """Return the versions in a save; none for one that this server does not know."""
        return self._by_save.get(save_id, {})

    def note(self, save_id: str, versions: dict[Place, int]) -> None:
        """Remember a save, and forget the oldest."""
        self._by_save[save_id] = versions
        while len(self._by_save) > _MAX_REMEMBERED:
            self._by_save.popitem(last=False)


def save_shard(
    shard: ServingShard, request: messages.Save, saved: SavedVersions, *, rank: int
) -> tuple[ShardRecord, int]:
    """Write this server's file; returns its manifest record and its clock.

    Raises:
        CheckpointError: disk full, no permission, or a value is not finite; nothing is left.
    """
    base = saved.of(request.base)
    source = _MemoryCopy(shard, base) if shard.manifest.has_barrier else _LiveCopy(shard, base)
    record = write_shard(
        request.directory,
        request.save_id,
        rank=rank,
        shard=source,
        extra=source.extra,
        portion=Portion(source.is_unchanged, source.segments),
    )
    versions = dict(source.versions)
    versions.update((segment.place, segment.version) for segment in source.segments)
    saved.note(request.save_id, versions)
    return record, source.clock


def restore_into(
    dense: DenseShard,
    tables: Sequence[Table],
    root: str | Path,
    checkpoint: Checkpoint,
    *,
    place: ServerSettings,
    reset_optimizer: bool = False,
) -> ShardExtra:
    """Fill a shard and tables that nobody uses yet; returns its clock and record.

    With another number of servers or segments the sessions are not taken over: their numbers count
    requests to one server, and those servers are gone.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
        TableFull: a table has more rows than this server may hold.
    """
    restore_shard(root, checkpoint, dense, reset_optimizer=reset_optimizer)
    restore_tables(root, checkpoint, tables, place, reset_optimizer=reset_optimizer)
    num_saved = len(checkpoint.shards)
    extras = [_decode(read_extra(root, checkpoint, server), server) for server in range(num_saved)]
    clock = max((extra.clock for extra in extras), default=0)
    saved_at_s = min((extra.saved_at_s for extra in extras), default=0.0)
    own = extras[place.rank] if place.rank < num_saved else ShardExtra(0, ())
    units = {len(session.applied) for session in own.sessions or ()}
    num_units = len(dense.buckets) + sum(len(table.segments) for table in tables)
    is_known = units <= {num_units} and is_same_cut(checkpoint, tables, place)
    return ShardExtra(clock, own.sessions if is_known else None, saved_at_s)


class _Source:
    """What ps.checkpoint.write_shard copies from."""

    def __init__(self, shard: ServingShard, base: Mapping[Place, int]) -> None:
        self._shard = shard
        self.manifest = shard.manifest
        self.layout = shard.dense.layout
        self.buckets = shard.dense.buckets
        self.clock = 0
        self.versions: dict[Place, int] = {}
        """Of each bucket as it is in this save or in its base."""
        self._base = base
        self._columns: list[Column] = []
        self._saved_at_s = time.time()
        self.segments = [
            SegmentCopy(table, (at, number), base.get((at, number)), self._noting(at, number))
            for at, table in enumerate(shard.tables.tables)
            for number in range(len(table.segments))
        ]
        """Of all tables, in the record's order; copied after the buckets."""

    @property
    def bucket_ids(self) -> tuple[int, ...]:
        """As ps.dense.DenseShard."""
        return self._shard.dense.bucket_ids

    def is_unchanged(self, bucket_id: int) -> bool:
        """Whether the base has the bucket as it is now; if so, note what was applied to it."""
        with self._shard.holding(bucket_id):
            if self._base.get(bucket_id) != self._shard.dense.version(bucket_id):
                return False
            self._note(bucket_id)
            return True

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        """Copy a bucket and note what was applied to it."""
        with self._shard.holding(bucket_id):
            self._note(bucket_id)
            return self._shard.dense.dump(bucket_id, out)

    def extra(self) -> bytes:
        """The clock and the record, once all buckets and rows are copied."""
        sessions = AppliedRecord.cut(self._columns)
        return msgspec.msgpack.encode(ShardExtra(self.clock, sessions, self._saved_at_s))

    def _note(self, bucket_id: int) -> None:
        self.versions[bucket_id] = self._shard.dense.version(bucket_id)
        self._columns.append(self._shard.column_at(bucket_id))

    def _noting(self, table: int, segment: int) -> Callable[[], None]:
        return lambda: self._columns.append(self._shard.tables.column_at(table, segment))


class _LiveCopy(_Source):
    """Buckets as they are at the moment each is copied."""

    def extra(self) -> bytes:
        self.clock = self._shard.gate.clock
        return super().extra()


class _MemoryCopy(_Source):
    """All buckets as they were between two clocks."""

    def __init__(self, shard: ServingShard, base: Mapping[Place, int]) -> None:
        super().__init__(shard, base)
        self._copies: dict[int, tuple[int, list[Array]]] = {}
        # Memory first: its pages are touched before the barrier is held.
        fresh = {
            bucket.id: new_arrays(self.layout, self.manifest, bucket.id) for bucket in self.buckets
        }
        with shard.gate.between_clocks(
            lambda: shard.reduction.is_settled, timeout_s=SETTLE_TIMEOUT_S
        ) as clock:
            self.clock = clock
            for bucket_id, arrays in fresh.items():
                if not super().is_unchanged(bucket_id):
                    self._copies[bucket_id] = (super().dump(bucket_id, arrays), arrays)

    def is_unchanged(self, bucket_id: int) -> bool:
        return bucket_id not in self._copies

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        step, arrays = self._copies.pop(bucket_id)
        for target, source in zip(out, arrays, strict=True):
            np.copyto(target, source)
        return step


def _decode(data: bytes, server: int) -> ShardExtra:
    try:
        return decoding.msgpack(data, ShardExtra)
    except UNREADABLE as error:
        raise CheckpointError(f"the records of ps:{server} cannot be read: {error}") from error
