"""Save and restore of one server: values, slots, clock and the completion log.

Covers: one save at a time, what a delta adds to, one restore at a time, filling a shard.
Does not: choose the moment (ps.server.snapshot_trigger), write files (ps.checkpoint.writer), commit
(ps.client.saving.saver), start serving.
Runs in: PS processes.
Threads: any; `_is_busy`, under `_changed`, lets one save at a time take its snapshot or write. A
handler that waits for its turn looks whether its client is gone.

A save has two requests: the snapshot, which all servers take before any of them writes, and the
writing, while pushes go on (ps.checkpoint.snapshot). In async the push that was in flight at the
snapshot is found half applied after a restore and resumed, if its sender still lives; in sync there
is none.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from ps.checkpoint.format import Checkpoint
from ps.checkpoint.reader import ChainFiles
from ps.checkpoint.restore import read_records, restore_shard
from ps.checkpoint.snapshot import UnitKey
from ps.checkpoint.staging import saver_of
from ps.checkpoint.storage import OpenStorage
from ps.checkpoint.tables.restore import restore_tables
from ps.checkpoint.writer import Portion, write_shard
from ps.consistency.waits import Waited, wait_until
from ps.dense.shard import DenseShard
from ps.errors import CheckpointError, ServerPhaseError
from ps.exactly_once import SessionRecord
from ps.protocol import messages
from ps.server.request import Attempt
from ps.server.shard import ServingShard
from ps.server.snapshot_trigger import SnapshotRequest
from ps.tables.table import Table

_MAX_REMEMBERED = 4
"""Saves that a delta may add to: the last one, or one before it if that failed."""


class ShardExtra(msgspec.Struct, frozen=True):
    """What a server saves beside its values."""

    clock: int
    sessions: tuple[SessionRecord, ...] | None
    """None: after a restore into another number of servers; their numbers mean nothing here."""
    saved_at_s: float
    """When the snapshot was made, in seconds since 1970: only to tell users how much was lost."""
    notes: dict[str, str]
    """Of ps:0: JSON texts by name."""
    resumed_step: int
    """The checkpoint of an earlier run from which the run went on; -1: it began anew."""


class SavedVersions:
    """The versions by which deltas to this server's last saves find changes.

    `note` one at a time, the rest from any thread.
    """

    def __init__(self) -> None:
        self._by_save: OrderedDict[str, dict[UnitKey, int]] = OrderedDict()
        self._num_changes: dict[str, int] = {}
        """Number of changes by save; replaced as a whole, as it is read without a lock."""

    def of(self, save_id: str) -> Mapping[UnitKey, int]:
        """Return `ShardSnapshot.versions` of a save; none for one that is not known here."""
        return self._by_save.get(save_id, {})

    def at(self, num_changes: int) -> tuple[str, ...]:
        """Return the saves whose snapshot was made when the shard had changed so often."""
        return tuple(save_id for save_id, at in self._num_changes.items() if at == num_changes)

    def note(self, save_id: str, versions: dict[UnitKey, int], num_changes: int) -> None:
        """Remember a save and how often the shard had changed, and forget the oldest.

        Args:
            save_id: names the save.
            versions: versions of its snapshot.
            num_changes: number of changes of the shard at the snapshot.
        """
        self._by_save[save_id] = versions
        while len(self._by_save) > _MAX_REMEMBERED:
            self._by_save.popitem(last=False)
        found = {**self._num_changes, save_id: num_changes}
        self._num_changes = {each: found[each] for each in self._by_save}


class ShardSaving:
    """One server's part of saves, one after the other.

    Args:
        rank: rank of the server.
        open_storage: opens a directory as clients name it.
    """

    def __init__(self, rank: int, open_storage: OpenStorage) -> None:
        self._open_storage = open_storage
        self._rank = rank
        self._changed = threading.Condition()
        self._is_busy = False
        """Whether a save has its turn; the end of a turn is notified."""
        self._maker_gone: Callable[[], bool] = lambda: True
        """Whether the connection has ended whose client took the last snapshot."""
        self._known = SavedVersions()
        self._last: tuple[tuple[str, str], messages.Saved] | None = None
        """Directory and id of the last save that was written, and the answer to it."""
        self.passed_over: tuple[int, ...] = ()
        """Steps that were newer than what this server was restored from."""

    def take_snapshot(
        self, shard: ServingShard, request: messages.TakeSnapshot, is_gone: Callable[[], bool]
    ) -> messages.SnapshotMade:
        """Keep the shard as it is at one moment, until `save` has written it; repeating is safe.

        Args:
            shard: seeded.
            request: names the save, the base and the clock.
            is_gone: whether the client's connection has ended.

        Raises:
            CheckpointError: another save is still being written, or will be.
            RequestTimeout: see ps.server.snapshot_trigger.
            ServerPhaseError: nobody waits for the answer, so another save's snapshot stays.
        """
        deadline_s = time.monotonic() + request.wait_s
        with self._turn(request.wait_s, is_gone, lambda: self._may_replace(shard, request)):
            base = self._known.of(request.base)
            order = SnapshotRequest(request.save_id, base, request.clock, request.as_it_is)
            made = shard.snapshots.make(order, max(0.0, deadline_s - time.monotonic()), is_gone)
            self._maker_gone = is_gone
        return made

    def save(
        self, shard: ServingShard, request: messages.Save, is_gone: Callable[[], bool]
    ) -> messages.Saved:
        """Write the snapshot of this save; a repeated request gets the answer of the first.

        Args:
            shard: seeded.
            request: names the save and the directory.
            is_gone: whether the client's connection has ended.

        Raises:
            CheckpointError: disk full, no permission, or a value is not finite; nothing is left.
                Or there is no such snapshot, or an earlier save is still being written.
            ServerPhaseError: nobody waits for the answer.
        """
        with self._turn(request.wait_s, is_gone):
            save = request.directory, request.save_id
            if self._last is None or self._last[0] != save:
                self._last = None
                self._last = save, self._write(shard, request)
            return self._last[1]

    def saved_as(self, shard: ServingShard) -> tuple[str, ...]:
        """Return the ids of saves that hold the shard exactly as it is now.

        A save is known by its id wherever it is written, and whether it was ever committed is for
        its client to say.
        """
        return self._known.at(shard.num_changes)

    def note_restored(self, save_id: str, num_changes: int) -> None:
        """Note which save the shard was filled from, and its number before any change.

        Args:
            save_id: names the save.
            num_changes: number of changes of the shard right after the restore.
        """
        self._known.note(save_id, {}, num_changes)  # what a delta adds to it is all

    @contextmanager
    def _turn(
        self,
        wait_s: float,
        is_gone: Callable[[], bool],
        may_begin: Callable[[], bool] = lambda: True,
    ) -> Iterator[None]:
        """Wait until no other save is written here, and this one may begin."""
        deadline_s = time.monotonic() + wait_s
        with self._changed:
            ended = wait_until(
                self._changed, lambda: not self._is_busy and may_begin(), deadline_s, is_gone
            )
            if is_gone():
                raise ServerPhaseError(
                    "the client of this save is gone: its snapshot would not be written, or it "
                    "may have been committed"
                )
            if ended is Waited.OVERDUE:
                raise CheckpointError(
                    f"ps:{self._rank} was still busy with another save after {wait_s:g} s; save "
                    "less often, by one client, or to a faster disk"
                )
            self._is_busy = True
        try:
            yield
        finally:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _may_replace(self, shard: ServingShard, request: messages.TakeSnapshot) -> bool:
        """Whether no other saver comes for the snapshot that is open, or it has to yield.

        Of two savers that live, one always yields: else each could take the other's snapshot away
        for ever. Which one does not matter, but all servers have to agree.
        """
        held = shard.snapshots.unwritten()
        if held is None or request.as_it_is or self._maker_gone():
            return True
        return saver_of(request.save_id) <= saver_of(held.save_id)

    def _write(self, shard: ServingShard, request: messages.Save) -> messages.Saved:
        saved_at_s = time.time()
        with shard.snapshots.written(request.save_id) as snapshot:

            def extra() -> bytes:
                return msgspec.msgpack.encode(
                    ShardExtra(
                        snapshot.num_updates(),
                        snapshot.sessions(),
                        saved_at_s,
                        snapshot.metadata(),
                        shard.resumed_step,
                    )
                )

            record = write_shard(
                self._open_storage(request.directory),
                request.save_id,
                rank=self._rank,
                shard=snapshot,
                extra=extra,
                portion=Portion(snapshot.is_unchanged, snapshot.segments),
            )
            self._known.note(request.save_id, snapshot.versions(), snapshot.num_changes())
            return messages.Saved(
                record,
                snapshot.clock,
                self.passed_over,
                snapshot.manifest.frozen_hash(),
                snapshot.manifest.limits_hash(),
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """A shard that was read from a checkpoint, before it serves."""

    shard: ServingShard
    checkpoint: Checkpoint
    passed_over: tuple[int, ...]
    """Newer steps in the directory when it was read."""
    is_whole: bool
    """Whether it is all that the checkpoint holds, so that a delta can add to that."""
    num_changes: int
    """Number of changes of the shard right after it was filled."""
    saved_at_s: float
    """See ShardExtra."""


class RestoreTurns:
    """Restores that clients ask one server for, one after the other.

    A checkpoint takes the memory of all values, so a request that comes again, also from a newer
    process of the chief, waits for the one under way and takes what that has read.
    """

    def __init__(self) -> None:
        self.kept: tuple[messages.Restore, Restored] | None = None
        """What was read for a process that was replaced meanwhile: its next one asks for it again.
        Changed by who has the turn, and let go by a seed."""
        self._changed = threading.Condition()
        self._under_way: messages.Restore | None = None
        self.by: Attempt | None = None
        """The newest process that has asked for this restore."""
        self.num_waiting = 0

    @contextmanager
    def turn(
        self, request: messages.Restore, by: Attempt | None, is_gone: Callable[[], bool]
    ) -> Iterator[None]:
        """Wait until no other restore is under way.

        Args:
            request: what is asked for.
            by: the worker that asks; None: no worker.
            is_gone: whether the client's connection has ended.

        Raises:
            ServerPhaseError: nobody waits for the answer.
        """
        with self._changed:
            if self._under_way == request and self.by and by:
                self.by = max(self.by, by)
            self.num_waiting += 1
            ended = wait_until(self._changed, lambda: self._under_way is None, math.inf, is_gone)
            self.num_waiting -= 1
            if ended is Waited.GONE:
                raise ServerPhaseError("the client of this restore is gone")
            self._under_way, self.by = request, by
        try:
            if self.kept is not None and self.kept[0] != request:
                self.kept = None  # before another one takes the same memory
            yield
        finally:
            with self._changed:
                self._under_way = None
                self._changed.notify_all()


def restore_into(
    dense: DenseShard,
    tables: Sequence[Table],
    chain: ChainFiles,
    *,
    reset_optimizer: bool,
    is_alone: bool,
) -> ShardExtra:
    """Fill a shard and tables that nobody uses yet; returns what was saved beside their values.

    With another number of servers or segments the sessions are not taken over: their numbers count
    requests to one server, and those servers are gone.

    Args:
        dense: the shard's buckets; filled.
        tables: the shard's tables; filled.
        chain: the files of the checkpoint, for this server.
        reset_optimizer: restore values only, not slots and steps.
        is_alone: the other servers live: nothing has to agree with what they saved.

    Raises:
        CheckpointError: the checkpoint is damaged or of another model.
    """
    restore_shard(chain, dense, reset_optimizer=reset_optimizer)
    is_same = restore_tables(chain, tables, reset_optimizer=reset_optimizer)
    files = chain.files(0, is_own=is_alone and chain.is_own)
    extras = {file.rank: read_records(file, ShardExtra) for file in files}
    clock = max((extra.clock for extra in extras.values()), default=0)
    saved_at_s = min((extra.saved_at_s for extra in extras.values()), default=0.0)
    own = extras.get(chain.rank, ShardExtra(0, (), saved_at_s=0.0, notes={}, resumed_step=-1))
    units = {len(session.applied) for session in own.sessions or ()}
    num_units = len(dense.buckets) + sum(len(table.segments) for table in tables)
    is_known = is_same and units <= {0, num_units}
    notes = own.notes if chain.rank == 0 else {}
    resumed_step = max((extra.resumed_step for extra in extras.values()), default=-1)
    sessions = own.sessions if is_known else None
    return ShardExtra(clock, sessions, saved_at_s, notes, resumed_step)
