"""Copy-on-write snapshots of a shard: dense buckets, table segments, log and clock of one moment.

    snapshot   marks every bucket and every segment of a table
    push       copies a marked bucket aside before it changes it; of a segment only its own rows
    save       takes bucket after bucket, live or from its copy, and writes it

No push waits longer than the copy of one bucket. A push that was in flight at that moment is in the
buckets that it had changed, and the completion log says so. The next batch of rows writes and frees
a segment's copies; an id may be written several times, always with the same row.

Covers: the marks, the copies, the record of what the snapshot holds (ShardSnapshot).
Does not: choose the moment (ps.server.snapshot_trigger), write (ps.checkpoint.writer).
Runs in: PS processes.
Threads: any; a unit is marked, copied and changed under its own lock, a segment's lock is held for
one batch of rows. Memory: copies of at most all buckets with their slots, and of the rows that
pushes change before they are written.
Source: copy-on-write as in fork(2), per bucket and per row instead of per page.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ps.checkpoint.format import new_arrays
from ps.dense.shard import DenseShard
from ps.exactly_once import CompletionLog, SessionRecord
from ps.metadata import Metadata
from ps.tables.row_snapshot import RowSnapshot
from ps.tables.rows import ROWS_AT_ONCE, Dropped, RowBatch
from ps.tables.table import Table

Array = np.ndarray[Any, Any]


class SegmentSnapshot:
    """Snapshot of one segment of a table, and its copy into a checkpoint.

    Args:
        table: this server's share.
        place: the table's number in the manifest, and the segment's in the table.
        base: `take` of an earlier save, to copy later changes only; None: copy all.
        at_snapshot: called under the segment's lock at the moment of the snapshot.
    """

    def __init__(
        self,
        table: Table,
        place: tuple[int, int],
        base: int | None,
        at_snapshot: Callable[[], None],
    ) -> None:
        self.spec = table.spec
        self.place = place
        self.is_whole = True
        """Whether the batches hold all rows, not only changes since the base."""
        self.version = 0
        """Version of the segment at the snapshot."""
        self.take = 0
        """Which take of the segment's tombstones this is; names it as the base of a delta."""
        self.num_loads = 0
        """How often rows had been loaded into it by then, which makes no version."""
        self.counts: Array = np.empty(0, np.uint16)
        """[depth, width] uint16: pushes of ids without a row; empty if the table does not count."""
        self.ages: tuple[tuple[float, int], ...] = ()
        """Ages of its versions, for a table whose rows have a time to live."""
        self._segment = table.segments[place[1]]
        self._base = base
        self._at_snapshot = at_snapshot
        self._gone: Array = np.empty(0, np.int64)
        self._rows: RowSnapshot | None = None
        self._is_released = False

    def begin(self) -> RowSnapshot:
        """Take the snapshot unless it exists; the caller holds the segment's lock."""
        if self._rows is None:
            segment = self._segment
            self.take, since, self._gone = segment.drops.take(self._base, segment.version)
            self.is_whole = since < 0
            self.version, self.counts = segment.version, segment.admission.counts.copy()
            self.num_loads, self.ages = segment.num_loads, segment.ttl.ages()
            self._rows = segment.snapshot = RowSnapshot(since, segment.version, segment.num_rows)
            self._at_snapshot()
            if self._is_released:  # since its caller looked
                self._rows.release()
        return self._rows

    def batches(self) -> Iterator[RowBatch | Dropped]:
        """Yield ids whose rows were dropped, then rows, in the order of a restore."""
        segment = self._segment
        with segment.lock:
            snapshot = self.begin()
        yield from _pieces(Dropped(self._gone))
        while snapshot.stop:
            with segment.lock:
                batch, snapshot.stop = segment.dump(
                    snapshot.stop, ROWS_AT_ONCE, snapshot.since, snapshot.version
                )
                kept = snapshot.take()
            yield from _pieces(batch)
            if kept is not None:
                yield from _pieces(kept)

    def release(self) -> None:
        """Release all copies: the save has ended or was abandoned."""
        self._is_released = True
        if self._rows is not None:
            self._rows.release()


