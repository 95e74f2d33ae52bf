"""Clock recovery: rebuilds a restored server's clocks from the clocks its clients acknowledged.

Covers: the newest clock of a barrier, each worker's own clock in ssp, pushes whose clock is past.
Does not: remember requests (ps.exactly_once), count clocks (ps.consistency.bsp,
ps.consistency.ssp).
Threads: the gate's lock guards it.

Each request names the newest clock that this server has acknowledged to its worker: the barrier's,
or in ssp the worker's own. Only a server that was set back by a restore can have acknowledged a
clock that it does not know itself.
"""

from __future__ import annotations

from typing import Generic

from ps.consistency.bsp import BSP
from ps.consistency.policy import Action, Policy
from ps.consistency.ssp import SSP
from ps.consistency.waiting import Gradient, WaitingPushes
from ps.exactly_once import Ticket, is_first
from ps.manifest.manifest import WorkerRank


class ClockRecovery(Generic[Gradient]):
    """What the requests to one shard say of its past; asked only where the record was restored.

    Args:
        policy: of the shard.
        waiting: the pushes that wait for a clock.
    """

    def __init__(self, policy: Policy, waiting: WaitingPushes[Gradient]) -> None:
        self._policy = policy
        self._waiting = waiting
        self._told_clock = 0
        """The newest of the barrier's that the server acknowledged before the restore."""

    def learn(self, worker: WorkerRank, acked_clock: int, *, counts: bool) -> list[Action] | None:
        """Continue from the clock that a worker has an ack of.

        Args:
            worker: its rank.
            acked_clock: by its request; 0: of none.
            counts: the request is a push that was completed before the save, one clock of its own.

        Returns:
            What follows; None: that was known.
        """
        policy = self._policy
        if isinstance(policy, SSP):
            worker_clock = acked_clock + counts
            is_news = worker_clock > policy.clock_of(worker)
            return policy.catch_up(worker, worker_clock) if is_news else None
        if isinstance(policy, BSP) and acked_clock > policy.clock:
            self._told_clock = acked_clock
            return policy.catch_up(acked_clock, self._waiting.pushes_for_clock_at_most(acked_clock))
        return None

    def is_past(self, push: Ticket, acked_clock: int) -> bool:
        """Whether a push that was not applied is for a barrier that was completed without it.

        Workers at a barrier get acks of the same clocks, but the one whose answer was lost does not
        know of the last: its push comes again, for a clock that is past.

        Args:
            push: the push's ticket.
            acked_clock: newest clock that its worker has got.
        """
        is_old = push.is_resent or is_first(push.id, acked_clock)
        return is_old and acked_clock < self._told_clock
