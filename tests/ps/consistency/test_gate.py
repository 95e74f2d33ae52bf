"""Waiting, waking and failing behind the policy; gradients are plain numbers here."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

import pytest

from ps.consistency import waits
from ps.consistency.asp import ASP
from ps.consistency.bsp import BSP
from ps.consistency.gate import Event, Gate
from ps.consistency.hybrid import Hybrid
from ps.consistency.policy import OnLost, Policy, PushDecision
from ps.consistency.row_gate import LookupTurn, RowGate
from ps.consistency.ssp import SSP
from ps.consistency.waiting import PendingPush
from ps.errors import (
    NonFiniteGradient,
    RequestTimeout,
    ServerError,
    ServerGone,
    ServerPhaseError,
    StaleGeneration,
)
from ps.exactly_once import CompletionLog, RequestId, SessionRecord, Verdict
from ps.manifest.manifest import Hyper, WorkerRank
from tests.support.waiting import wait_until

HYPER = Hyper(0.1)
NEVER_GONE = bool
JOIN: Event = lambda policy, worker: policy.on_join(worker)  # noqa: E731
LEAVE: Event = lambda policy, worker: policy.on_leave(worker)  # noqa: E731


class Bench:
    """A gate over two workers that adds numbers."""

    def __init__(self, on_lost: OnLost = "fail", policy: Policy | None = None) -> None:
        self.reduced: list[list[float]] = []
        self.pushed: list[RequestId] = []
        self.failures: list[str] = []
        self.trouble: Exception | None = None
        self.barrier = BSP(2, on_lost=on_lost)
        self.record = CompletionLog(1)
        policy = policy or self.barrier
        self.gate: Gate[float] = Gate(policy, self.record, self)
        self.rows = RowGate(self.gate, policy)
        self.num_moves = 0

    def reduce(self, staged, clock: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.reduced.append([push.gradient for push in staged])

    def applied(self, push: PendingPush[float]) -> None:
        self.pushed.append(push.id)

    @property
    def workers(self) -> list[int]:
        """Whose pushes were applied."""
        return [name.worker for name in self.pushed]

    def moved(self) -> None:
        self.num_moves += 1

    def failed(self, reason: str) -> None:
        self.failures.append(reason)

    def arrival(
        self, worker: int, sequence: int = 1, *, acked_clock: int = 0
    ) -> PendingPush[float]:
        push = push_of(worker, sequence, acked_clock=acked_clock)
        self.gate.begin_push(push)
        return push


def push_of(
    worker: int, sequence: int = 1, generation: int = 0, *, acked_clock: int = 0, session: int = 1
) -> PendingPush[float]:
    name = RequestId(WorkerRank(worker), generation, session, sequence)
    return PendingPush(name, 1, HYPER, float(worker), acked_clock=acked_clock)


def arriving(worker: int, session: int = 1) -> PendingPush[float]:
    """A push whose buckets are changed as they arrive."""
    return PendingPush(RequestId(WorkerRank(worker), 0, session, 1), 1, HYPER)


def restored(clock: int, sequence: int) -> Bench:
    """A gate that goes on from a checkpoint in which both workers had done `sequence`."""
    bench = Bench()
    bench.record.restore(
        [SessionRecord(rank, 0, 1, (), sequence, sequence, 0) for rank in map(WorkerRank, (0, 1))]
    )
    bench.barrier.catch_up(clock)
    return bench


@pytest.mark.fault("F08")
@pytest.mark.parametrize("late", ["has arrived", "arrives", "is refused", "comes"])
def test_after_a_restore_a_push_of_an_undone_clock_does_not_wait_for_the_next(late: str):
    """Both had pushed number 2; only worker 0 was told of it before the server died at clock 2."""
    bench = restored(clock=1, sequence=1)
    ahead, behind = push_of(0, 3, acked_clock=2), push_of(1, 2, acked_clock=1)

    def come_ahead() -> PendingPush[float]:
        assert bench.gate.begin_push(ahead, 2, 2) is None
        return bench.gate.arrive(ahead)

    if late == "comes":
        staged = come_ahead()
        assert bench.gate.begin_push(behind, 1, 1) is behind
        assert behind.ticket.verdict is Verdict.DUPLICATE
    else:
        assert bench.gate.begin_push(behind, 1, 1) is None
        waiting = bench.gate.arrive(behind) if late == "has arrived" else None
        staged = come_ahead()  # while the gradient of the other is read
        if late == "is refused":
            assert bench.gate.refuse(behind, NonFiniteGradient("nan")) is None
        else:
            assert (waiting or bench.gate.arrive(behind)).clock == 2
    assert (bench.gate.clock, bench.reduced, staged.is_done) == (2, [], False)
    bench.gate.arrive(bench.arrival(1, 3, acked_clock=2))
    assert (bench.gate.clock, bench.reduced, staged.clock) == (3, [[0.0, 1.0]], 3)
    # Number 2 of both; one that is refused is no update.
    assert bench.record.lost_updates == (1 if late == "is refused" else 2)


@pytest.mark.fault("F08")
def test_after_a_restore_pushes_that_waited_together_go_on_together():
    bench = restored(clock=1, sequence=1)
    for worker in (0, 1):  # both were told of clock 5, and push their number 6 again
        push = push_of(worker, 6, acked_clock=5)
        assert bench.gate.begin_push(push, 5, 5) is None
        bench.gate.arrive(push)
    assert (bench.gate.clock, bench.reduced) == (6, [[0.0, 1.0]])
    assert bench.record.lost_updates == 8


@pytest.mark.fault("F08")
def test_after_a_restore_a_late_copy_of_a_refused_push_is_no_clock_of_its_worker():
    bench, worker = Bench(policy=SSP(2, 1)), WorkerRank(0)
    bench.record.restore([SessionRecord(worker, 0, 1, (3,), 0, 0, 0)])
    bench.gate.change(RequestId(worker, 0, 1, 4), LEAVE, 3, acked_clock=3, leaves=True)
    with pytest.raises(ServerPhaseError, match="has left"):
        bench.gate.begin_push(push_of(0, 5, acked_clock=3), 4)
    bench.gate.change(RequestId(worker, 0, 1, 6), JOIN, 4, acked_clock=3)
    copy = push_of(0, 5, acked_clock=3)
    assert bench.gate.begin_push(copy, 4) is copy
    assert bench.gate.clock_of(worker) == 3


def soon() -> float:
    return time.monotonic() + 10.0


def test_the_last_arrival_reduces_in_rank_order_and_wakes_the_others():
    bench = Bench()
    first = bench.gate.arrive(bench.arrival(1))
    clocks: list[int] = []
    waiting = threading.Thread(
        target=lambda: clocks.append(bench.gate.wait(first, soon(), NEVER_GONE))
    )
    waiting.start()
    last = bench.gate.arrive(bench.arrival(0))
    waiting.join(10.0)
    assert clocks == [1]
    assert last.clock == 1
    assert bench.reduced == [[0.0, 1.0]]
    assert bench.workers == [0, 1]


def test_a_copy_of_a_waiting_push_waits_for_the_same_arrival():
    bench = Bench()
    first = bench.gate.arrive(bench.arrival(0))
    copy = bench.arrival(0)
    assert bench.gate.arrive(copy) is first
    bench.gate.arrive(bench.arrival(1))
    assert bench.reduced == [[0.0, 1.0]]
    late = bench.gate.arrive(bench.arrival(0))
    assert late.is_done
    assert late.gradient is None
    assert bench.workers == [0, 1]


def test_a_wait_ends_at_its_deadline():
    bench = Bench()
    arrival = bench.gate.arrive(bench.arrival(0))
    with pytest.raises(RequestTimeout, match="worker 1"):
        bench.gate.wait(arrival, time.monotonic() + 0.01, NEVER_GONE)


def test_a_wait_ends_when_its_sender_is_gone_and_the_push_stays_staged():
    bench = Bench()
    arrival = bench.gate.arrive(bench.arrival(0))
    with pytest.raises(ServerGone):
        bench.gate.wait(arrival, soon(), lambda: True)
    bench.gate.arrive(bench.arrival(1))
    assert bench.reduced == [[0.0, 1.0]]


def test_a_failing_reduction_fails_the_shard_and_everybody_hears_of_it():
    bench = Bench()
    bench.trouble = ValueError("broken kernel")
    first = bench.gate.arrive(bench.arrival(0))
    with pytest.raises(ValueError, match="broken kernel"):
        bench.gate.arrive(bench.arrival(1))
    with pytest.raises(ServerError, match="broken kernel"):
        bench.gate.wait(first, soon(), NEVER_GONE)
    assert bench.failures == ["reducing clock 1 failed: ValueError: broken kernel"]
    with pytest.raises(ServerError):
        bench.gate.begin_push(push_of(0, 2))


def test_a_refused_reduction_is_the_pushers_error_and_training_can_go_on():
    bench = Bench()
    bench.trouble = NonFiniteGradient("overflow")
    pushes = [bench.gate.arrive(bench.arrival(worker)) for worker in (0, 1)]
    told = []
    for push in pushes:
        with pytest.raises(NonFiniteGradient, match="overflow") as raised:
            bench.gate.wait(push, soon(), NEVER_GONE)
        told.append(raised.value)
        with pytest.raises(NonFiniteGradient):
            bench.gate.begin_push(push_of(push.id.worker))  # its retry hears the same
    told[0].details["worker_clock"] = "7"  # as a server adds to the answer of one
    assert not told[1].details
    bench.trouble = None
    for worker in (0, 1):
        bench.gate.arrive(bench.arrival(worker, 2))
    assert bench.failures == []
    assert bench.workers == [0, 1]


def test_a_refused_push_is_present_once_however_often_it_comes():
    bench = Bench()
    refused = bench.arrival(0)
    for _ in range(2):
        bench.gate.refuse(refused, NonFiniteGradient("NaN"))
    bench.gate.arrive(bench.arrival(1))
    assert bench.reduced == [[1.0]]
    assert bench.workers == [1]


def test_close_ends_waits_and_later_requests():
    bench = Bench()
    arrival = bench.gate.arrive(bench.arrival(0))
    bench.gate.close(ServerPhaseError("DRAINING"))
    for ended in (
        partial(bench.gate.wait, arrival, soon(), NEVER_GONE),
        partial(bench.gate.begin_push, push_of(0)),
    ):
        with pytest.raises(ServerPhaseError, match="DRAINING"):
            ended()


def test_a_membership_event_is_executed_once():
    bench = Bench()
    leave = RequestId(WorkerRank(1), 0, 1, 1)
    assert bench.gate.change(leave, LEAVE)
    join = leave._replace(sequence=2)
    assert bench.gate.change(join, JOIN)
    assert not bench.gate.change(leave, LEAVE), "a late copy of the leave"
    assert bench.gate.missing() == (0, 1)


def test_no_reduction_happens_between_two_clocks():
    bench = Bench()
    bench.gate.arrive(bench.arrival(0))
    other = bench.arrival(1)
    with bench.gate.between_clocks() as clock:
        thread = threading.Thread(target=bench.gate.arrive, args=(other,))
        thread.start()
        thread.join(0.05)
        assert clock == 0
        assert bench.reduced == []
    thread.join(10.0)
    assert bench.reduced == [[0.0, 1.0]]


@pytest.mark.fault("F06")
def test_a_frozen_worker_that_was_dropped_hears_it_when_it_thaws():
    bench = Bench("continue")
    waiting = bench.gate.arrive(bench.arrival(1))
    assert bench.gate.lose(WorkerRank(1), 0)
    with pytest.raises(StaleGeneration, match="was replaced"):
        bench.gate.wait(waiting, time.monotonic(), NEVER_GONE)
    assert not bench.gate.lose(WorkerRank(1), 0)


@pytest.mark.parametrize("is_lost", [True, False])
def test_pushes_that_arrive_together_are_stale_for_each_other(is_lost: bool):
    """Each bucket gets them in some order, and neither worker has seen the other's."""
    gate = Bench(policy=ASP()).gate
    one, other, cut = (arriving(rank) for rank in range(3))
    for push in (one, other, cut):
        assert gate.begin_push(push) is None
        assert push.decision is PushDecision.APPLY
    assert [push.staleness for push in (one, other, cut)] == [0, 1, 2], "so many came before it"
    assert [gate.staleness_of(push.id.worker) for push in (one, other)] == [2, 2]
    gate.arrive(one)
    assert gate.staleness_of(other.id.worker) == 2
    if is_lost:
        gate.lose(cut.id.worker)
    else:
        gate.change(cut.id._replace(session=2), LEAVE, leaves=True)
    assert gate.staleness_of(other.id.worker) == 1, "what was cut for ever is not on its way"
    gate.arrive(other)
    assert gate.staleness_of(one.id.worker) == 1
    gate.pulled(one.id.worker, gate.clock)
    assert gate.staleness_of(one.id.worker) == 0


