"""Waiting, waking and failing behind the policy; gradients are plain numbers here."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial

import pytest

from ps.consistency.asp import ASP
from ps.consistency.bsp import BSP
from ps.consistency.gate import Event, Gate
from ps.consistency.policy import OnLost, PushDecision
from ps.consistency.ssp import SSP
from ps.consistency.waiting import PendingPush
from ps.errors import (
    NonFiniteGradient,
    RequestTimeout,
    ServerError,
    ServerGone,
    ServerPhaseError,
    StaleIncarnation,
)
from ps.exactly_once import CompletionLog, RequestId, SessionCut, Verdict
from ps.manifest.manifest import Hyper, WorkerRank

HYPER = Hyper(0.1)
NEVER_GONE = bool
JOIN: Event = lambda policy, worker: policy.on_join(worker)  # noqa: E731
LEAVE: Event = lambda policy, worker: policy.on_leave(worker)  # noqa: E731


class Bench:
    """A gate over two workers that adds numbers."""

    def __init__(self, on_lost: OnLost = "fail") -> None:
        self.reduced: list[list[float]] = []
        self.applied: list[int] = []
        self.failures: list[str] = []
        self.trouble: Exception | None = None
        self.policy = BSP(2, on_lost=on_lost)
        self.record = CompletionLog(1)
        self.gate: Gate[float] = Gate(
            self.policy,
            self.record,
            self._reduce,
            self._applied,
            self.failures.append,
        )

    def _reduce(self, staged) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.reduced.append([arrival.gradient for arrival in staged])

    def _applied(self, arrival: PendingPush[float]) -> None:
        self.applied.append(arrival.id.worker)

    def arrival(self, worker: int, sequence: int = 1, *, null: bool = False) -> PendingPush[float]:
        name = RequestId(WorkerRank(worker), 0, 1, sequence)
        self.gate.begin(name)
        return PendingPush(name, 1, None if null else HYPER, None if null else float(worker))


def restored(clock: int, sequence: int) -> Bench:
    """A gate that goes on from a checkpoint in which both workers had done `sequence`."""
    bench = Bench()
    bench.record.restore(
        [SessionCut(rank, 0, 1, (sequence,)) for rank in (WorkerRank(0), WorkerRank(1))]
    )
    bench.policy.catch_up(clock)
    return bench


@pytest.mark.fault("F08")
@pytest.mark.parametrize("late_first", [True, False])
def test_after_a_restore_a_push_of_an_undone_clock_does_not_wait_for_the_next(late_first: bool):
    """Both had pushed number 2; only worker 0 was told of it before the server died at clock 2."""
    bench = restored(clock=1, sequence=1)
    ahead, late = RequestId(WorkerRank(0), 0, 1, 3), RequestId(WorkerRank(1), 0, 1, 2)

    def come_ahead() -> PendingPush[float]:
        assert bench.gate.begin(ahead, 2, 2) == (Verdict.NEW, None)
        return bench.gate.arrive(PendingPush(ahead, 1, HYPER, 0.0))

    if late_first:
        assert bench.gate.begin(late, 1, 1, is_push=True) == (Verdict.NEW, None)
        waiting = bench.gate.arrive(PendingPush(late, 1, HYPER, 1.0))
        assert not waiting.is_done
        staged = come_ahead()
        assert waiting.clock == 2
    else:
        staged = come_ahead()
        assert bench.gate.begin(late, 1, 1, is_push=True) == (Verdict.DUPLICATE, None)
    assert (bench.gate.clock, bench.reduced, staged.is_done) == (2, [], False)
    bench.gate.arrive(bench.arrival(1, 3))
    assert (bench.gate.clock, bench.reduced, staged.clock) == (3, [[0.0, 1.0]], 3)
    assert bench.record.lost_requests == 2  # number 2 of both


@pytest.mark.fault("F08")
def test_after_a_restore_pushes_that_waited_together_go_on_together():
    bench = restored(clock=1, sequence=1)
    for worker in (0, 1):  # both were told of clock 5, and push their number 6 again
        bench.gate.begin(RequestId(WorkerRank(worker), 0, 1, 6), 5, 5)
        bench.gate.arrive(bench.arrival(worker, 6))
    assert (bench.gate.clock, bench.reduced) == (6, [[0.0, 1.0]])
    assert bench.record.lost_requests == 8


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
    assert bench.applied == [0, 1]


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
    assert bench.applied == [0, 1]


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
        bench.gate.begin(RequestId(WorkerRank(0), 0, 1, 2))


def test_a_refused_reduction_is_the_pushers_error_and_training_can_go_on():
    bench = Bench()
    bench.trouble = NonFiniteGradient("overflow")
    pushes = [bench.gate.arrive(bench.arrival(worker)) for worker in (0, 1)]
    for push in pushes:
        with pytest.raises(NonFiniteGradient, match="overflow"):
            bench.gate.wait(push, soon(), NEVER_GONE)
        with pytest.raises(NonFiniteGradient):
            bench.gate.begin(push.id)  # its retry hears the same
    bench.trouble = None
    for worker in (0, 1):
        bench.gate.arrive(bench.arrival(worker, 2))
    assert bench.failures == []
    assert bench.applied == [0, 1]


def test_a_refused_push_is_present_once_however_often_it_comes():
    bench = Bench()
    refused = bench.arrival(0)
    for _ in range(2):
        bench.gate.refuse(refused, NonFiniteGradient("NaN"))
    bench.gate.arrive(bench.arrival(1))
    assert bench.reduced == [[1.0]]
    assert bench.applied == [1]


def test_close_ends_waits_and_later_requests():
    bench = Bench()
    arrival = bench.gate.arrive(bench.arrival(0))
    bench.gate.close(ServerPhaseError("DRAINING"))
    for ended in (
        partial(bench.gate.wait, arrival, soon(), NEVER_GONE),
        partial(bench.gate.begin, arrival.id),
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
    with pytest.raises(StaleIncarnation, match="was replaced"):
        bench.gate.wait(waiting, time.monotonic(), NEVER_GONE)
    assert not bench.gate.lose(WorkerRank(1), 0)


@pytest.mark.parametrize("is_lost", [True, False])
def test_pushes_that_arrive_together_are_stale_for_each_other(is_lost: bool):
    """Each bucket gets them in some order, and neither worker has seen the other's."""
    gate: Gate[float] = Gate(ASP(), CompletionLog(1), lambda _: None, lambda _: None, print)
    one, other, cut = (RequestId(WorkerRank(rank), 0, 1, 1) for rank in range(3))
    for name in (one, other, cut):
        gate.begin(name)
        assert gate.admit(name) is PushDecision.APPLY
    assert [gate.staleness_of(name.worker) for name in (one, other)] == [2, 2]
    gate.arrive(PendingPush(one, 1, HYPER))
    assert gate.staleness_of(other.worker) == 2
    if is_lost:
        gate.lose(cut.worker)
    else:
        gate.change(cut._replace(session=2), LEAVE, leaves=True)
    assert gate.staleness_of(other.worker) == 1, "what was cut for ever is not on its way"
    gate.arrive(PendingPush(other, 1, HYPER))
    assert gate.staleness_of(one.worker) == 1
    gate.pulled(one.worker, gate.clock)
    assert gate.staleness_of(one.worker) == 0


