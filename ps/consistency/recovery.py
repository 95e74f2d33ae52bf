"""Clock recovery: a restored server continues from the clocks that it has acknowledged.

Covers: the clock of a barrier, each worker's own clock in ssp, pushes for a clock that is past.
Does not: remember requests (ps.exactly_once), count clocks (ps.consistency.bsp,
ps.consistency.ssp).
Threads: the gate's lock guards it.

Each request holds the newest clock that this server, in whichever process, has acknowledged to its
worker: the barrier's, or in ssp the worker's own. A worker pushes once per clock, so a push is for
the clock after it. Only a server that was set back by a restore can have acknowledged a clock that
it does not know itself.
"""

from __future__ import annotations

from typing import Generic

from ps.consistency.bsp import BSP
from ps.consistency.policy import Action, Policy
from ps.consistency.ssp import SSP
from ps.consistency.waiting import Gradient, PendingPush, WaitingPushes
from ps.manifest.manifest import WorkerRank


class ClockRecovery(Generic[Gradient]):
    """The clocks of one shard: what a restore has set back, and pushes that come late.

    Args:
        policy: policy of the shard.
        waiting: the pushes that wait for a clock.
    """

    def __init__(self, policy: Policy, waiting: WaitingPushes[Gradient]) -> None:
        self._policy = policy
        self._has_barrier = isinstance(policy, BSP)
        self._waiting = waiting
        self._acked: dict[WorkerRank, int] = {}
        """The newest acknowledged clock of each worker."""
        self._taken_back: dict[WorkerRank, int] = {}
        """The barrier's clock when a worker came back; the worker has pushed nothing since."""
        self._undone_clock = 0
        """The newest clock of the barrier that was acknowledged before the restore, and is lost."""

    def learn(self, worker: WorkerRank, clock: int) -> list[Action] | None:
        """Continue from a clock of which a worker has an ack.

        Args:
            worker: its rank.
            clock: in ssp the worker's own, else the barrier's.

        Returns:
            What follows; None: nothing.
        """
        policy = self._policy
        self._acked[worker] = max(clock, self._acked.get(worker, 0))
        if isinstance(policy, SSP):
            return policy.catch_up(worker, clock) or None
        if isinstance(policy, BSP) and clock > policy.clock:
            self._undone_clock = clock
            # Workers at a barrier have acks of the same clocks, except one whose last ack was lost:
            # it sends that push again. Staged for the next clock, it would stay one behind, so it
            # is given up with the clock.
            return policy.catch_up(clock, self._waiting.give_up(clock))
        return None  # async: nobody waits for a clock

    def rejoin(self, worker: WorkerRank) -> list[Action]:
        """Make a worker a member that had joined before the restore, as far as this server knows.

        In ssp it goes on from its own clock, though others may have gone on without it: one step
        ahead of the other servers here, it and another such worker could wait for each other.
        """
        acked_clock = self._acked.get(worker, 0)
        if self._has_barrier:
            self._taken_back[worker] = self._policy.clock
        if isinstance(self._policy, SSP) and acked_clock:
            return self._policy.rejoin(worker, acked_clock)
        return self._policy.on_join(worker)

    def is_late(self, push: PendingPush[Gradient]) -> bool:
        """Whether a push that was not applied is for a clock of the barrier that is past.

        A restore has undone that clock, or the barrier has completed it while the worker was away.
        Staged for the open clock, its worker would stay one behind at this server. Of a worker that
        was a member all the time, an older clock only says that another client of it has pushed.
        """
        is_past = 0 < push.acked_clock < self._taken_back.get(push.id.worker, 0)
        return is_past or push.is_for(self._undone_clock)

    def entered(self, worker: WorkerRank) -> None:
        """A push of the worker is staged for the open clock: the next one is for the next."""
        self._taken_back.pop(worker, None)

    def has_lost(self, push: PendingPush[Gradient]) -> bool:
        """Whether nothing is known any more of the clock that an answered push was for.

        A restore has undone it, or its worker was away and the answer is of a later clock.
        """
        was_away = push.id.worker in self._taken_back
        is_past = was_away and 0 < push.acked_clock < (push.clock or 0) - 1
        return is_past or push.is_for(self._undone_clock)
