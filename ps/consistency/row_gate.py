"""The gate of a shard's tables: whose gradients of rows are taken, and who waits for a permit.

Covers: admission of rows, the batches that begin and end, lookups that wait in line (hybrid).
Does not: serialise pushes to the groups (ps.consistency.gate, whose lock holds here too), choose
who gets a permit (ps.consistency.hybrid), apply rows (ps.server.row_updates).
Runs in: PS processes.
Threads: any; each lookup waits on a condition of its own with the gate's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ps.consistency.gate import Gate, sender_gone
from ps.consistency.hybrid import Hybrid
from ps.consistency.policy import Policy
from ps.consistency.waiting import no_permit
from ps.consistency.waits import Waited, wait_until
from ps.errors import PSError, PSSettingsError, RequestTimeout, ServerGone, ServerPhaseError
from ps.exactly_once import RequestId, Ticket, Verdict


@dataclass(frozen=True, slots=True)
class LookupTurn:
    """A lookup of rows to train on, which may have to wait for a permit."""

    batch: RequestId
    """Its name."""
    still_open: Collection[int]
    """See ps.consistency.hybrid."""
    deadline_s: float
    """Monotonic."""
    is_gone: Callable[[], bool]
    """Whether nobody waits for the answer any more."""


class RowGate:
    """Serialises what workers do to the rows of one shard.

    Args:
        gate: gate of the shard.
        policy: the gate's; only hybrid lets a lookup wait.
    """

    def __init__(self, gate: Gate[Any], policy: Policy) -> None:
        self._gate = gate
        self._policy = policy
        self._hybrid = policy if isinstance(policy, Hybrid) else None

    def look_up(self, lookup: LookupTurn) -> None:
        """Wait until a batch may have its rows.

        Raises:
            RequestTimeout: not before its deadline; the worker's older batches are under way.
            ServerGone: the sender is gone; its retry queues again.
            PSError: the worker has left, was replaced or lost, or the gate is closed.
        """
        gate, hybrid = self._gate, self._hybrid
        with gate.changed:
            if hybrid is None:
                return
            ticket = gate.begin(lookup.batch)
            if ticket.verdict is Verdict.DUPLICATE:
                return
            try:
                self._wait_in_line(hybrid, ticket, lookup)
            except (RequestTimeout, ServerGone):
                raise
            except PSError as error:
                ticket.refuse(error)
                raise
            ticket.complete()

    def look_up_next(self, push: Ticket, lookup: LookupTurn) -> None:
        """Wait until the batch that a push begins may have its rows. Raises as `look_up`.

        A late copy of a push whose session has gone on waits for nothing: that batch is over.

        Args:
            push: arrived before, with the name of the batch.
            lookup: the batch, usually with the permit of the one that the push has ended.
        """
        with self._gate.changed:
            if self._hybrid is not None and push.session.sequence == push.id.sequence:
                self._wait_in_line(self._hybrid, push, lookup)

    def _wait_in_line(self, hybrid: Hybrid, ticket: Ticket, lookup: LookupTurn) -> None:
        gate, batch = self._gate, lookup.batch
        gate.take_back(batch.worker)
        with gate.lookups.entered(batch) as wait:
            try:
                gate.execute(hybrid.on_lookup(batch, lookup.still_open))

                def is_granted() -> bool:
                    if wait.is_granted:
                        return True
                    gate.refuse_closed()
                    ticket.check()
                    if wait.is_recalled:
                        raise self._why_recalled(hybrid, batch)
                    return False

                waited = wait_until(wait.ended, is_granted, lookup.deadline_s, lookup.is_gone)
                if waited is Waited.OVERDUE:
                    raise no_permit(batch.worker, hybrid.permits.bound)
                if waited is Waited.GONE:
                    raise sender_gone(batch.worker)
            finally:
                if wait.num_copies == 1:
                    hybrid.permits.on_lookup_ended(batch)

    @property
    def has_permits(self) -> bool:
        """Whether lookups to train on need permits; then rows do not wait for the barrier."""
        return self._hybrid is not None

    def admit(self, ticket: Ticket, batch: RequestId | None) -> None:
        """Refuse gradients that may not be applied now; others are, as they arrive.

        Args:
            ticket: ticket of the push.
            batch: the lookup that the rows were trained from; None: none.

        Raises:
            ServerPhaseError, WorkerLost: as for a push to the groups.
            PSSettingsError: hybrid: they are of no batch, so nothing bounds how old they are.
        """
        with self._gate.changed, refusing(ticket):
            self._gate.take_back(ticket.id.worker)
            self._policy.admit(ticket.id.worker)
        self.check_batch(batch)

    def check_batch(self, batch: RequestId | None) -> None:
        """Refuse gradients of rows that are of no batch, where nothing else bounds their age.

        Args:
            batch: the lookup that the rows were trained from; None: none.
        """
        if batch is None and self.has_permits:
            raise PSSettingsError(
                "hybrid takes gradients of rows only for a batch that was looked up to train on; "
                "use tables.batch(ids) and its push()"
            )

    def end_batch(self, batch: RequestId | None, following: RequestId | None = None) -> None:
        """A batch is over: its gradients are applied, refused or given up.

        Args:
            batch: the name of its lookup; None: there is none.
            following: see ps.consistency.hybrid.
        """
        if batch is not None and self._hybrid is not None:
            with self._gate.changed:
                self._gate.execute(self._hybrid.permits.on_batch_over(batch, following))

    def applied(self, ticket: Ticket, batch: RequestId | None, *, is_update: bool = True) -> bool:
        """A push is done, and its batch over; False when that was known.

        All of it was applied as it arrived, so it counts though a copy was refused meanwhile.

        Args:
            ticket: ticket of the push.
            batch: the lookup that the rows were trained from; None: none.
            is_update: it has changed rows; else it only gives the batch up.
        """
        with self._gate.changed:
            ticket.refuse(None)
            if not self._gate.is_to_do(ticket, is_applied=True):
                return False
            ticket.complete(is_update=is_update)
            self.end_batch(batch)
            return True

    def refused(self, ticket: Ticket, batch: RequestId | None, error: PSError) -> None:
        """A push is refused: its number is done, its batch over, and a retry gets the same error.

        A late copy leaves what is known of later requests.

        Args:
            ticket: ticket of the push.
            batch: the lookup that the rows were trained from; None: none.
            error: why.

        Raises:
            StaleGeneration, PSError: as Gate.begin.
        """
        with self._gate.changed:
            if self._gate.is_to_do(ticket):
                ticket.refuse(error)
                ticket.complete()
            self.end_batch(batch)

    def _why_recalled(self, hybrid: Hybrid, batch: RequestId) -> PSError:
        try:
            hybrid.admit(batch.worker)
        except PSError as error:
            return error
        return ServerPhaseError(
            f"worker {batch.worker} has left while its lookup waited; look up again"
        )


@contextlib.contextmanager
def refusing(ticket: Ticket) -> Iterator[None]:
    """Remember what ends a request here; its caller holds the gate's lock.

    Else a copy that is still under way would be taken once its worker has joined, and wait at the
    barrier instead of the push that the worker sends next.
    """
    try:
        yield
    except PSError as error:
        ticket.refuse(error)
        raise
