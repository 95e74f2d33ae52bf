"""Bulk synchronous parallel: one barrier per clock, which completes when every member has pushed.

Covers: workers that join, leave, finish or are lost, before, at and after the barrier.
Does not: hold gradients, wait, or answer anybody (ps.consistency.gate). Pure: no locks, clock or
I/O.

A worker is, seen from the barrier:

    MEMBER ──leave──► AWAY ──join──► MEMBER        a member's push is waited for
       │                │
       ├────finish──────┴──► FINISHED              never waited for, may not come back
       └────lost────────────► LOST                 breaks the barrier, or as AWAY with `continue`
"""

from __future__ import annotations

from collections.abc import Iterable, Set

from ps.consistency.policy import (
    Action,
    Break,
    Contribution,
    Drop,
    OnLost,
    PushDecision,
    Reduce,
    Release,
    refuse_finished,
    refuse_outsider,
    worker_lost,
)
from ps.errors import ServerPhaseError
from ps.manifest.manifest import WorkerRank


class BSP:
    """One barrier per clock: it completes when every member has pushed.

    All members of `0..num_workers-1` are waited for from the start, so no early worker can run
    ahead of one that is still starting.

    Args:
        num_workers: number of workers in the cluster.
        on_lost: what a lost worker means: "fail" or "continue".
        clock: completed barriers so far, after a restore.
    """

    def __init__(self, num_workers: int, *, on_lost: OnLost = "fail", clock: int = 0) -> None:
        self.clock = clock
        """Barriers completed so far."""
        self._continues = on_lost == "continue"
        self._members = {WorkerRank(rank) for rank in range(num_workers)}
        self._finished: set[WorkerRank] = set()
        self._arrived: dict[WorkerRank, int | None] = {}  # rows, None for a null push
        self._broken_by: WorkerRank | None = None

    @property
    def outlives_workers(self) -> bool:
        """Whether a lost worker is dropped; else it breaks the barrier."""
        return self._continues

    def admit(self, worker: WorkerRank) -> PushDecision:
        """Stage a member's push."""
        if self._broken_by is not None:
            raise worker_lost(self._broken_by)
        refuse_finished(worker, self._finished)
        refuse_outsider(worker, self._members)
        return PushDecision.STAGE

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:
        """Count the worker as present; complete the barrier if it was the last.

        See Policy for the arguments.
        """
        self.admit(worker)
        if worker in self._arrived:
            raise ServerPhaseError(
                f"worker {worker} pushed twice in clock {self.clock}: its first push still waits "
                f"for {_ranks(self.missing())}; repeat that push or stop"
            )
        self._arrived[worker] = None if null else rows
        return self._complete_if_all_arrived()

    def clock_of(self, worker: WorkerRank) -> int:  # noqa: ARG002
        """The barrier's."""
        return self.clock

    def on_join(self, worker: WorkerRank, at_least: int = 0) -> list[Action]:  # noqa: ARG002 - no clock of its own
        """Wait for this worker from the barrier that is open now. See Policy for the arguments."""
        if self._broken_by is not None:
            raise worker_lost(self._broken_by)
        refuse_finished(worker, self._finished)
        self._members.add(worker)
        return []

    def on_leave(self, worker: WorkerRank) -> list[Action]:
        """Wait for it no more; what it has pushed into the open barrier stays part of it."""
        self._members.discard(worker)
        return self._complete_if_all_arrived()

    def on_finish(self, worker: WorkerRank) -> list[Action]:
        """Wait for it never again."""
        self._finished.add(worker)
        return self.on_leave(worker)

    def on_lost(self, worker: WorkerRank) -> list[Action]:
        """Break the barrier, or drop the worker from it; nothing if nobody waited for it."""
        if worker not in self._members or self._broken_by is not None:
            return []
        if not self._continues:
            self._broken_by = worker
            waiting = tuple(sorted(self._arrived))
            self._arrived.clear()
            return [Break(waiting, worker)]
        self._members.discard(worker)
        return self.on_replaced(worker)

    def on_replaced(self, worker: WorkerRank) -> list[Action]:
        """Take its push out of the open barrier; if it is a member, its newer attempt will push."""
        dropped: list[Action] = []
        if worker in self._arrived:
            del self._arrived[worker]
            dropped.append(Drop(worker))
        return dropped + self._complete_if_all_arrived()

    def catch_up(self, clock: int, undone: Set[WorkerRank] = frozenset()) -> list[Action]:
        """After a restore: continue from a later clock, of which some worker has an ack.

        Args:
            clock: the newest of them; the next one is open now.
            undone: workers whose push in the barrier was for a clock that is past now.
        """
        self.clock = clock
        for worker in undone:
            del self._arrived[worker]
        return [Release(tuple(sorted(undone)), clock)] if undone else []

    def missing(self) -> tuple[WorkerRank, ...]:
        """The members that have not pushed into the open barrier."""
        return tuple(sorted(self._members - self._arrived.keys()))

    def _complete_if_all_arrived(self) -> list[Action]:
        if not self._arrived or self._members - self._arrived.keys() or self._broken_by is not None:
            return []
        arrived = dict(sorted(self._arrived.items()))
        self._arrived.clear()
        self.clock += 1
        parts = [Contribution(each, rows) for each, rows in arrived.items() if rows is not None]
        reduce: list[Action] = [Reduce(tuple(parts))] if parts else []
        return [*reduce, Release(tuple(arrived), self.clock)]


def _ranks(workers: Iterable[WorkerRank]) -> str:
    return "worker " + ", ".join(str(worker) for worker in workers)