def test_a_worker_that_a_restored_server_does_not_know_is_not_stale():
    """Else its first push would hardly count, at a rate divided by the updates of years."""
    gate = Bench(policy=ASP(clock=900)).gate
    push = arriving(0)
    gate.begin_push(push)
    assert push.staleness == 0
    gate.arrive(push)
    assert gate.staleness_of(push.id.worker) == 0
    assert gate.staleness_of(WorkerRank(1)) == 1


@pytest.mark.parametrize("on_lost", ["fail", "continue"])
def test_a_worker_may_be_lost_while_the_server_stops(on_lost: OnLost):
    bench = Bench(on_lost)
    waiting = bench.gate.arrive(bench.arrival(1))
    bench.gate.close(ServerPhaseError("ps:0 stops"))
    bench.gate.lose(WorkerRank(0), 0)
    bench.gate.lose(WorkerRank(1), 0)
    with pytest.raises(ServerPhaseError, match="stops"):
        bench.gate.wait(waiting, soon(), NEVER_GONE)


def test_the_retry_of_a_refused_push_waits_with_it():
    """Told at once, its worker would push again into the barrier where the refused one stands."""
    bench = Bench()
    refused = bench.arrival(0)
    null = bench.gate.refuse(refused, NonFiniteGradient("NaN"))
    retry = push_of(0)
    assert bench.gate.begin_push(retry) is null
    assert retry.ticket.verdict is Verdict.RESUMED
    assert bench.gate.refuse(refused, NonFiniteGradient("NaN")) is null
    bench.gate.arrive(bench.arrival(1))
    assert null is not None
    with pytest.raises(NonFiniteGradient, match="NaN"):
        bench.gate.wait(null, soon(), NEVER_GONE)
    with pytest.raises(NonFiniteGradient, match="NaN"):
        bench.gate.begin_push(push_of(0))
    bench.gate.arrive(bench.arrival(0, 2))
    bench.gate.arrive(bench.arrival(1, 2))
    assert bench.reduced == [[1.0], [0.0, 1.0]]