def _pieces(batch: RowBatch | Dropped) -> Iterator[RowBatch | Dropped]:
    for start in range(0, batch.ids.size, ROWS_AT_ONCE):
        yield type(batch)(*(column[start : start + ROWS_AT_ONCE] for column in batch))


UnitKey = int | tuple[int, int]
"""A bucket's id, or a table's number and a segment's."""
UNWRITTEN_S = 30.0
"""The next push releases a snapshot whose saver does not return within this time."""
NO_BASE: Mapping[UnitKey, int] = {}


class ShardSnapshot:
    """Snapshot of a shard, from which ps.checkpoint.writer.write_shard copies.

    Create it under the lock that guards the record's completed requests.

    Args:
        guard: copy-on-write state of the shard's units.
        clock: clock of the snapshot.
        save_id: the save that it belongs to.
        base: `versions` of an earlier save.
    """

    def __init__(
        self, guard: CopyOnWrite, clock: int, save_id: str, base: Mapping[UnitKey, int] = NO_BASE
    ) -> None:
        dense = guard.dense
        self.manifest = dense.manifest
        self.frozen = dense.frozen
        self.layout = dense.layout
        self.buckets = dense.buckets
        self.clock = clock
        self.save_id = save_id
        self._metadata = guard.metadata.texts()
        self._num_metadata_changes = guard.metadata.num_changes
        self._num_taken = dense.num_taken
        self._ending = threading.Lock()
        self._is_written = self._is_released = False
        self._expires_s = time.monotonic() + UNWRITTEN_S
        self._dense = dense
        self._base = base
        self._record = guard.record.snapshot()
        self._indices = {bucket.id: index for index, bucket in enumerate(dense.buckets)}
        self._versions: dict[UnitKey, int] = {}
        self._is_noted = bytearray(len(dense.buckets))
        self._aside: dict[int, tuple[int, list[Array]]] = {}
        places = [
            (table, (at, number))
            for at, table in enumerate(guard.tables)
            for number in range(len(table.segments))
        ]
        self.segments = [
            SegmentSnapshot(table, place, base.get(place), self._noting(len(dense.buckets) + unit))
            for unit, (table, place) in enumerate(places)
        ]
        """Segments of all tables, in the record's order; copied after the buckets."""

    @property
    def is_released(self) -> bool:
        """Whether it was abandoned, or no saver came to write it."""
        return self._is_released

    @property
    def is_open(self) -> bool:
        """Whether its saver may still come in time."""
        return not (self._is_released or self._has_expired())

    def keep(self, unit: int) -> None:
        """Copy what the save still needs of a unit, before a change; hold the unit's lock."""
        if self._is_released or self._has_expired():
            return
        if unit >= len(self.buckets):
            self.segments[unit - len(self.buckets)].begin()
        elif not self._is_noted[unit] and not self._note(unit):
            bucket_id = self.buckets[unit].id
            arrays = new_arrays(self.layout, self.manifest, bucket_id)
            self._aside[unit] = self._dense.dump(bucket_id, arrays), arrays

    def is_unchanged(self, bucket_id: int) -> bool:
        """Whether the base holds the bucket's state of the snapshot."""
        if bucket_id in self.frozen:
            return bucket_id in self._base
        unit = self._indices[bucket_id]
        with self._dense.owned[unit].lock:
            if self._is_noted[unit]:
                return unit not in self._aside
            if self._base.get(bucket_id) != self._dense.version(bucket_id):
                return False  # and stays marked
            return self._note(unit)

    def dump(self, bucket_id: int, out: Sequence[Array]) -> int:
        """Copy a bucket's state of the snapshot to `out`, and free its copy; return its step.

        Args:
            bucket_id: number of the bucket.
            out: [num_elements] each: values, slots in the rule's order, average if there is one;
                filled.
        """
        unit = self._indices[bucket_id]
        with self._dense.owned[unit].lock:
            if unit not in self._aside:
                self._note(unit)
                return self._dense.dump(bucket_id, out)
            step, arrays = self._aside.pop(unit)
        for target, source in zip(out, arrays, strict=True):
            np.copyto(target, source)
        return step

    def num_updates(self) -> int:
        """The clock of the copies, once all buckets were copied.

        A restored server does not count a push again that had changed all buckets at the snapshot.
        """
        return self.clock + self._record.num_uncounted(len(self.buckets))

    def sessions(self) -> tuple[SessionRecord, ...]:
        """The record, once all buckets and segments were copied."""
        return self._record.sessions()

    def metadata(self) -> dict[str, str]:
        """The metadata by name, once all buckets were copied; also of a push that all contain."""
        found = Metadata()
        found.fill(self._metadata)
        for attached in self._record.attached():
            found.put(attached.name, attached.text)
        return found.texts()

    def versions(self) -> dict[UnitKey, int]:
        """Return what a delta tells changes by, once all are copied.

        Of a bucket its version in the save or its base, of a segment which take this save was.
        """
        versions = self._versions.copy()
        versions.update((segment.place, segment.take) for segment in self.segments)
        versions.update(dict.fromkeys((bucket.id for bucket in self.frozen.buckets), 0))
        return versions

    def num_changes(self) -> int:
        """`CopyOnWrite.num_changes` at the snapshot, once all are copied."""
        buckets = sum(self._versions.values()) + self._num_taken
        rows = sum(segment.version + segment.num_loads for segment in self.segments)
        return self.clock + self._num_metadata_changes + buckets + rows

    def begin_writing(self) -> bool:
        """Whether the snapshot still exists; from now on it does not expire."""
        with self._ending:
            self._is_written = not self._is_released
        return self._is_written

    def release(self) -> None:
        """Need nothing any more: no unit is marked, all copies are freed. Idempotent."""
        self._is_released = True
        self._aside.clear()
        for segment in self.segments:
            segment.release()

    def _has_expired(self) -> bool:
        """Whether the deadline has passed without a saver; then release it."""
        if self._is_written or time.monotonic() < self._expires_s:
            return False
        with self._ending:
            if not self._is_written:
                self.release()
        return self._is_released

    def _note(self, unit: int) -> bool:
        """Note the bucket's version and record; returns whether the base has it so."""
        bucket_id = self.buckets[unit].id
        self._is_noted[unit] = 1
        self._record.note(unit)
        version = self._versions[bucket_id] = self._dense.version(bucket_id)
        return self._base.get(bucket_id) == version

    def _noting(self, unit: int) -> Callable[[], None]:
        return partial(self._record.note, unit)


