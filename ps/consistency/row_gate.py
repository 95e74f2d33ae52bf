"""The gate's part for tables: whose gradients of rows are taken, and which lookups wait.

Covers: permits of hybrid mode, the end of a push of rows in every mode.
Does not: decide (ps.consistency.hybrid), hold rows (ps.tables.table), apply them
(ps.server.table_handlers).
Threads: any; the gate's `changed` guards everything.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from ps.consistency.hybrid import Hybrid
from ps.consistency.lookups import no_permit
from ps.consistency.policy import Policy
from ps.errors import PhaseError, PSError, SettingsError
from ps.exactly_once import AppliedRecord, RequestId, Verdict
from ps.manifest.manifest import WorkerRank

if TYPE_CHECKING:
    from ps.consistency.gate import Gate


class RowGate:
    """Serialises what workers do to the rows of one shard.

    Args:
        gate: of the shard.
        policy: decides; only hybrid lets a lookup wait.
        record: remembers.
    """

    def __init__(self, gate: Gate[Any], policy: Policy, record: AppliedRecord) -> None:
        self._gate = gate
        self._policy = policy
        self._hybrid = policy if isinstance(policy, Hybrid) else None
        self._record = record

    def look_up(
        self,
        batch: RequestId,
        still_open: Collection[int],
        deadline_s: float,
        is_gone: Callable[[], bool],
    ) -> None:
        """Wait until a batch may have its rows.

        Args:
            batch: the name of its lookup.
            still_open: see ps.consistency.hybrid.
            deadline_s: monotonic.
            is_gone: whether nobody waits for the answer any more.

        Raises:
            RequestTimeout: not before `deadline_s`; the worker's older batches are still under way.
            PeerGone: the sender is gone; its retry stands in line anew.
            PSError: the worker has left, was replaced or lost, or the gate is closed.
        """
        gate, hybrid = self._gate, self._hybrid
        with gate.changed:
            if hybrid is None or gate.begin(batch)[0] is Verdict.REPEATED:
                return
            with gate.lookups.entered(batch) as wait:
                try:
                    with gate.refusing(batch):
                        actions = hybrid.on_lookup(batch, still_open)
                    gate.execute(actions)
                    while not wait.is_granted:
                        gate.refuse_closed()
                        self._record.refuse_stale(batch.worker, batch.incarnation)
                        if wait.is_recalled:
                            with gate.refusing(batch):
                                raise self._why_recalled(hybrid, batch)
                        if time.monotonic() >= deadline_s:
                            raise no_permit(batch.worker, hybrid.permits.bound)
                        gate.pause(deadline_s, batch.worker, is_gone)
                finally:
                    if wait.num_copies == 1:
                        gate.execute(hybrid.on_lookup_ended(batch))
            self._record.complete(batch)

    def permits_of(self, worker: WorkerRank) -> frozenset[RequestId]:
        """The worker's batches that are under way; none where lookups need no permit."""
        with self._gate.changed:
            return self._hybrid.permits.held(worker) if self._hybrid else frozenset()

    def admit(self, request: RequestId, batch: RequestId | None) -> None:
        """Refuse gradients that may not be applied now; others are, as they arrive.

        Raises:
            PhaseError, WorkerLost: as for a push to the groups.
            SettingsError: hybrid: they are of no batch, so nothing bounds how old they are.
        """
        with self._gate.changed, self._gate.refusing(request):
            self._policy.admit(request.worker)
        if batch is None and self._hybrid is not None:
            raise SettingsError(
                "hybrid takes gradients of rows only for a batch that was looked up to train on; "
                "use tables.batch(ids) and its push()"
            )

    def applied(self, request: RequestId, batch: RequestId | None) -> bool:
        """A push is done, and its batch over; False when that was known."""
        with self._gate.changed:
            self._gate.taken(request)
            if self._gate.begin(request)[0] is Verdict.REPEATED:
                return False
            self._record.complete(request)
            self._end(batch)
            return True

    def refused(self, request: RequestId, batch: RequestId | None, error: PSError) -> None:
        """A push is refused: its number is done, its batch over, and a retry hears why."""
        with self._gate.changed:
            self._gate.refuse_unstaged(request, error)
            self._end(batch)

    def _end(self, batch: RequestId | None) -> None:
        if batch is not None and self._hybrid is not None:
            self._gate.execute(self._hybrid.on_batch_over(batch))

    def _why_recalled(self, hybrid: Hybrid, batch: RequestId) -> PSError:
        try:
            hybrid.admit(batch.worker)
        except PSError as error:
            return error
        return PhaseError(f"worker {batch.worker} has left while its lookup waited; look up again")