@pytest.mark.fault("F24")
def test_a_late_copy_that_is_refused_hides_no_later_refusal():
    """Else the retry of the later push would be answered as if it had been applied."""
    bench = Bench()
    early, later = (bench.gate.begin(RequestId(WorkerRank(0), 0, 1, n)) for n in (1, 2))
    with contextlib.suppress(NonFiniteGradient):
        bench.rows.refused(later, None, NonFiniteGradient("the later one"))
        bench.rows.refused(early, None, NonFiniteGradient("a late copy"))
    with pytest.raises(NonFiniteGradient, match="the later one"):
        bench.gate.begin(later.id)


@pytest.mark.fault("F24")
def test_the_copy_of_a_push_that_came_twice_into_a_clock_stays_refused():
    bench = Bench()
    bench.gate.arrive(bench.arrival(0, 1))
    other, copy = push_of(0, session=2), push_of(0, session=2)
    for push in (other, copy):
        assert bench.gate.begin_push(push) is None
    with pytest.raises(ServerPhaseError, match="pushed twice"):
        bench.gate.arrive(other)
    bench.gate.arrive(bench.arrival(1, 1))
    with pytest.raises(ServerPhaseError, match="pushed twice"):
        bench.gate.arrive(copy)
    assert bench.gate.missing() == (0, 1)