class CopyOnWrite:
    """The check before every change of a shard; at most one snapshot is open.

    Args:
        dense: the buckets, which are the first units.
        tables: the tables, whose segments are the units after them.
        record: exactly-once record of all units.
        metadata: what is saved with them.
    """

    def __init__(
        self,
        dense: DenseShard,
        tables: Sequence[Table],
        record: CompletionLog,
        metadata: Metadata | None = None,
    ) -> None:
        self.dense = dense
        self.tables = tuple(tables)
        self.record = record
        self.metadata = Metadata() if metadata is None else metadata
        self.snapshot: ShardSnapshot | None = None
        """The one that is open."""

    def num_changes(self, clock: int) -> int:
        """Return a number that grows with every change of the state that a save holds.

        It is a sum of existing counters, so it costs a push nothing. It is exact if nothing changes
        during the call.

        Args:
            clock: updates so far.
        """
        segments = (segment for table in self.tables for segment in table.segments)
        rows = sum(segment.version + segment.num_loads for segment in segments)
        return clock + self.dense.num_changes + rows + self.metadata.num_changes

    def before(self, unit: int) -> None:
        """Let a save copy the part of a unit that it needs; call it under the unit's lock."""
        snapshot = self.snapshot
        if snapshot is not None:
            snapshot.keep(unit)

    def open(self, snapshot: ShardSnapshot) -> None:
        """Mark all units; call it under the lock of the snapshot's creation."""
        self.close()
        self.snapshot = snapshot

    def close(self) -> None:
        """Mark nothing any more. Idempotent."""
        snapshot, self.snapshot = self.snapshot, None
        if snapshot is not None:
            snapshot.release()
