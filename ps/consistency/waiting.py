"""Pushes that wait for the policy's word, and how each wait ends.

Covers: who waits, who was refused, what each of the policy's words does to a push and the record.
Does not: decide (ps.consistency.policy), wait or wake (ps.consistency.gate).
Threads: the gate's lock guards it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

from ps.consistency.arrival import Arrival, Contributions, Gradient
from ps.consistency.policy import Break, Drop, Reduce, Release, Undo, worker_lost
from ps.consistency.staleness import Views
from ps.errors import PSError, StaleIncarnation
from ps.exactly_once import AppliedRecord, RequestId, is_first
from ps.manifest.manifest import WorkerRank


class WaitingPushes(Generic[Gradient]):
    """The pushes that have arrived at a gate and are not answered yet.

    Args:
        record: told when a push is done.
        views: told whose updates the clock counts.
        on_applied: told once for every push that has become part of the parameters.
    """

    def __init__(
        self, record: AppliedRecord, views: Views, on_applied: Callable[[Arrival[Gradient]], None]
    ) -> None:
        self._record = record
        self._views = views
        self._on_applied = on_applied
        self._arrivals: dict[RequestId, Arrival[Gradient]] = {}

    @property
    def requests(self) -> frozenset[RequestId]:
        """The names of those that wait."""
        return frozenset(self._arrivals)

    def find(self, request: RequestId) -> Arrival[Gradient] | None:
        """Return the push of this name if it waits.

        Raises:
            PSError: what this very request was refused with, when it waits no more.
        """
        waiting = self._arrivals.get(request)
        refusal = self._record.refusal_of(request)
        if waiting is None and refusal is not None:
            raise refusal
        return waiting

    def meant_before(self, clock: int) -> set[WorkerRank]:
        """Return whose waiting push was for this clock or one before it."""
        return {
            arrival.id.worker
            for arrival in self._arrivals.values()
            if arrival.told_clock < clock
            and (
                arrival.told_clock
                or is_first(arrival.id, arrival.told_clock)
                or self._record.is_resent(arrival.id)
            )
        }

    def has_fenced(self, worker: WorkerRank) -> bool:
        """Whether something waits that an attempt of the worker has pushed which is fenced."""
        least = self._record.incarnation_of(worker)
        return any(one.worker == worker and one.incarnation < least for one in self._arrivals)

    def enter(self, arrival: Arrival[Gradient]) -> None:
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

    def _note_applied(self, arrival: Arrival[Gradient]) -> None:
        arrival.is_applied = True
        self._record.complete(arrival.id)
        self._views.pushed(arrival.id.worker)
        self._on_applied(arrival)

    def _take(self, worker: WorkerRank) -> list[Arrival[Gradient]]:
        """Remove and return what waits of one worker; more than one only of several sessions."""
        taken = [arrival for arrival in self._arrivals.values() if arrival.id.worker == worker]
        for arrival in taken:
            del self._arrivals[arrival.id]
        return taken