@pytest.mark.fault("F24")
def test_a_push_that_was_applied_as_it_arrived_counts_though_a_copy_was_refused_meanwhile():
    bench = Bench(policy=SSP(2, 1))
    gate, push, copy = bench.gate, arriving(0), arriving(0)
    assert gate.begin_push(push) is None
    assert push.decision is PushDecision.APPLY
    gate.change(push.id._replace(session=2), LEAVE, leaves=True)
    with pytest.raises(ServerPhaseError, match="has left"):
        gate.begin_push(copy)
    assert copy.ticket.verdict is Verdict.RESUMED
    gate.arrive(push)
    assert bench.pushed == [push.id]
    assert gate.clock == 1


@pytest.mark.parametrize("policy", [ASP(), SSP(2, 0)], ids=["async", "ssp"])
def test_a_push_that_was_applied_as_it_arrived_is_no_news_to_a_closed_gate(policy: Policy):
    """Told that nothing was changed, a user would train its rows again."""
    bench = Bench(policy=policy)
    push = arriving(0)
    bench.gate.begin_push(push)
    bench.gate.close(ServerPhaseError("DRAINING; nothing was changed"))
    taken = None
    with contextlib.suppress(ServerPhaseError):
        taken = bench.gate.arrive(push)
    assert taken is push
    assert (push.clock, push.error) == (1, None)
    assert bench.pushed == [push.id]
    with pytest.raises(ServerPhaseError, match="DRAINING"):
        bench.gate.begin_push(arriving(0, session=2))