def test_a_worker_that_a_restored_server_does_not_know_is_not_stale():
    """Else its first push would hardly count, at a rate divided by the updates of years."""
    gate: Gate[float] = Gate(ASP(clock=900), CompletionLog(1), print, lambda _: None, print)
    name = RequestId(WorkerRank(0), 0, 1, 1)
    gate.begin(name)
    gate.admit(name)
    assert gate.staleness_of(name.worker) == 0
    gate.arrive(PendingPush(name, 1, HYPER))
    assert gate.staleness_of(name.worker) == 0
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


def push_of(worker: int, sequence: int, incarnation: int = 0) -> PendingPush[float]:
    return PendingPush(
        RequestId(WorkerRank(worker), incarnation, 1, sequence), 1, HYPER, float(worker)
    )


def test_the_retry_of_a_refused_push_waits_with_it():
    """Told at once, its worker would push again into the barrier where the refused one stands."""
    bench = Bench()
    refused = bench.arrival(0)
    null = bench.gate.refuse(refused, NonFiniteGradient("NaN"))
    assert bench.gate.begin(refused.id) == (Verdict.RESUMED, null)
    assert bench.gate.refuse(refused, NonFiniteGradient("NaN")) is null
    bench.gate.arrive(bench.arrival(1))
    assert null is not None
    with pytest.raises(NonFiniteGradient, match="NaN"):
        bench.gate.wait(null, soon(), NEVER_GONE)
    with pytest.raises(NonFiniteGradient, match="NaN"):
        bench.gate.begin(refused.id)
    bench.gate.arrive(bench.arrival(0, 2))
    bench.gate.arrive(bench.arrival(1, 2))
    assert bench.reduced == [[1.0], [0.0, 1.0]]


