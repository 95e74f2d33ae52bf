"""Stale synchronous parallel: the fastest worker is at most s clocks ahead of the slowest.

Covers: the workers' clocks, who may go on, workers that join, leave, finish or are lost.
Does not: hold gradients, wait, or answer anybody (ps.consistency.gate). Pure: no locks, clock or
I/O.

A worker's clock is the number of its pushes. Each gradient is applied as it arrives; the push that
ends clock c is answered when no member is below c - s. So the blocking call is the push (also as
push_pull and push_null), never the pull, and whatever a worker reads after its push number c holds
all updates of everybody's first c - s pushes: the condition of Ho et al., More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server, NIPS 2013, which blocks the read
instead. With s = 0 workers go in step, though each sees a part of the others' next updates.

A worker that joins starts at the slowest member's clock, the same at all servers, so nobody's bound
is broken by it. One that leaves, finishes or is lost is no longer waited for; its updates stay.

A server that was restored counts from 0 again, and each worker's next request brings the
worker's clock. Until all members have sent one, the others wait.
"""

from __future__ import annotations

from ps.consistency.policy import (
    Action,
    Drop,
    PushDecision,
    Release,
    refuse_finished,
    refuse_outsider,
)
from ps.errors import PSSettingsError
from ps.manifest.manifest import WorkerRank


class SSP:
    """A bound on how far workers may be apart.

    All of `0..num_workers-1` are members from the start, so no early worker gets further than the
    bound while another is still starting.

    Args:
        num_workers: number of workers in the cluster.
        bound: s, in clocks.
        clock: updates so far, of a restored shard. The workers' clocks start again, all equal.
    """

    def __init__(self, num_workers: int, bound: int, *, clock: int = 0) -> None:
        if bound < 0:
            raise PSSettingsError(f"the staleness bound must be at least 0, got {bound}")
        self._bound = bound
        self.clock = clock
        """Pushes applied so far."""
        self._clocks = {WorkerRank(rank): 0 for rank in range(num_workers)}
        self._finished: set[WorkerRank] = set()
        self._waiting: set[WorkerRank] = set()
        self._slowest = 0

    @property
    def outlives_workers(self) -> bool:
        """Always: nobody waits for a lost worker."""
        return True

    def admit(self, worker: WorkerRank) -> PushDecision:
        """Apply on arrival; hold the values back if the push may have to wait for others."""
        refuse_finished(worker, self._finished)
        refuse_outsider(worker, self._clocks.keys())
        ahead = self._clocks[worker] + 1 - self._slowest
        return PushDecision.APPLY if ahead <= self._bound else PushDecision.APPLY_AND_HOLD

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:  # noqa: ARG002 - rows weigh in sync only
        """Advance the worker's clock and answer everybody who may go on.

        A worker that left while its push was on its way is answered at once.

        See Policy for the arguments.
        """
        if not null:
            self.clock += 1
        if worker in self._clocks:
            self._clocks[worker] += 1
        self._waiting.add(worker)
        return self._release()

    def clock_of(self, worker: WorkerRank) -> int:
        """The worker's own, or where it would begin."""
        return self._clocks.get(worker, self._slowest)

    def on_join(self, worker: WorkerRank, at_least: int = 0) -> list[Action]:
        """Wait for this worker from the slowest member's clock on, or from `at_least`.

        The slowest may be at another clock on another server. A worker that began there at another
        clock would be ahead at one server and behind at the other for good, and two of those could
        wait for each other: it joins all servers, and again with the largest of their clocks.

        See Policy for the arguments.
        """
        refuse_finished(worker, self._finished)
        self._clocks[worker] = max(self.clock_of(worker), at_least)
        return self._release()

    def rejoin(self, worker: WorkerRank, clock: int) -> list[Action]:
        """Wait for this worker from a clock on that it has reached, which others may have passed.

        Args:
            worker: rank.
            clock: its own, of which it has an ack.
        """
        refuse_finished(worker, self._finished)
        self._clocks[worker] = clock
        return self._release()

    def on_leave(self, worker: WorkerRank) -> list[Action]:
        """Stop waiting for it."""
        self._clocks.pop(worker, None)
        return self._release()

    def on_finish(self, worker: WorkerRank) -> list[Action]:
        """Wait for it never again."""
        self._finished.add(worker)
        return self.on_leave(worker)

    def on_lost(self, worker: WorkerRank) -> list[Action]:
        """The others go on; what it has pushed is applied and stays."""
        return self.on_replaced(worker) + self.on_leave(worker)

    def on_replaced(self, worker: WorkerRank) -> list[Action]:
        """Its push waits no longer; it is applied, stays, and counts for the newer attempt."""
        dropped: list[Action] = [Drop(worker)] if worker in self._waiting else []
        self._waiting.discard(worker)
        return dropped

    def catch_up(self, worker: WorkerRank, clock: int) -> list[Action]:
        """After a restore: a member had got to this clock of its own, which never goes back.

        Args:
            worker: rank.
            clock: its own clock, as it knows it.
        """
        if clock <= self._clocks.get(worker, clock):
            return []
        self._clocks[worker] = clock
        return self._release()

    def missing(self) -> tuple[WorkerRank, ...]:
        """The slowest members that somebody waits for."""
        if not self._waiting:
            return ()
        behind = min(self._clocks[worker] for worker in self._waiting) - self._bound
        return tuple(sorted(rank for rank, clock in self._clocks.items() if clock < behind))

    def _release(self) -> list[Action]:
        """Answer those within the bound; the slowest clock never goes back."""
        self._slowest = min(self._clocks.values(), default=self._slowest)
        limit = self._slowest + self._bound
        free = sorted(
            worker for worker in self._waiting if self._clocks.get(worker, limit) <= limit
        )
        self._waiting.difference_update(free)
        return [Release(tuple(free), self.clock)] if free else []
