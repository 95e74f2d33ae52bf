"""Asynchronous parallel (async): every push is applied on arrival; and the choice of a mode.

Covers: `async`, and the way from a manifest to its mode; `sync` is ps.consistency.bsp, `ssp`
ps.consistency.ssp, `hybrid` ps.consistency.hybrid.
Does not: hold gradients, wait, or answer anybody (ps.consistency.gate). Pure: no locks, clock or
I/O.

    mode     a gradient is applied         push() is answered               a lost worker
    async    as it arrives                 at once                          is not missed
    ssp      as it arrives                 when its worker is at most       is waited for no more
                                           `staleness_bound` clocks ahead
    sync     with everybody's, reduced     when everybody's is applied      ends the barrier, or is
             in rank order, as one                                          waited for no more
    hybrid   dense: as in sync             as in sync; rows at once         as in sync; its permits
             rows: as it arrives, with     (their lookup waits instead)     are free
             a permit from their lookup
"""

from __future__ import annotations

import msgspec

from ps.consistency.bsp import BSP
from ps.consistency.hybrid import Hybrid
from ps.consistency.policy import Action, OnLost, Policy, PushDecision, Release, refuse_finished
from ps.consistency.ssp import SSP
from ps.errors import PSSettingsError
from ps.manifest.manifest import Hyper, Manifest, WorkerRank


class ASP:
    """Each push is applied when it arrives; nobody waits for anybody."""

    def __init__(self, *, clock: int = 0) -> None:
        self.clock = clock
        """Pushes applied so far."""
        self._finished: set[WorkerRank] = set()

    @property
    def outlives_workers(self) -> bool:
        """Always: nobody waits for a lost worker."""
        return True

    def admit(self, worker: WorkerRank) -> PushDecision:
        """Apply on arrival."""
        refuse_finished(worker, self._finished)
        return PushDecision.APPLY

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:  # noqa: ARG002 - rows weigh in sync only
        """Count the push and answer it. Arguments as of Policy."""
        if not null:
            self.clock += 1
        return [Release((worker,), self.clock)]

    def clock_of(self, worker: WorkerRank) -> int:  # noqa: ARG002
        """The server's."""
        return self.clock

    def on_join(self, worker: WorkerRank, at_least: int = 0) -> list[Action]:  # noqa: ARG002 - no clock of its own
        """Nothing waits for members. Arguments as of Policy."""
        refuse_finished(worker, self._finished)
        return []

    def on_leave(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002
        """Nothing waits for members."""
        return []

    def on_finish(self, worker: WorkerRank) -> list[Action]:
        """Refuse later pushes of this worker."""
        self._finished.add(worker)
        return []

    def on_lost(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002 - its generation is fenced by ps.exactly_once
        """The others continue."""
        return []

    def on_replaced(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002
        """Nothing waits."""
        return []

    def missing(self) -> tuple[WorkerRank, ...]:
        """Nobody, ever."""
        return ()


def make_policy(
    manifest: Manifest, num_workers: int, *, on_lost: OnLost = "fail", clock: int = 0
) -> Policy:
    """Return the policy that the manifest asks for.

    Args:
        manifest: has the mode and its bounds.
        num_workers: of the cluster.
        on_lost: what a lost worker means: "fail" or "continue".
        clock: updates so far, after a restore.
    """
    if num_workers < 1:
        raise PSSettingsError(f"num_workers must be at least 1, got {num_workers}")
    if manifest.consistency == "sync":
        return BSP(num_workers, on_lost=on_lost, clock=clock)
    if manifest.consistency == "hybrid":
        return Hybrid(num_workers, manifest.staleness_bound, on_lost=on_lost, clock=clock)
    if manifest.consistency == "ssp":
        return SSP(num_workers, manifest.staleness_bound, clock=clock)
    return ASP(clock=clock)


def slowed(hyper: Hyper, staleness: int) -> Hyper:
    """Return `hyper` with the learning rate for a gradient that is `staleness` updates old.

    The rate is divided by 1 + staleness, so that a gradient counts the less the more updates by
    others its worker has not seen. It scales the rate, not the gradient, since rules like Adam do
    not notice a scaled gradient.

    Args:
        hyper: of the push.
        staleness: updates by others since the worker's last pull, 0 or more.

    Source: Zhang et al., Staleness-aware ASP-SGD for Distributed Deep Learning, IJCAI 2016, which
    divides by the staleness, counted from 1 for a fresh gradient.
    """
    if staleness == 0:
        return hyper
    return msgspec.structs.replace(hyper, learning_rate=hyper.learning_rate / (1 + staleness))
