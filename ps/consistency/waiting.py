"""Pending pushes and lookups: what is known of each, and how its wait ends.

Covers: a push from its arrival to its answer; which pushes and lookups wait, and what each action
of the policy does to them and to the record.
Does not: decide (ps.consistency.policy, ps.consistency.hybrid), block a thread
(ps.consistency.waits), lock (ps.consistency.gate).
Threads: a push belongs to the thread that reads it until it arrives at the gate; then, as all else
here, to the gate's lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ps.consistency.policy import (
    Break,
    Drop,
    Grant,
    PushDecision,
    RecallLookups,
    Reduce,
    Release,
    worker_lost,
)
from ps.consistency.staleness import StalenessTracker
from ps.errors import PSError, RequestTimeout, StaleGeneration
from ps.exactly_once import CompletionLog, RequestId, Ticket
from ps.manifest.manifest import Hyper, WorkerRank
from ps.metadata import AttachedMetadata


@dataclass(slots=True)
class LookupWait:
    """One batch whose rows somebody waits for."""

    ended: threading.Condition
    """Notified when it is granted or recalled, and when its worker may not wait any more."""
    num_copies: int = 0
    """A cut lookup comes again while its first copy may still wait here."""
    is_granted: bool = False
    is_recalled: bool = False


class WaitingLookups:
    """All lookups of a shard that wait for a permit."""

    def __init__(self, new_bell: Callable[[], threading.Condition]) -> None:
        self._new_bell = new_bell
        self._waits: dict[RequestId, LookupWait] = {}

    @property
    def num_waiting(self) -> int:
        """Batches whose lookup is not answered yet."""
        return sum(not wait.is_granted for wait in tuple(self._waits.values()))

    @contextlib.contextmanager
    def entered(self, batch: RequestId) -> Iterator[LookupWait]:
        """Count one copy of a lookup in, and out at the end."""
        wait = self._waits.get(batch)
        if wait is None:
            wait = self._waits[batch] = LookupWait(self._new_bell())
        wait.num_copies += 1
        try:
            yield wait
        finally:
            wait.num_copies -= 1
            if not wait.num_copies:
                self._waits.pop(batch, None)

    def grant(self, action: Grant) -> None:
        """Let all copies go on."""
        wait = self._waits[action.batch]
        wait.is_granted = True
        wait.ended.notify_all()

    def recall(self, action: RecallLookups) -> None:
        """End the waits with an error."""
        for batch in action.batches:
            wait = self._waits[batch]
            wait.is_recalled = True
            wait.ended.notify_all()

    def look(self, worker: WorkerRank | None = None) -> None:
        """Let the lookups of a worker, or of all, look whether they may still wait."""
        for batch, wait in self._waits.items():
            if worker in (None, batch.worker):
                wait.ended.notify_all()


def no_permit(worker: WorkerRank, bound: int) -> RequestTimeout:
    """The error that ends a lookup whose worker's older batches were not over in time.

    Args:
        worker: rank.
        bound: batches of a worker that may be open at once.
    """
    return RequestTimeout(
        f"worker {worker} has staleness_bound={bound} batches under way: their rows were looked up "
        "and their gradients have not come; push() or close() them, or raise the bound",
        {"worker": str(worker), "bound": str(bound)},
    )


Gradient = TypeVar("Gradient")


@dataclass(slots=True)
class PendingPush(Generic[Gradient]):
    """One push from its arrival to its answer.

    The thread that reads it from a connection makes it. The gate adds the ticket and the
    decision when it begins, and the outcome at the end: `clock` or `error`.
    """

    id: RequestId
    rows: int
    hyper: Hyper | None
    """Learning rate and scalars; None: a null push."""
    gradient: Gradient | None = None
    """What was staged; None for a null push and for one that was applied as it arrived."""
    acked_clock: int = 0
    """The newest clock that its sender had an ack of; a staged push is for the next one."""
    metadata: AttachedMetadata | None = None
    """What is kept once it is part of the parameters."""
    tables: object = None
    """What it brings for tables and asks of them, which only the shard looks into."""
    ticket: Ticket = field(init=False)
    """What of it is left to do."""
    decision: PushDecision = field(init=False)
    """What to do with its gradient; of one that is not known already."""
    staleness: int = 0
    is_applied: bool = False
    """Whether it is part of the parameters; in ssp before its sender is answered."""
    clock: int | None = None
    error: PSError | None = None
    ended: threading.Condition | None = None
    """Wakes those who wait for its end; None: nobody does."""

    @property
    def is_done(self) -> bool:
        """Whether its sender can be answered."""
        return self.clock is not None or self.error is not None

    def tell(self) -> None:
        """Wake those who wait for its end."""
        if self.ended is not None:
            self.ended.notify_all()

    def is_for(self, clock: int) -> bool:
        """Whether it is for this clock of the barrier, or for one before it.

        A later attempt that was told no clock yet begins where the others are.
        """
        is_told = self.acked_clock > 0 or not self.id.generation
        return is_told and self.acked_clock < clock


StagedPushes = Sequence[PendingPush[Gradient]]


class Updates(Protocol[Gradient]):
    """What a gate's decisions do to the parameters.

    The gate calls them under its lock: what others see between two of its calls is whole, and a
    reduction's outcome decides how the pushes are answered.
    """

    def reduce(self, staged: StagedPushes[Gradient], clock: int) -> None:
        """Apply the staged gradients, in the given order, as one update.

        Args:
            staged: pushes of one clock, by rank.
            clock: the one that they complete.

        Raises:
            PushError: refused; what is applied is not acknowledged.
        """

    def applied(self, push: PendingPush[Gradient]) -> None:
        """A push has become part of the parameters; called once for each.

        What it refuses by the push's ticket now, the sender hears with the push's clock.
        """

    def moved(self) -> None:
        """The clock or the parameters may have changed."""

    def failed(self, reason: str) -> None:
        """The shard cannot go on."""


def still_waits(clock: int, missing: Sequence[WorkerRank]) -> RequestTimeout:
    """The error that ends a push whose clock was not complete in time.

    Args:
        clock: the incomplete one.
        missing: ranks of the workers that have not pushed.
    """
    names = ", ".join(str(rank) for rank in missing)
    return RequestTimeout(
        f"clock {clock} still waits for worker {names}; raise the timeout or let idle workers "
        "leave()",
        {"missing": names},
    )


class WaitingPushes(Generic[Gradient]):
    """The pushes that have arrived at a gate and are not answered yet.

    Args:
        log: counts the pushes that a restore has undone.
        tracker: counts whose updates the clock contains.
        updates: called for every push that has become part of the parameters.
    """

    def __init__(
        self, log: CompletionLog, tracker: StalenessTracker, updates: Updates[Gradient]
    ) -> None:
        self._log = log
        self._tracker = tracker
        self._updates = updates
        self.pushes: dict[RequestId, PendingPush[Gradient]] = {}
        """Pushes by name."""

    def give_up(self, clock: int) -> set[WorkerRank]:
        """Take the gradients from the pushes for this clock or before: a restore has undone it.

        Returns:
            Whose pushes they are; each is answered when it is released.
        """
        undone = [push for push in self.pushes.values() if push.is_for(clock)]
        for push in undone:
            self._log.give_up(push.ticket, is_update=push.gradient is not None)
            push.hyper = push.gradient = None
        return {push.id.worker for push in undone}

    def has_fenced(self, worker: WorkerRank) -> bool:
        """Whether something waits that an attempt of the worker has pushed which is fenced."""
        least = self._log.generation_of(worker)
        return any(one.worker == worker and one.generation < least for one in self.pushes)

    def enter(self, push: PendingPush[Gradient]) -> None:
        """A push has arrived; one that was applied on its way in counts at once."""
        self.pushes[push.id] = push
        if push.hyper is not None and push.gradient is None:
            self._note_applied(push)

    def staged(self, action: Reduce) -> StagedPushes[Gradient]:
        """Return the pushes of a reduction, in its order."""
        waiting = {push.id.worker: push for push in self.pushes.values()}
        return [waiting[part.worker] for part in action.contributions]

    def fail(self, staged: StagedPushes[Gradient], error: PSError) -> None:
        """Their reduction was refused: nothing of them is applied, and each sender gets the error.

        Args:
            staged: pushes of one clock.
            error: why.
        """
        for push in staged:
            push.error = error
            push.ticket.refuse(error)
            push.tell()

    def release(self, action: Release) -> None:
        """Answer: they are part of a clock, or were refused before it was complete."""
        for push in self._take(action.workers):
            push.clock = action.clock
            if push.gradient is not None and push.error is None:
                self._note_applied(push)
            elif not push.is_applied:  # a null push, or one that was refused
                push.ticket.complete()
            push.error = push.error or push.ticket.refusal
            push.tell()

    def drop(self, action: Drop) -> None:
        """Forget a lost worker's pushes; if it was only frozen, it gets StaleGeneration."""
        for push in self._take((action.worker,)):
            try:
                self._log.refuse_stale(action.worker, push.id.generation)
            except StaleGeneration as error:
                push.error = error
            push.tell()

    def break_up(self, action: Break) -> None:
        """End the waits of a barrier that will never be complete."""
        for push in self._take(action.workers):
            push.error = worker_lost(action.lost)
            push.tell()

    def close(self, error: PSError, clock: int) -> None:
        """End all waits: with `error` where nothing was applied.

        Args:
            error: what the senders get.
            clock: updates so far.
        """
        for push in self.pushes.values():
            if push.is_applied:
                push.clock = clock
            else:
                push.error = error.again()
            push.tell()
        self.pushes.clear()

    def _note_applied(self, push: PendingPush[Gradient]) -> None:
        push.is_applied = True
        push.ticket.complete(is_update=True)
        self._tracker.pushed(push.id.worker)
        self._updates.applied(push)

    def _take(self, workers: Sequence[WorkerRank]) -> list[PendingPush[Gradient]]:
        """Remove and return what waits of these workers, worker by worker."""
        places = {worker: place for place, worker in enumerate(workers)}
        names = [name for name in self.pushes if name.worker in places]
        names.sort(key=lambda name: places[name.worker])
        return [self.pushes.pop(name) for name in names]
