"""Snapshot trigger: at once, or at the clock that all servers of a sync cluster agree on.

Between two servers of a sync cluster clocks differ by one while a barrier completes. So a saver may
ask for a snapshot at a clock that is still to come; the push that completes its barrier makes it.

Covers: the moment, which save a snapshot belongs to, snapshots whose saver is gone.
Does not: copy (ps.checkpoint.snapshot), write (ps.server.save_restore), agree with other servers
(ps.client.saving.saver).
Runs in: PS processes.
Threads: any; what is wanted is guarded by the gate's lock, under which all snapshots are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ps.checkpoint.snapshot import CopyOnWrite, ShardSnapshot, UnitKey
from ps.consistency.gate import Gate
from ps.consistency.waits import wait_until
from ps.errors import CheckpointError, RequestTimeout
from ps.protocol.messages import SnapshotMade


@dataclass(slots=True)
class SnapshotRequest:
    """What a save asks of one server."""

    save_id: str
    base: Mapping[UnitKey, int]
    """See ps.checkpoint.snapshot.ShardSnapshot."""
    clock: int | None = None
    """Clock of the snapshot; None: now."""
    as_it_is: bool = False
    """Whether to save even if reduced gradients are missing in the parameters and the save."""
    is_done: bool = False
    """Whether it is clear what comes of it."""


class SnapshotTrigger:
    """The snapshots of one shard, one after the other.

    Args:
        guard: the shard's units.
        gate: the gate whose clock counts.
        is_settled: whether the parameters contain all that this clock has reduced.
    """

    def __init__(self, guard: CopyOnWrite, gate: Gate[Any], is_settled: Callable[[], bool]) -> None:
        self._guard = guard
        self._gate = gate
        self._is_settled = is_settled
        self.wanted: SnapshotRequest | None = None
        """What waits for its moment; `check` is called while there is one."""

    def make(
        self, order: SnapshotRequest, wait_s: float, is_gone: Callable[[], bool]
    ) -> SnapshotMade:
        """Take the snapshot, replacing one taken for another save; repeating is safe.

        Args:
            order: which save, at which clock.
            wait_s: seconds to wait for the clock.
            is_gone: whether the client's connection has ended.

        Returns:
            Not made: the order's clock is past, or did not come within `wait_s`.

        Raises:
            RequestTimeout: workers are between the two rounds of a clipped push for that long.
        """
        deadline_s = time.monotonic() + wait_s
        with self._gate.between_clocks() as clock:
            if (found := self._found(order, clock)).is_made:
                return found
            self._guard.close()
            self.wanted = order  # looked at when this block ends
        with self._gate.changed:
            wait_until(self._gate.changed, lambda: order.is_done, deadline_s, is_gone)
        with self._gate.between_clocks() as clock:
            if self.wanted is order:
                self.wanted = None
            found = self._found(order, clock)
            if not found.is_made and not self._is_settled():
                raise RequestTimeout(
                    f"clock {clock} was not settled within {wait_s:g} s: its workers have not sent "
                    "the norms; are they alive? Try again"
                )
            return found

    def unwritten(self) -> ShardSnapshot | None:
        """Return the snapshot that a saver may still come to write."""
        snapshot = self._guard.snapshot
        return snapshot if snapshot is not None and snapshot.is_open else None

    @contextmanager
    def written(self, save_id: str) -> Iterator[ShardSnapshot]:
        """Give the snapshot of a save, which ends with the block.

        Raises:
            CheckpointError: there is none, or its saver came too late.
        """
        snapshot = self._guard.snapshot
        if snapshot is None or snapshot.save_id != save_id or not snapshot.begin_writing():
            raise CheckpointError(
                f"save {save_id} has no snapshot here: the server was started again, another save "
                "has begun, or its saver was away for too long; save again"
            )
        try:
            yield snapshot
        finally:
            self._guard.close()

    def _found(self, order: SnapshotRequest, clock: int) -> SnapshotMade:
        snapshot = self._guard.snapshot
        if snapshot is None or snapshot.is_released or snapshot.save_id != order.save_id:
            return SnapshotMade(clock, is_made=False)
        if order.clock not in (None, snapshot.clock):
            return SnapshotMade(clock, is_made=False)
        return SnapshotMade(snapshot.clock, is_made=True)

    def check(self) -> None:
        """Take the snapshot if its moment has come; called under the gate's lock when it may."""
        order, clock = self.wanted, self._gate.clock
        if order is None or not (order.as_it_is or self._is_settled()):
            return
        if order.clock is not None and clock < order.clock:
            return
        if order.clock in (None, clock):
            self._guard.open(ShardSnapshot(self._guard, clock, order.save_id, order.base))
        self.wanted = None
        order.is_done = True
        self._gate.changed.notify_all()  # for `make`, as what settles a clock ends no other wait