def test_rows_that_were_applied_are_no_news_to_a_closed_gate():
    bench = Bench(policy=ASP())
    ticket = bench.gate.begin(RequestId(WorkerRank(0), 0, 1, 1))
    bench.gate.close(ServerPhaseError("DRAINING; nothing was changed"))
    assert bench.rows.applied(ticket, None)
    assert (ticket.session.completed, ticket.session.updates) == (1, 1)


def test_who_is_refused_at_a_closed_gate_leaves_no_frames_behind():
    """They would keep the payload of each refused request."""
    bench, error = Bench(), ServerPhaseError("DRAINING")
    waiting = bench.gate.arrive(bench.arrival(0))
    bench.gate.close(error)
    calls = (
        partial(bench.gate.begin_push, push_of(1)),
        partial(bench.gate.wait, waiting, soon(), NEVER_GONE),
        bench.gate.refuse_closed,
    )
    for call in calls:
        with pytest.raises(ServerPhaseError, match="DRAINING"):
            call()
    assert error.__traceback__ is None


def test_a_push_that_is_refused_at_a_closed_gate_waits_for_nobody():
    bench = Bench()
    refused = bench.arrival(0)
    bench.gate.close(ServerPhaseError("DRAINING"))
    with pytest.raises(ServerPhaseError, match="DRAINING"):
        bench.gate.refuse(refused, NonFiniteGradient("NaN"))


