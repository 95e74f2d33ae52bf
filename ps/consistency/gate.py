"""The gate of a shard: one lock around record and policy, and the execution of what they decide.

Covers: exactly-once verdicts, membership, fences and losses, the order of what happens.
Does not: say whose rows are taken (ps.consistency.row_gate) or how a push's wait ends
(ps.consistency.waiting), read sockets or hold parameters: the shard's `Updates` apply what is
decided.
Runs in: PS processes.
Threads: any. `changed` guards record, policy and waiting pushes; a reduction runs under it, so
between two clocks nobody sees half of an update. Each push and each lookup waits on a condition of
its own with that lock, which its end notifies: an action, a fence, the gate's end. On `changed`
itself a snapshot waits (ps.server.snapshot_trigger). Lock order: `changed`, then one bucket's.

    begin_push   before a gradient is read: ticket, decision, staleness
    arrive       after it: the policy decides, and that is executed
    wait         until the push has its clock or its error
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from ps.consistency.policy import (
    Action,
    Drop,
    Grant,
    Policy,
    PushDecision,
    RecallLookups,
    Reduce,
    Release,
)
from ps.consistency.recovery import ClockRecovery
from ps.consistency.staleness import StalenessTracker
from ps.consistency.waiting import (
    Gradient,
    PendingPush,
    Updates,
    WaitingLookups,
    WaitingPushes,
    still_waits,
)
from ps.consistency.waits import Waited, wait_until
from ps.errors import PSError, PushError, ServerError, ServerGone
from ps.exactly_once import CompletionLog, RequestId, Ticket, Verdict
from ps.manifest.manifest import WorkerRank

_logger = logging.getLogger(__name__)

Event = Callable[[Policy, WorkerRank], list[Action]]


class Gate(Generic[Gradient]):
    """Serialises what workers do to one shard.

    A push goes through it twice: `begin_push` before its gradient is read, `arrive` after. Both
    work on one object, which holds what the record and the policy have said of it.

    Args:
        policy: decides; see ps.consistency.modes.
        log: remembers; see ps.exactly_once.
        updates: does to the parameters what was decided.
    """

    def __init__(self, policy: Policy, log: CompletionLog, updates: Updates[Gradient]) -> None:
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._policy = policy
        self._log = log
        self._updates = updates
        self._tracker = StalenessTracker(policy.clock)
        self._waiting: WaitingPushes[Gradient] = WaitingPushes(log, self._tracker, updates)
        self.lookups = WaitingLookups(self._new_bell)
        self._arriving: dict[int, PendingPush[Gradient]] = {}
        """Pushes by id() that a thread reads and applies bucket by bucket."""
        self._recovery = ClockRecovery(policy, self._waiting)
        self._away: set[WorkerRank] = set()
        """Lost workers of which no newer attempt has come yet; see take_back."""
        self._closed: PSError | None = None

    @property
    def clock(self) -> int:
        """Updates so far."""
        return self._policy.clock

    @property
    def waiting(self) -> frozenset[RequestId]:
        """The pushes that are not answered yet."""
        with self.changed:
            return frozenset(self._waiting.pushes)

    def clock_of(self, worker: WorkerRank) -> int:
        """A worker's own clock; see ps.consistency.policy."""
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
        acked_updates: int = 0,
    ) -> Ticket:
        """Say what a changing request is, unless it is a push to the groups.

        Args:
            request: its name.
            acknowledged: the last request whose ack the session has.
            acked_clock: the newest clock that its worker has an ack of; 0: none yet.
            acked_updates: how many of the requests whose ack it has have changed parameters.

        Raises:
            StaleGeneration, SequenceGap, PSSettingsError: see ps.exactly_once.
            PSError: what this very request was refused with before.
        """
        with self.changed:
            ticket = self._begin(request, acknowledged, acked_updates)
            if self._log.is_restored:
                self._recover(request.worker, acked_clock)
            if (refusal := ticket.refusal) is not None:
                raise refusal
            return ticket

    def begin_push(
        self,
        push: PendingPush[Gradient],
        acknowledged: int = 0,
        acked_updates: int = 0,
        lag: int = 0,
    ) -> PendingPush[Gradient] | None:
        """Begin a push to the groups, and decide what to do with its gradient.

        Args:
            push: it is meant for one clock; after a restore that clock may be past.
            acknowledged: see `begin`.
            acked_updates: see `begin`.
            lag: see ps.consistency.staleness.

        Returns:
            None: go on with it, as its `decision` says, and let it `arrive`. Else it is known: what
            to answer it with, once that is done.

        Raises:
            StaleGeneration, SequenceGap, PSError: as `begin`; of a push that waits no more.
            ServerPhaseError, WorkerLost: its worker may not push; every copy gets the same error.
        """
        with self.changed:
            worker = push.id.worker
            push.ticket = ticket = self._begin(push.id, acknowledged, acked_updates)
            if self._log.is_restored:
                self._recover_push(push)
            waiting = self._waiting.pushes.get(push.id)
            if waiting is not None:
                return waiting
            if ticket.session.refusal is not None and (refusal := ticket.refusal) is not None:
                raise refusal
            if ticket.verdict is Verdict.DUPLICATE:
                push.staleness = self.staleness_of(worker, lag)
                push.clock = self._policy.clock
                return push
            try:
                self.take_back(worker)
                push.decision = self._policy.admit(worker)
            except PSError as error:
                ticket.refuse(error)
                raise
            if self._recovery.is_late(push):
                self._give_up(push)
                push.clock = self._policy.clock
                return push
            if push.decision is not PushDecision.STAGE:
                self._arriving[id(push)] = push
                if push.metadata is not None:
                    ticket.attach(push.metadata)
            # After the admission, so that two pushes that arrive together each see the other.
            push.staleness = self.staleness_of(worker, lag)
            return None

    def staleness_of(self, worker: WorkerRank, lag: int = 0) -> int:
        """Updates by others that the worker's gradient lacks, those that arrive just now included.

        Args:
            worker: its rank.
            lag: see ps.consistency.staleness.
        """
        with self.changed:
            others = {push.id.worker for push in self._arriving.values()} - {worker}
            return self._tracker.staleness(worker, self._policy.clock + len(others), lag)

    def stop_arriving(self, push: PendingPush[Gradient]) -> None:
        """A push that began does not arrive: its connection was cut, or it is refused.

        Its sender may be dead. A retry begins from the start.
        """
        with self.changed:
            self._arriving.pop(id(push), None)

    def pulled(self, worker: WorkerRank, clock: int) -> None:
        """Note which clock's parameters the worker has got.

        Args:
            worker: rank.
            clock: clock of the parameters that were sent.
        """
        with self.changed:
            self._tracker.pulled(worker, clock)

    def is_to_do(self, ticket: Ticket, *, is_applied: bool = False) -> bool:
        """Whether a request that began is still to be done; call it while holding `changed`.

        Args:
            ticket: ticket of the request.
            is_applied: it has changed all that it does; then it counts at a closed gate, too.

        Raises:
            StaleGeneration, PSError: as `begin`.
        """
        if self._closed is not None and not is_applied:
            raise self._closed.again()
        session, sequence = ticket.session, ticket.id.sequence
        if session.ended is not None:
            raise session.ended.again()
        if session.refusal is not None and (refusal := ticket.refusal) is not None:
            raise refusal
        return sequence > session.completed and sequence >= session.sequence

    def arrive(self, push: PendingPush[Gradient]) -> PendingPush[Gradient]:
        """A push that began is completely here: the policy decides, and that is executed.

        Returns:
            The push to wait for; another object if a copy of the same push was faster, and then the
            given one is not kept.
        """
        with self.changed:
            waiting = self._waiting.pushes.get(push.id)
            if push.hyper is not None and push.gradient is None:
                # All of it was applied as it arrived, though a copy may have been refused since.
                push.ticket.refuse(None)
            if waiting is not None:
                self.refuse_closed()
                push.ticket.check()
                return waiting
            if not self._still_counts(push):
                late = dataclasses.replace(push, gradient=None, clock=self._policy.clock)
                late.ticket = push.ticket
                return late
            self._enter(push)
            if self._closed is not None:  # it was applied before, and waits for nobody
                self._waiting.close(self._closed, self._policy.clock)
        return push

    def refuse(self, push: PendingPush[Gradient], error: PSError) -> PendingPush[Gradient] | None:
        """A push is refused for what is in it; it counts as present, without gradient.

        So barriers stay whole and all servers agree on the clocks, though one refused its part.

        Args:
            push: begun before.
            error: what the sender gets.

        Returns:
            What waits in its place, which ends with `error`; until then its worker should not push
            again. None: the session has gone on to a later request.

        Raises:
            StaleGeneration: the worker was replaced; nothing counts.
            PSError: it was refused before, and that is over; or the gate is closed.
        """
        with self.changed:
            waiting = self._waiting.pushes.get(push.id)
            if waiting is not None:
                self.refuse_closed()
                push.ticket.check()
                return waiting
            push.hyper = push.gradient = None
            if not self._still_counts(push):
                return None
            push.ticket.refuse(error)
            self._enter(push)
            return push

    def wait(
        self, push: PendingPush[Gradient], deadline_s: float, is_gone: Callable[[], bool]
    ) -> int:
        """Wait until the push is part of a clock.

        Args:
            push: arrived before.
            deadline_s: monotonic seconds.
            is_gone: whether the sender's connection has ended.

        Returns:
            That clock.

        Raises:
            RequestTimeout: not before `deadline_s` (monotonic); names the missing workers.
            ServerGone: the sender is gone; its push stays staged for its retry.
            PSError: why the barrier broke.
        """
        with self.changed:
            if push.ended is None:
                push.ended = self._new_bell()
            waited = wait_until(push.ended, lambda: push.is_done, deadline_s, is_gone)
            if waited is Waited.OVERDUE:
                raise still_waits(self._policy.clock, self._policy.missing())
            if waited is Waited.GONE:
                raise sender_gone(push.id.worker)
            if push.error is not None:
                raise push.error.again()  # each waiting thread adds its own traceback
            return push.clock or 0

    def has_lost(self, push: PendingPush[Gradient]) -> bool:
        """Whether nothing is known any more of the clock that an answered push was for.

        Takes no lock: an answered push changes no more, and no member is ahead of its barrier.
        """
        return self._recovery.has_lost(push)

    def change(
        self,
        request: RequestId,
        event: Event,
        acknowledged: int = 0,
        acked_clock: int = 0,
        acked_updates: int = 0,
        *,
        leaves: bool = False,
    ) -> bool:
        """Execute a membership event once; False when this request was executed before.

        Nobody waits for anybody at a closed gate, so there a worker that `leaves` is just let go.

        Args:
            request: identifies the event.
            event: what the policy does.
            acknowledged: last request that the session knows to be done.
            acked_clock: newest clock that the worker has got; 0: none.
            acked_updates: see `begin`.
            leaves: whether the worker leaves or finishes.
        """
        with self.changed:
            if leaves and self._closed is not None:
                return False
            ticket = self.begin(request, acknowledged, acked_clock, acked_updates)
            if ticket.verdict is Verdict.DUPLICATE:
                return False
            if leaves:
                self._forget_arriving(request.worker)
            self._away.discard(request.worker)
            self.execute(event(self._policy, request.worker))
            ticket.complete()
            return True

    def take_back(self, worker: WorkerRank) -> None:
        """Make a lost worker a member again, as a newer attempt of it trains; hold `changed`.

        The attempt has joined all servers, but one that was started again since does not know it.
        Until then it waits for nobody: the attempt may have no rows yet.

        Raises:
            ServerPhaseError, WorkerLost: see Policy.on_join.
        """
        if worker in self._away:
            self._away.discard(worker)
            self.execute(self._recovery.rejoin(worker))

    def finished(self, worker: WorkerRank) -> None:
        """The worker is done for good, as it said before there was a shard, or others know."""
        with self.changed:
            if self._closed is None:  # else nobody waits any more
                self.execute(self._policy.on_finish(worker))

    def fence(self, worker: WorkerRank, least_generation: int) -> None:
        """Refuse older generations of the worker from now on, also in the middle of a push.

        Args:
            worker: rank.
            least_generation: the oldest that is not refused.
        """
        with self.changed:
            self._log.fence(worker, least_generation)
            self._drop_replaced(worker)
            self.lookups.look(worker)  # they end with StaleGeneration

    def hear(self, worker: WorkerRank, generation: int) -> None:
        """Note that this process of the worker is at work: the older ones are replaced.

        Args:
            worker: rank.
            generation: generation of the process that asks.

        Raises:
            StaleGeneration: it was replaced or lost itself.
        """
        with self.changed:
            self._log.hear(worker, generation)
            if generation:  # a first attempt replaces nobody
                self._drop_replaced(worker)

    def lose(self, worker: WorkerRank, generation: int | None = None) -> bool:
        """The worker is gone: fence what is left of it and let the policy decide about the others.

        Nobody waits for its newer attempt before that trains: see take_back.

        Args:
            worker: its rank.
            generation: the one that is gone, the newest known if None. Nothing happens when a
                newer one is at work already.

        Returns:
            Whether anything happened.
        """
        with self.changed:
            known = self._log.generation_of(worker)
            lost = known if generation is None else generation
            if lost < known:
                self._await_rows(worker, lost)
                return False
            self._log.fence(worker, lost + 1)
            self._away.add(worker)
            self._forget_arriving(worker)
            if self._closed is None:  # else nobody waits any more
                self.execute(self._policy.on_lost(worker))
                self._drop_replaced(worker)  # also what it had pushed before it left
            return True

    def _await_rows(self, worker: WorkerRank, lost: int) -> None:
        """A newer attempt than the lost one is heard of: wait for it once it trains, not before."""
        is_here = self._log.has_session(worker, lost + 1)
        if self._closed is None and self._policy.outlives_workers and not is_here:
            self._away.add(worker)
            self.execute(self._policy.on_leave(worker))

    @contextlib.contextmanager
    def between_clocks(self) -> Iterator[int]:
        """Hold all barriers open: no reduction runs meanwhile. Yields the clock."""
        with self.changed:
            yield self._policy.clock
            self._updates.moved()

    def close(self, error: PSError) -> None:
        """End all waits, with `error` where nothing was applied; later requests get it too."""
        with self.changed:
            self._closed = error
            self._waiting.close(error, self._policy.clock)
            self.lookups.look()
            self.changed.notify_all()  # a snapshot that waits for its clock

    def refuse_closed(self) -> None:
        """Raise what the gate was closed with."""
        if self._closed is not None:
            raise self._closed.again()

    def execute(self, actions: Sequence[Action]) -> None:
        """Do what the policy has decided; call it while holding `changed`."""
        for action in actions:
            if isinstance(action, Release):
                self._waiting.release(action)
            elif isinstance(action, Reduce):
                self._reduce_staged(action)
            elif isinstance(action, Drop):
                self._waiting.drop(action)
            elif isinstance(action, Grant):
                self.lookups.grant(action)
            elif isinstance(action, RecallLookups):
                self.lookups.recall(action)
            else:
                self._waiting.break_up(action)
        self._updates.moved()

    def _new_bell(self) -> threading.Condition:
        """A condition for one wait: one for all waits would wake all of them at every arrival."""
        return threading.Condition(self._lock)

    def _begin(self, request: RequestId, acknowledged: int, acked_updates: int) -> Ticket:
        self.refuse_closed()
        ticket = self._log.begin(request, acknowledged, acked_updates)
        if request.generation:  # a first attempt replaces nobody
            self._drop_replaced(request.worker)
        return ticket

    def _recover(self, worker: WorkerRank, clock: int) -> None:
        """After a restore: continue from a clock of which a worker has an ack."""
        actions = self._recovery.learn(worker, clock)
        if actions is not None:
            self.execute(actions)

    def _recover_push(self, push: PendingPush[Gradient]) -> None:
        """After a restore: as `_recover`, with the clock that a push is known to have reached."""
        ticket = push.ticket
        is_done = ticket.verdict is Verdict.DUPLICATE
        # The session's last push may have been completed before the save, without an ack. A late
        # copy of an older one says nothing: that may have been refused.
        counts = is_done and ticket.session.sequence == push.id.sequence
        self._recover(push.id.worker, push.acked_clock + counts)

    def _still_counts(self, push: PendingPush[Gradient]) -> bool:
        """Whether a push that began is still to be done. One that is late by now is given up.

        While its gradient was read another worker's push may have told of a clock that is undone.

        Raises:
            StaleGeneration, PSError: as `begin`.
        """
        is_applied = push.hyper is not None and push.gradient is None
        if not self.is_to_do(push.ticket, is_applied=is_applied):
            return False
        is_late = self._recovery.is_late(push)
        if is_late:
            self._give_up(push)
        return not is_late

    def _give_up(self, push: PendingPush[Gradient]) -> None:
        """Answer a push for a clock that is past as if it were known; nothing of it is applied."""
        self._log.give_up(push.ticket, is_update=push.hyper is not None)
        push.ticket.verdict = Verdict.DUPLICATE

    def _drop_replaced(self, worker: WorkerRank) -> None:
        """Let nothing wait that an attempt of the worker has pushed which is fenced by now.

        Else it would count in the barrier for the newer attempt, whose own push had no place.
        """
        if self._waiting.has_fenced(worker):
            self._forget_arriving(worker)
            self.execute(self._policy.on_replaced(worker))

    def _forget_arriving(self, worker: WorkerRank) -> None:
        for key, push in tuple(self._arriving.items()):
            if push.id.worker == worker:
                del self._arriving[key]

    def _enter(self, push: PendingPush[Gradient]) -> None:
        worker = push.id.worker
        self._forget_arriving(worker)  # with slower copies
        try:
            actions = self._policy.on_push(worker, push.rows, null=push.hyper is None)
        except PSError as error:
            push.ticket.refuse(error)
            raise
        self._recovery.entered(worker)
        self._waiting.enter(push)
        self.execute(actions)

    def _reduce_staged(self, action: Reduce) -> None:
        staged = self._waiting.staged(action)
        try:
            self._updates.reduce(staged, self._policy.clock)
        except PushError as error:  # finite gradients whose sum is not, or a full table
            self._waiting.fail(staged, error)
        except Exception as error:  # whatever it is, the waiting workers must get it
            _logger.exception("reducing clock %d failed", self._policy.clock)
            reason = f"reducing clock {self._policy.clock} failed: {type(error).__name__}: {error}"
            self.close(ServerError(reason))
            self._updates.failed(reason)
            raise


def sender_gone(worker: WorkerRank) -> ServerGone:
    """The error that ends a wait whose sender has disconnected; it is sent to nobody."""
    return ServerGone(f"worker {worker} closed its connection while waiting")
