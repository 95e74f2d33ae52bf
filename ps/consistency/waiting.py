"""Pushes that wait for the policy's word, and how each wait ends.

Covers: who waits, who was refused, what each of the policy's words does to a push and the record.
Does not: decide (ps.consistency.policy), wait or wake (ps.consistency.gate).
Threads: the gate's lock guards it.

[merged ps/consistency/waiting.py] Lookups that wait for a permit: how many copies of each, and
what the policy has said of it.

Covers: the state of each wait.      Does not: decide (ps.consistency.hybrid), wait or wake
(ps.consistency.gate).
Threads: the gate's lock guards it.

[merged ps/consistency/waiting.py] A push that has arrived at a server, on its way to being part
of the parameters.

Covers: what is known of it, its outcome.      Does not: wait or decide (ps.consistency.gate).
Threads: belongs to one thread until it arrives at the gate; then the gate's lock guards it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ps.consistency.policy import (
    Break,
    Drop,
    Grant,
    RecallLookups,
    Reduce,
    Release,
    Undo,
    worker_lost,
)
from ps.consistency.staleness import StalenessTracker
from ps.errors import PSError, RequestTimeout, StaleIncarnation
from ps.exactly_once import CompletionLog, RequestId, is_first
from ps.manifest.manifest import Hyper, WorkerRank
from ps.metadata import AttachedMetadata


@dataclass(slots=True)
class LookupWait:
    """One batch whose rows somebody waits for."""

    num_copies: int = 0
    """A cut lookup comes again while its first copy may still wait here."""
    is_granted: bool = False
    is_recalled: bool = False


class WaitingLookups:
    """All lookups of a shard that wait for a permit."""

    def __init__(self) -> None:
        self._waits: dict[RequestId, LookupWait] = {}

    @property
    def num_waiting(self) -> int:
        """Batches whose lookup is not answered yet."""
        return sum(not wait.is_granted for wait in tuple(self._waits.values()))

    @contextlib.contextmanager
    def entered(self, batch: RequestId) -> Iterator[LookupWait]:
        """Count one copy of a lookup in, and out at the end."""
        wait = self._waits.setdefault(batch, LookupWait())
        wait.num_copies += 1
        try:
            yield wait
        finally:
            wait.num_copies -= 1
            if not wait.num_copies:
                self._waits.pop(batch, None)

    def grant(self, action: Grant) -> None:
        """Let all copies go on."""
        self._waits[action.batch].is_granted = True

    def recall(self, action: RecallLookups) -> None:
        """End the waits; their senders hear why."""
        for batch in action.batches:
            self._waits[batch].is_recalled = True


def no_permit(worker: WorkerRank, bound: int) -> RequestTimeout:
    """The error that ends a lookup whose worker's older batches were not over in time."""
    return RequestTimeout(
        f"worker {worker} has staleness_bound={bound} batches under way: their rows were looked up "
        "and their gradients have not come; push() or close() them, or raise the bound",
        {"worker": str(worker), "bound": str(bound)},
    )


Gradient = TypeVar("Gradient")


@dataclass(slots=True)
class PendingPush(Generic[Gradient]):
    """A push that is completely here, and later its outcome: `clock` or `error`."""

    id: RequestId
    rows: int
    hyper: Hyper | None
    """None: a null push."""
    gradient: Gradient | None = None
    """What was staged; None for a null push and for one that was applied as it arrived."""
    staleness: int = 0
    acked_clock: int = 0
    """The newest clock that its sender was told before it; a staged push is for the next one."""
    note: AttachedMetadata | None = None
    """What is kept once it is part of the parameters."""
    is_applied: bool = False
    """Whether it is part of the parameters; in ssp before its sender is answered."""
    clock: int | None = None
    error: PSError | None = None

    @property
    def is_changing(self) -> bool:
        """Whether its buckets were changed as they arrived."""
        return self.hyper is not None and self.gradient is None

    @property
    def is_done(self) -> bool:
        """Whether its sender can be answered."""
        return self.clock is not None or self.error is not None


Contributions = Sequence[PendingPush[Gradient]]


def still_waits(clock: int, missing: Sequence[WorkerRank]) -> RequestTimeout:
    """The error that ends a push whose clock was not complete in time."""
    names = ", ".join(str(rank) for rank in missing)
    return RequestTimeout(
        f"clock {clock} still waits for worker {names}; raise the timeout or let idle workers "
        "leave()",
        {"missing": names},
    )


