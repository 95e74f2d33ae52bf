"""Between the pure decisions and the threads: one lock, the waits, and the execution of actions.

Covers: exactly-once verdicts, waiting with deadlines, membership, the order of what happens.
Does not: say how a push's wait ends (ps.consistency.waiting), read sockets or hold parameters;
reducing is a callable that the shard gives.
Threads: any. `changed` guards record, policy and waiting pushes;
a reduction runs under it, so between two clocks nobody sees half of an update.

[merged ps/consistency/gate.py] The gate's part for tables: whose gradients of rows are taken, and
which lookups wait.

Covers: permits of hybrid mode, the end of a push of rows in every mode.
Does not: decide (ps.consistency.hybrid), hold rows (ps.tables.table), apply them
(ps.server.table_handlers).
Threads: any; the gate's `changed` guards everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic

from ps.consistency.hybrid import Hybrid
from ps.consistency.policy import (
    Action,
    Drop,
    Grant,
    Policy,
    PushDecision,
    RecallLookups,
    Reduce,
    Release,
    Undo,
)
from ps.consistency.recovery import ClockRecovery
from ps.consistency.staleness import StalenessTracker
from ps.consistency.waiting import (
    Contributions,
    Gradient,
    PendingPush,
    WaitingLookups,
    WaitingPushes,
    no_permit,
    still_waits,
)
from ps.errors import (
    NonFiniteGradient,
    PSError,
    PSSettingsError,
    ServerError,
    ServerGone,
    ServerPhaseError,
)
from ps.exactly_once import CompletionLog, RequestId, Verdict
from ps.manifest.manifest import WorkerRank


class RowGate:
    """Serialises what workers do to the rows of one shard.

    Args:
        gate: of the shard.
        policy: decides; only hybrid lets a lookup wait.
        record: remembers.
    """

    def __init__(self, gate: Gate[Any], policy: Policy, record: CompletionLog) -> None:
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
            ServerGone: the sender is gone; its retry stands in line anew.
            PSError: the worker has left, was replaced or lost, or the gate is closed.
        """
        gate, hybrid = self._gate, self._hybrid
        with gate.changed:
            if hybrid is None or gate.begin(batch)[0] is Verdict.DUPLICATE:
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
            ServerPhaseError, WorkerLost: as for a push to the groups.
            PSSettingsError: hybrid: they are of no batch, so nothing bounds how old they are.
        """
        with self._gate.changed, self._gate.refusing(request):
            self._policy.admit(request.worker)
        if batch is None and self._hybrid is not None:
            raise PSSettingsError(
                "hybrid takes gradients of rows only for a batch that was looked up to train on; "
                "use tables.batch(ids) and its push()"
            )

    def applied(self, request: RequestId, batch: RequestId | None) -> bool:
        """A push is done, and its batch over; False when that was known."""
        with self._gate.changed:
            self._gate.mark_applied(request)
            if self._gate.begin(request)[0] is Verdict.DUPLICATE:
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
        return ServerPhaseError(
            f"worker {batch.worker} has left while its lookup waited; look up again"
        )


_logger = logging.getLogger(__name__)

Event = Callable[[Policy, WorkerRank], list[Action]]

_CHECK_PEER_S = 0.25
"""How often a waiting push looks whether its sender is still there; costs one poll() each."""


class Gate(Generic[Gradient]):
    """Serialises what workers do to one shard.

    Args:
        policy: decides; see ps.consistency.asp.
        record: remembers; see ps.exactly_once.
        reduce: applies the staged gradients, in the given order, as one update.
        on_applied: told once for every push that has become part of the parameters.
        on_failed: told why the shard cannot go on.
    """

    def __init__(
        self,
        policy: Policy,
        record: CompletionLog,
        reduce: Callable[[Contributions[Gradient]], None],
        on_applied: Callable[[PendingPush[Gradient]], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._policy = policy
        self._record = record
        self._reduce = reduce
        self._on_failed = on_failed
        self._views = StalenessTracker(policy.clock)
        self._waiting: WaitingPushes[Gradient] = WaitingPushes(record, self._views, on_applied)
        self.lookups = WaitingLookups()
        self.rows = RowGate(self, policy, record)
        self._arriving: set[WorkerRank] = set()
        """Whose push is being applied bucket by bucket; a cut one stays here until its retry."""
        self._forgotten = ClockRecovery(policy, record, self._waiting)
        self._closed: PSError | None = None
        self.on_moved: Callable[[], None] = lambda: None
        """Called under the lock when clock or parameters may have changed."""

    @property
    def clock(self) -> int:
        """Updates so far."""
        return self._policy.clock

    @property
    def waiting(self) -> frozenset[RequestId]:
        """The pushes that are not answered yet."""
        with self.changed:
            return self._waiting.requests

    def clock_of(self, worker: WorkerRank) -> int:
        """Where a worker stands; see ps.consistency.policy."""
        with self.changed:
            return self._policy.clock_of(worker)

    def missing(self) -> tuple[WorkerRank, ...]:
        """The workers that others wait for."""
        with self.changed:
            return self._policy.missing()

    def begin(
        self,
        request: RequestId,
        acknowledged: int = 0,
        acked_clock: int = 0,
        *,
        is_push: bool = False,
    ) -> tuple[Verdict, PendingPush[Gradient] | None]:
        """Say what a changing request is, and find it if it already waits at the barrier.

        Args:
            request: its name.
            acknowledged: the last request that the session was told is done.
            acked_clock: the newest clock that its worker was told; 0: none yet.
            is_push: it is meant for one clock; after a restore that clock may be past.

        Raises:
            StaleIncarnation, SequenceGap: see ps.exactly_once.
            PSError: what this very request was refused with before, unless it still waits.
        """
        with self.changed:
            self.refuse_closed()
            verdict = self._record.begin(request, acknowledged)
            self._drop_replaced(request.worker)
            if self._record.is_restored:
                was_done = verdict is Verdict.DUPLICATE
                news = self._forgotten.learn(
                    request.worker, acked_clock, counts=is_push and was_done
                )
                if news is not None:
                    self.execute(news)
                if is_push and not was_done and self._forgotten.is_past(request, acked_clock):
                    self._record.give_up(request)
                    return Verdict.DUPLICATE, None
            return verdict, self._waiting.find(request)

    def admit(self, request: RequestId) -> PushDecision:
        """Whether to apply a gradient as it arrives or to stage it.

        Raises:
            ServerPhaseError, WorkerLost: neither; every copy of it hears the same.
        """
        with self.changed, self.refusing(request):
            admission = self._policy.admit(request.worker)
            if admission is not PushDecision.STAGE:
                self._arriving.add(request.worker)
            return admission

    @contextlib.contextmanager
    def refusing(self, request: RequestId) -> Iterator[None]:
        """Remember what ends a request here; its caller holds `changed`.

        Else a copy that is still under way would be taken once its worker has joined, and stand at
        the barrier in the place of the push that the worker sends next.
        """
        try:
            yield
        except PSError as error:
            self._waiting.refuse(request, error)
            raise

    def staleness_of(self, worker: WorkerRank, lag: int = 0) -> int:
        """Updates by others that the worker's gradient lacks, those that arrive just now included.

        Args:
            worker: its rank.
            lag: see ps.consistency.staleness.
        """
        with self.changed:
            arriving = len(self._arriving - {worker})
            return self._views.staleness(worker, self._policy.clock + arriving, lag)

    def pulled(self, worker: WorkerRank, clock: int) -> None:
        """Note which clock's parameters the worker has got."""
        with self.changed:
            self._views.pulled(worker, clock)

    def arrive(self, arrival: PendingPush[Gradient]) -> PendingPush[Gradient]:
        """A push is completely here: let the policy decide and execute what it decides.

        Returns:
            The arrival to wait for; another object if a copy of the same push was faster, and then
            the given one is not kept.
        """
        with self.changed:
            if arrival.is_changing:
                self.mark_applied(arrival.id)
            verdict, earlier = self.begin(arrival.id)
            if earlier is not None:
                return earlier
            if verdict is Verdict.DUPLICATE:
                return dataclasses.replace(arrival, gradient=None, clock=self._policy.clock)
            self._enter(arrival)
        return arrival

    def mark_applied(self, request: RequestId) -> None:
        """All of it was applied as it arrived, though a copy may have been refused meanwhile."""
        self._record.refuse(request, None)

    def refuse(
        self, arrival: PendingPush[Gradient], error: PSError
    ) -> PendingPush[Gradient] | None:
        """A push is refused for what is in it; it counts as present, without gradient.

        So barriers stay whole and all servers agree on the clocks, though one refused its part.

        Returns:
            What waits in its place, which ends with `error`; until then its worker should not push
            again. None: the session has gone on to a later request.

        Raises:
            StaleIncarnation: the worker was replaced; nothing counts.
            PSError: it was refused before, and that is over; or the gate is closed.
        """
        with self.changed:
            verdict, earlier = self.begin(arrival.id)
            if earlier is not None or verdict is Verdict.DUPLICATE:
                return earlier
            self._waiting.refuse(arrival.id, error)
            null = dataclasses.replace(arrival, hyper=None, gradient=None)
            self._enter(null)
            return null

    def refuse_unstaged(self, request: RequestId, error: PSError) -> None:
        """A request that no worker waits for is refused: its number is done, a retry hears why.

        A late copy leaves what is known of later requests.

        Raises:
            StaleIncarnation, PSError: as `begin`.
        """
        with self.changed:
            if self.begin(request)[0] is Verdict.DUPLICATE:
                return
            self._waiting.refuse(request, error)
            self._record.complete(request)

    def wait(
        self, arrival: PendingPush[Gradient], deadline_s: float, is_gone: Callable[[], bool]
    ) -> int:
        """Wait until the push is part of a clock.

        Returns:
            That clock.

        Raises:
            RequestTimeout: not before `deadline_s` (monotonic); names the missing workers.
            ServerGone: the sender is gone; its push stays staged for its retry.
            PSError: why the barrier broke.
        """
        with self.changed:
            while not arrival.is_done:
                if time.monotonic() >= deadline_s:
                    raise still_waits(self._policy.clock, self._policy.missing())
                self.pause(deadline_s, arrival.id.worker, is_gone)
            if arrival.error is not None:
                raise arrival.error
            return arrival.clock or 0

    def change(
        self,
        request: RequestId,
        event: Event,
        acknowledged: int = 0,
        *,
        acked_clock: int = 0,
        leaves: bool = False,
    ) -> bool:
        """Execute a membership event once; False when this request was executed before.

        Nobody waits for anybody at a closed gate, so there a worker that `leaves` is just let go.
        """
        with self.changed:
            if leaves and self._closed is not None:
                return False
            verdict, _ = self.begin(request, acknowledged, acked_clock)
            if verdict is Verdict.DUPLICATE:
                return False
            if leaves:
                self._arriving.discard(request.worker)
            self.execute(event(self._policy, request.worker))
            self._record.complete(request)
            return True

    def finished(self, worker: WorkerRank) -> None:
        """The worker is done for good, as it said before there was a shard, or others know."""
        with self.changed:
            if self._closed is None:  # else nobody waits any more
                self.execute(self._policy.on_finish(worker))

    def fence(self, worker: WorkerRank, least_incarnation: int) -> None:
        """Refuse older incarnations of the worker from now on, also in the middle of a push."""
        with self.changed:
            self._record.fence(worker, least_incarnation)
            self._drop_replaced(worker)
            self.changed.notify_all()  # its lookups hear that they are fenced

    def refuse_stale(self, worker: WorkerRank, incarnation: int) -> None:
        """Raise StaleIncarnation unless this incarnation of the worker may still act."""
        with self.changed:
            self._record.refuse_stale(worker, incarnation)

    def lose(self, worker: WorkerRank, incarnation: int | None = None) -> bool:
        """The worker is gone: fence what is left of it and let the policy decide about the others.

        Args:
            worker: its rank.
            incarnation: the one that is gone, the newest known if None. Nothing happens when a
                newer one is at work already.

        Returns:
            Whether anything happened.
        """
        with self.changed:
            known = self._record.incarnation_of(worker)
            lost = known if incarnation is None else incarnation
            if lost < known:
                return False
            self._record.fence(worker, lost + 1)
            self._arriving.discard(worker)
            if self._closed is None:  # else nobody waits any more
                self.execute(self._policy.on_lost(worker))
                self._drop_replaced(worker)  # also what it had pushed before it left
            return True

    @contextlib.contextmanager
    def between_clocks(self) -> Iterator[int]:
        """Hold all barriers open: no reduction runs meanwhile. Yields the clock."""
        with self.changed:
            yield self._policy.clock
            self.on_moved()
            self.changed.notify_all()

    def close(self, error: PSError) -> None:
        """End all waits, with `error` where nothing was applied; later requests get it too."""
        with self.changed:
            self._closed = error
            self._waiting.close(error, self._policy.clock)
            self.changed.notify_all()

    def _drop_replaced(self, worker: WorkerRank) -> None:
        """Let nothing wait that an attempt of the worker has pushed which is fenced by now.

        Else it would stand in the barrier for the newer attempt, whose own push had no place.
        """
        if self._waiting.has_fenced(worker):
            self._arriving.discard(worker)
            self.execute(self._policy.on_replaced(worker))

    def _enter(self, arrival: PendingPush[Gradient]) -> None:
        self._arriving.discard(arrival.id.worker)
        is_null = arrival.hyper is None
        with self.refusing(arrival.id):
            actions = self._policy.on_push(arrival.id.worker, arrival.rows, null=is_null)
        self._waiting.enter(arrival)
        self.execute(actions)

    def pause(self, deadline_s: float, worker: WorkerRank, is_gone: Callable[[], bool]) -> None:
        """Wait for a change, but not longer than until the sender is to be looked after."""
        if is_gone():
            raise ServerGone(f"worker {worker} closed its connection while waiting")
        self.changed.wait(max(0.0, min(deadline_s - time.monotonic(), _CHECK_PEER_S)))

    def refuse_closed(self) -> None:
        """Raise what the gate was closed with."""
        if self._closed is not None:
            raise self._closed

    def execute(self, actions: Sequence[Action]) -> None:
        """Do what the policy has decided; call it while holding `changed`."""
        for action in actions:
            if isinstance(action, Reduce):
                self._reduce_staged(action)
            elif isinstance(action, Release):
                self._waiting.release(action)
            elif isinstance(action, Undo):
                self._waiting.undo(action)
            elif isinstance(action, Drop):
                self._waiting.drop(action)
            elif isinstance(action, Grant):
                self.lookups.grant(action)
            elif isinstance(action, RecallLookups):
                self.lookups.recall(action)
            else:
                self._waiting.break_up(action)
        self.on_moved()
        self.changed.notify_all()

    def _reduce_staged(self, action: Reduce) -> None:
        staged = self._waiting.staged(action)
        try:
            self._reduce(staged)
        except NonFiniteGradient as error:  # finite gradients whose sum is not
            self._waiting.fail(staged, error)
        except Exception as error:  # whatever it is, the waiting workers must hear of it
            _logger.exception("reducing clock %d failed", self._policy.clock)
            reason = f"reducing clock {self._policy.clock} failed: {type(error).__name__}: {error}"
            self.close(ServerError(reason))
            self._on_failed(reason)
            raise