@pytest.mark.fault("F20")
@pytest.mark.parametrize("is_fenced", [True, False])
def test_the_push_of_a_replaced_attempt_makes_room_for_its_successors(is_fenced: bool):
    bench = Bench()
    old = bench.gate.arrive(bench.arrival(1))
    if is_fenced:
        bench.gate.fence(WorkerRank(1), 1)
    new = push_of(1, 1, generation=1)
    assert bench.gate.begin_push(new) is None
    with pytest.raises(StaleGeneration, match="was replaced"):
        bench.gate.wait(old, soon(), NEVER_GONE)
    bench.gate.arrive(new)
    with pytest.raises(StaleGeneration):
        bench.gate.refuse(old, NonFiniteGradient("NaN"))
    assert not new.is_done, "worker 0 has not pushed"
    bench.gate.arrive(bench.arrival(0))
    assert (bench.reduced, new.clock, bench.workers) == ([[0.0, 1.0]], 1, [0, 1])


class RungBell(threading.Condition):
    """The condition of one wait, which counts who wakes it."""

    num_rings = 0

    def notify_all(self) -> None:
        self.num_rings += 1


def test_what_ends_no_wait_wakes_nobody():
    """At a barrier every arrival but the last would wake all that came before it."""
    bench = Bench(policy=BSP(3))
    gate = bench.gate
    bells = []
    for rank in (0, 1):
        push = bench.arrival(rank)
        push.ended = RungBell()
        bells.append(push.ended)
        gate.arrive(push)
        with gate.between_clocks():
            pass
    assert gate.change(RequestId(WorkerRank(2), 0, 2, 1), JOIN)
    assert [bell.num_rings for bell in bells] == [0, 0]
    gate.arrive(bench.arrival(2))
    assert [bell.num_rings for bell in bells] == [1, 1]


def test_an_answered_push_wakes_none_that_still_waits():
    """In ssp with one slow worker, each push of the others would wake all that are held."""
    bench = Bench(policy=SSP(3, 1))
    bench.gate.arrive(bench.arrival(0))
    held = bench.arrival(0, 2)
    held.ended = bell = RungBell()
    bench.gate.arrive(held)
    free = bench.arrival(1)
    bench.gate.arrive(free)
    assert free.is_done
    assert (held.is_done, bell.num_rings) == (False, 0)
    bench.gate.arrive(bench.arrival(2))
    assert (held.is_done, bell.num_rings) == (True, 1)


def test_a_permit_wakes_none_that_still_waits(monkeypatch: pytest.MonkeyPatch):
    """In hybrid each lookup that is granted would wake all pushes at the barrier."""
    monkeypatch.setattr(waits, "CHECK_PEER_S", 60.0)
    bench = Bench("continue", policy=Hybrid(2, 1, on_lost="continue"))
    push = bench.arrival(0)
    push.ended = bell = RungBell()
    bench.gate.arrive(push)
    name = RequestId(WorkerRank(1), 0, 2, 1)
    bench.rows.look_up(LookupTurn(name, (), time.monotonic() + 5.0, lambda: False))
    assert (push.is_done, bell.num_rings) == (False, 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_loss_ends_the_waits_of_the_lost_and_of_those_that_waited_for_it(
    lost: int, monkeypatch: pytest.MonkeyPatch
):
    """A lookup waits for its own worker's batches, so only its worker's loss ends it."""
    monkeypatch.setattr(waits, "CHECK_PEER_S", 60.0)
    bench = Bench("continue", policy=Hybrid(2, 1, on_lost="continue"))
    gate = bench.gate
    ended: list[Exception] = []

    def look_up(worker: int, sequence: int) -> None:
        name = RequestId(WorkerRank(worker), 0, 2, sequence)
        open_now = range(1, sequence + 1)
        try:
            bench.rows.look_up(LookupTurn(name, open_now, time.monotonic() + 60.0, NEVER_GONE))
        except StaleGeneration as error:
            ended.append(error)

    look_up(lost, 1)
    thread = threading.Thread(target=look_up, args=(lost, 2))
    thread.start()
    wait_until(lambda: gate.lookups.num_waiting == 1, "the second batch to wait")
    gate.lose(WorkerRank(lost))
    thread.join(10.0)
    assert not thread.is_alive()
    assert len(ended) == 1