class WaitingPushes(Generic[Gradient]):
    """The pushes that have arrived at a gate and are not answered yet.

    Args:
        record: told when a push is done.
        views: told whose updates the clock counts.
        on_applied: told once for every push that has become part of the parameters.
    """

    def __init__(
        self,
        record: CompletionLog,
        views: StalenessTracker,
        on_applied: Callable[[PendingPush[Gradient]], None],
    ) -> None:
        self._record = record
        self._views = views
        self._on_applied = on_applied
        self._arrivals: dict[RequestId, PendingPush[Gradient]] = {}

    @property
    def requests(self) -> frozenset[RequestId]:
        """The names of those that wait."""
        return frozenset(self._arrivals)

    def find(self, request: RequestId) -> PendingPush[Gradient] | None:
        """Return the push of this name if it waits.

        Raises:
            PSError: what this very request was refused with, when it waits no more.
        """
        waiting = self._arrivals.get(request)
        refusal = self._record.refusal_of(request)
        if waiting is None and refusal is not None:
            raise refusal
        return waiting

    def pushes_for_clock_at_most(self, clock: int) -> set[WorkerRank]:
        """Return whose waiting push was for this clock or one before it."""
        return {
            arrival.id.worker
            for arrival in self._arrivals.values()
            if arrival.acked_clock < clock
            and (
                arrival.acked_clock
                or is_first(arrival.id, arrival.acked_clock)
                or self._record.is_resent(arrival.id)
            )
        }

    def has_fenced(self, worker: WorkerRank) -> bool:
        """Whether something waits that an attempt of the worker has pushed which is fenced."""
        least = self._record.incarnation_of(worker)
        return any(one.worker == worker and one.incarnation < least for one in self._arrivals)

    def enter(self, arrival: PendingPush[Gradient]) -> None:
        """A push has arrived; one that was applied on its way in counts at once."""
        self._arrivals[arrival.id] = arrival
        if arrival.is_changing:
            self._note_applied(arrival)

    def refuse(self, request: RequestId, error: PSError) -> None:
        """Let every copy of this request be refused, whatever its worker does meanwhile."""
        self._record.refuse(request, error)

    def staged(self, action: Reduce) -> Contributions[Gradient]:
        """Return the pushes of a reduction, in its order."""
        waiting = {arrival.id.worker: arrival for arrival in self._arrivals.values()}
        return [waiting[part.worker] for part in action.contributions]

    def fail(self, staged: Contributions[Gradient], error: PSError) -> None:
        """Their reduction was refused: nothing of them is applied, and each sender hears why."""
        for arrival in staged:
            arrival.error = error
            self._record.refuse(arrival.id, error)

    def release(self, action: Release) -> None:
        """Answer: they are part of a clock, or were refused before it was complete."""
        for arrival in [one for worker in action.workers for one in self._take(worker)]:
            arrival.clock = action.clock
            if arrival.gradient is not None and arrival.error is None:
                self._note_applied(arrival)
            elif not arrival.is_applied:  # a null push, or one that was refused
                self._record.complete(arrival.id)
                arrival.error = arrival.error or self._record.refusal_of(arrival.id)

    def undo(self, action: Undo) -> None:
        """Answer: they were part of a clock that a restore has undone, so nothing is applied."""
        for arrival in [one for worker in action.workers for one in self._take(worker)]:
            arrival.clock = action.clock
            arrival.error = arrival.error or self._record.refusal_of(arrival.id)
            self._record.give_up(arrival.id)

    def drop(self, action: Drop) -> None:
        """Forget a lost worker's pushes; if it was only frozen, it hears that it is fenced."""
        for arrival in self._take(action.worker):
            try:
                self._record.refuse_stale(action.worker, arrival.id.incarnation)
            except StaleIncarnation as error:
                arrival.error = error

    def break_up(self, action: Break) -> None:
        """End the waits of a barrier that will never be complete."""
        for worker in action.workers:
            for arrival in self._take(worker):
                arrival.error = worker_lost(action.lost)

    def close(self, error: PSError, clock: int) -> None:
        """End all waits: with `error` where nothing was applied."""
        for arrival in self._arrivals.values():
            if arrival.is_applied:
                arrival.clock = clock
            else:
                arrival.error = error
        self._arrivals.clear()

    def _note_applied(self, arrival: PendingPush[Gradient]) -> None:
        arrival.is_applied = True
        self._record.complete(arrival.id)
        self._views.pushed(arrival.id.worker)
        self._on_applied(arrival)

    def _take(self, worker: WorkerRank) -> list[PendingPush[Gradient]]:
        """Remove and return what waits of one worker; more than one only of several sessions."""
        taken = [arrival for arrival in self._arrivals.values() if arrival.id.worker == worker]
        for arrival in taken:
            del self._arrivals[arrival.id]
        return taken
