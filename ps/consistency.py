"""When a pushed gradient is applied and when its sender is answered: events in, actions out.

Covers: `async`, and `sync` (bulk synchronous parallel: one barrier per clock) with workers that
join, leave, finish or are lost.
Does not: hold gradients, wait, or answer anybody (ps.gate). Pure: no locks, clock or I/O; the
server serialises the calls and executes the returned actions in order.

A worker is, seen from the barrier:

    MEMBER ──leave──► AWAY ──join──► MEMBER        a member's push is waited for
       │                │
       ├────finish──────┴──► FINISHED              never waited for, may not come back
       └────lost────────────► LOST                 breaks the barrier, or as AWAY with `continue`
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from ps.errors import PhaseError, SettingsError, WorkerLost
from ps.params import Manifest, WorkerRank

OnLost = Literal["fail", "continue"]


class Admission(enum.Enum):
    """What to do with a gradient that begins to arrive."""

    APPLY = "apply"
    """Apply each bucket as it arrives."""
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
    """Answer the pushes of these workers: they are part of `clock`."""

    workers: tuple[WorkerRank, ...]
    clock: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget what this worker has staged: it is lost."""

    worker: WorkerRank


@dataclass(frozen=True, slots=True)
class Break:
    """Answer the waiting pushes of these workers with WorkerLost."""

    workers: tuple[WorkerRank, ...]
    lost: WorkerRank


Action = Reduce | Release | Drop | Break


class Policy(Protocol):
    """Decides when a pushed gradient may be applied and when its sender is answered."""

    @property
    def clock(self) -> int:
        """Updates so far: pushes applied (async) or barriers completed (sync)."""

    def admit(self, worker: WorkerRank) -> Admission:
        """A push begins to arrive.

        Raises:
            PhaseError: the worker has left or finished.
            WorkerLost: the barrier is broken.
        """

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:
        """A push has arrived completely; `null` brings no gradient but counts as present."""

    def on_join(self, worker: WorkerRank) -> list[Action]:
        """The worker will push again."""

    def on_leave(self, worker: WorkerRank) -> list[Action]:
        """The worker will not push until it joins again."""

    def on_finish(self, worker: WorkerRank) -> list[Action]:
        """The worker will never push again."""

    def on_lost(self, worker: WorkerRank) -> list[Action]:
        """The worker is gone."""

    def missing(self) -> tuple[WorkerRank, ...]:
        """The workers whose push the barrier waits for; empty when it waits for nobody."""


class Async:
    """Each push is applied when it arrives; nobody waits for anybody."""

    def __init__(self, *, clock: int = 0) -> None:
        self._clock = clock
        self._finished: set[WorkerRank] = set()

    @property
    def clock(self) -> int:
        """Pushes applied so far."""
        return self._clock

    def admit(self, worker: WorkerRank) -> Admission:
        """Apply on arrival."""
        _refuse_finished(worker, self._finished)
        return Admission.APPLY

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:  # noqa: ARG002 - rows weigh in sync only
        """Count the push and answer it."""
        if not null:
            self._clock += 1
        return [Release((worker,), self._clock)]

    def on_join(self, worker: WorkerRank) -> list[Action]:
        """Nothing waits for members."""
        _refuse_finished(worker, self._finished)
        return []

    def on_leave(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002
        """Nothing waits for members."""
        return []

    def on_finish(self, worker: WorkerRank) -> list[Action]:
        """Refuse later pushes of this worker."""
        self._finished.add(worker)
        return []

    def on_lost(self, worker: WorkerRank) -> list[Action]:  # noqa: ARG002 - its incarnation is fenced by ps.applied
        """The others continue."""
        return []

    def missing(self) -> tuple[WorkerRank, ...]:
        """Nobody, ever."""
        return ()


class Sync:
    """One barrier per clock: it completes when every member has pushed.

    All members of `0..num_workers-1` are waited for from the start, so no early worker can run
    ahead of one that is still starting.
    """

    def __init__(self, num_workers: int, *, on_lost: OnLost = "fail", clock: int = 0) -> None:
        self._clock = clock
        self._continues = on_lost == "continue"
        self._members = {WorkerRank(rank) for rank in range(num_workers)}
        self._finished: set[WorkerRank] = set()
        self._arrived: dict[WorkerRank, int | None] = {}  # rows, None for a null push
        self._broken_by: WorkerRank | None = None

    @property
    def clock(self) -> int:
        """Barriers completed so far."""
        return self._clock

    @property
    def members(self) -> frozenset[WorkerRank]:
        """The workers that every barrier waits for."""
        return frozenset(self._members)

    def admit(self, worker: WorkerRank) -> Admission:
        """Stage a member's push."""
        self._refuse_broken()
        _refuse_finished(worker, self._finished)
        if worker not in self._members:
            raise PhaseError(f"worker {worker} has left the barrier; call join() before push()")
        return Admission.STAGE

    def on_push(self, worker: WorkerRank, rows: int, *, null: bool) -> list[Action]:
        """Count the worker as present; complete the barrier if it was the last."""
        self.admit(worker)
        if worker in self._arrived:
            raise PhaseError(
                f"worker {worker} pushed twice in clock {self._clock}: its first push still waits "
                f"for {_ranks(self.missing())}; repeat that push or stop"
            )
        self._arrived[worker] = None if null else rows
        return self._complete_if_all_arrived()

    def on_join(self, worker: WorkerRank) -> list[Action]:
        """Wait for this worker from the barrier that is open now."""
        self._refuse_broken()
        _refuse_finished(worker, self._finished)
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
        dropped: list[Action] = []
        if worker in self._arrived:
            del self._arrived[worker]
            dropped.append(Drop(worker))
        return dropped + self._complete_if_all_arrived()

    def missing(self) -> tuple[WorkerRank, ...]:
        """The members that have not pushed into the open barrier."""
        return tuple(sorted(self._members - self._arrived.keys()))

    def _complete_if_all_arrived(self) -> list[Action]:
        if not self._arrived or self._members - self._arrived.keys() or self._broken_by is not None:
            return []
        arrived = sorted(self._arrived.items())
        self._arrived.clear()
        self._clock += 1
        gradients = tuple(
            Contribution(worker, rows) for worker, rows in arrived if rows is not None
        )
        reduce: list[Action] = [Reduce(gradients)] if gradients else []
        return [*reduce, Release(tuple(worker for worker, _ in arrived), self._clock)]

    def _refuse_broken(self) -> None:
        if self._broken_by is not None:
            raise worker_lost(self._broken_by)


def make_policy(
    manifest: Manifest, num_workers: int, *, on_lost: OnLost = "fail", clock: int = 0
) -> Policy:
    """Return the policy that the manifest asks for."""
    if num_workers < 1:
        raise SettingsError(f"num_workers must be at least 1, got {num_workers}")
    if manifest.consistency == "sync":
        return Sync(num_workers, on_lost=on_lost, clock=clock)
    return Async(clock=clock)


def worker_lost(lost: WorkerRank) -> WorkerLost:
    """The error that ends a broken barrier's pushes."""
    return WorkerLost(
        f"worker {lost} was lost and the sync barrier waited for it; restart the training from the "
        "last checkpoint, or start the servers with on_lost='continue'",
        {"worker": str(lost)},
    )


def _refuse_finished(worker: WorkerRank, finished: set[WorkerRank]) -> None:
    if worker in finished:
        raise PhaseError(f"worker {worker} has called finish(), which is final; push before it")


def _ranks(workers: Iterable[WorkerRank]) -> str:
    return "worker " + ", ".join(str(worker) for worker in workers)
