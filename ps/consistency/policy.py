"""Consistency policy: the events that a mode sees and the actions that it may return.

Covers: the actions, the interface of a mode, the refusals that modes share.
Does not: decide (ps.consistency.modes), hold gradients, wait, or answer anybody
(ps.consistency.gate). Pure.

The server serialises the events and executes the returned actions in order.
"""

from __future__ import annotations

import enum
from collections.abc import Set
from dataclasses import dataclass
from typing import Literal, Protocol

from ps.errors import ServerPhaseError, WorkerLost
from ps.exactly_once import RequestId
from ps.manifest.manifest import WorkerRank

OnLost = Literal["fail", "continue"]


class PushDecision(enum.Enum):
    """What to do with a gradient that begins to arrive."""

    APPLY = "apply"
    """Apply each bucket as it arrives; the sender may have fresh values at once."""
    APPLY_AND_HOLD = "apply_and_hold"
    """Apply each bucket as it arrives; the sender gets values only once it is released."""
    STAGE = "stage"
    """Keep it whole until the barrier is complete."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's gradient in a reduction, and the rows it was computed from."""

    worker: WorkerRank
    rows: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce the staged gradients in this order and apply the result once.

    The first contributor's learning rate and scalars are used: the lowest rank is the chief.
    """

    contributions: tuple[Contribution, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """Answer all pushes of these workers that wait: they are part of `clock`."""

    workers: tuple[WorkerRank, ...]
    clock: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what this worker has staged, and end the wait of its pushes: it is gone."""

    worker: WorkerRank


@dataclass(frozen=True, slots=True)
class Break:
    """Answer the waiting pushes of these workers with WorkerLost."""

    workers: tuple[WorkerRank, ...]
    lost: WorkerRank


@dataclass(frozen=True, slots=True)
class Grant:
    """Answer the lookup of this batch: it has a permit."""

    batch: RequestId


@dataclass(frozen=True, slots=True)
class RecallLookups:
    """End the waits of these lookups: their worker has left, is gone or was replaced."""

    batches: tuple[RequestId, ...]


Action = Reduce | Release | Drop | Break | Grant | RecallLookups


class Policy(Protocol):
    """Decides when a pushed gradient may be applied and when its sender is answered."""

    @property
    def clock(self) -> int:
        """Updates so far: pushes applied (async, ssp) or barriers completed (sync)."""

    @property
    def outlives_workers(self) -> bool:
        """Whether the others go on without a lost worker."""

    def admit(self, worker: WorkerRank) -> PushDecision:
        """A push begins to arrive.

        Raises:
            ServerPhaseError: the worker has left (sync, ssp) or finished.
            WorkerLost: the barrier is broken.
        """

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:
        """A push has arrived completely; `null` brings no gradient but counts as present.

        Args:
            worker: rank.
            rows: rows that the gradient is the mean of.
            null: whether it brings no gradient.

        Raises:
            ServerPhaseError, WorkerLost: a push that was to be staged is not admitted any more. One
                that was applied on its way in is never refused here.
        """

    def clock_of(self, worker: WorkerRank) -> int:
        """The worker's own clock in ssp; elsewhere all have the server's."""

    def on_join(self, worker: WorkerRank, at_least: int = 0) -> list[Action]:
        """The worker will push again; in ssp its clock is raised to `at_least`.

        Args:
            worker: rank.
            at_least: ssp: smallest clock that the worker continues from.
        """

    def on_leave(self, worker: WorkerRank) -> list[Action]:
        """The worker will not push until it joins again."""

    def on_finish(self, worker: WorkerRank) -> list[Action]:
        """The worker will never push again."""

    def on_lost(self, worker: WorkerRank) -> list[Action]:
        """The worker is gone."""

    def on_replaced(self, worker: WorkerRank) -> list[Action]:
        """A newer attempt of the worker is at work; what its older one has pushed still waits."""

    def missing(self) -> tuple[WorkerRank, ...]:
        """The workers whose push others wait for (sync: or would); empty when it is nobody."""


def worker_lost(lost: WorkerRank) -> WorkerLost:
    """The error that ends a broken barrier's pushes."""
    return WorkerLost(
        f"worker {lost} was lost and the barrier waited for it; start the training again from the "
        "last checkpoint. Barriers continue without a lost worker only on servers in their own "
        "processes: in a cluster (num_ps >= 1) with ClusterConfig(tolerate_lost_workers=True), by "
        "hand with --on-lost continue",
        {"worker": str(lost)},
    )


def refuse_finished(worker: WorkerRank, finished: Set[WorkerRank]) -> None:
    """Raise ServerPhaseError for a worker that has finished.

    Args:
        worker: rank.
        finished: ranks of the workers that have finished.
    """
    if worker in finished:
        raise ServerPhaseError(
            f"worker {worker} has called finish(), which is final; push before it"
        )


def refuse_outsider(worker: WorkerRank, members: Set[WorkerRank]) -> None:
    """Raise ServerPhaseError for a worker that has left, so that nobody waits for it.

    Args:
        worker: rank.
        members: ranks of the workers that barriers wait for.
    """
    if worker not in members:
        raise ServerPhaseError(f"worker {worker} has left the barrier; call join() before push()")