@pytest.mark.fault("F24")
def test_a_late_copy_that_is_refused_hides_no_later_refusal():
    """Else the retry of the later push would be answered as if it had been applied."""
    bench = Bench()
    early, later = bench.arrival(0, 1).id, bench.arrival(0, 2).id
    with contextlib.suppress(NonFiniteGradient):
        bench.gate.rows.refused(later, None, NonFiniteGradient("the later one"))
        bench.gate.rows.refused(early, None, NonFiniteGradient("a late copy"))
    with pytest.raises(NonFiniteGradient, match="the later one"):
        bench.gate.begin(later)


@pytest.mark.fault("F24")
def test_the_copy_of_a_push_that_came_twice_into_a_clock_stays_refused():
    bench = Bench()
    bench.gate.arrive(bench.arrival(0, 1))
    other = RequestId(WorkerRank(0), 0, 2, 1)
    bench.gate.begin(other)
    with pytest.raises(ServerPhaseError, match="pushed twice"):
        bench.gate.arrive(PendingPush(other, 1, HYPER, 7.0))
    bench.gate.arrive(bench.arrival(1, 1))
    with pytest.raises(ServerPhaseError, match="pushed twice"):
        bench.gate.arrive(PendingPush(other, 1, HYPER, 7.0))
    assert bench.gate.missing() == (0, 1)


@pytest.mark.fault("F24")
def test_a_push_that_was_applied_as_it_arrived_counts_though_a_copy_was_refused_meanwhile():
    applied: list[RequestId] = []
    gate: Gate[float] = Gate(
        SSP(2, 1), CompletionLog(1), print, lambda arrival: applied.append(arrival.id), print
    )
    name = RequestId(WorkerRank(0), 0, 1, 1)
    gate.begin(name)
    assert gate.admit(name) is PushDecision.APPLY
    gate.change(name._replace(session=2), LEAVE, leaves=True)
    assert gate.begin(name) == (Verdict.RESUMED, None)
    with pytest.raises(ServerPhaseError, match="has left"):
        gate.admit(name)
    gate.arrive(PendingPush(name, 1, HYPER))
    assert applied == [name]
    assert gate.clock == 1


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
    new = push_of(1, 1, incarnation=1)
    bench.gate.begin(new.id)
    with pytest.raises(StaleIncarnation, match="was replaced"):
        bench.gate.wait(old, soon(), NEVER_GONE)
    bench.gate.arrive(new)
    with pytest.raises(StaleIncarnation):
        bench.gate.refuse(old, NonFiniteGradient("NaN"))
    assert not new.is_done, "worker 0 has not pushed"
    bench.gate.arrive(bench.arrival(0))
    assert (bench.reduced, new.clock, bench.applied) == ([[0.0, 1.0]], 1, [0, 1])
