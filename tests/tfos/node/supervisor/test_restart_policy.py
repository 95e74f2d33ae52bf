"""How often, and how soon, a supervisor starts a server again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.nodes import node_settings
from tfos.config import Checkpoints, Restarts
from tfos.control import messages
from tfos.control.restarts import budget
from tfos.failure import NodeFailure, NodeId
from tfos.node.child_link import HasBegun, ToServer
from tfos.node.spec import NO_KEYS, NodeBundle
from tfos.node.supervisor import restart_policy
from tfos.node.supervisor.restart_policy import ChildRestarts
from tfos.topology import PlannedNode


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(restart_policy, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def restarts_of(limit: int, role: str = "ps") -> ChildRestarts:
    plan = Checkpoints(directory="/x")
    bundle = NodeBundle(
        node=PlannedNode(role, 0, 0),
        settings=node_settings(checkpoints=plan, restarts=Restarts(ps=limit)),
        control_keys=NO_KEYS,
        rpc_secret=b"",
    )
    return ChildRestarts(bundle)


def lived(made: ChildRestarts, clock: list[float], seconds: float) -> float | None:
    """Start a child and let it die; returns what the next one waits for."""
    made.note_start()
    clock[0] += seconds
    return made.take()


@pytest.mark.fault("F12")
def test_a_server_that_dies_again_and_again_is_started_later_each_time_then_no_more(clock):
    made = restarts_of(7)
    delays = [lived(made, clock, 1.0) for _ in range(8)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, None]
    assert made.count == 7
    node = NodeId("ps", 0, 0)
    died = NodeFailure(node, "host", 1, message="ps:0 killed by SIGSEGV", log_tail=("last", "line"))
    failed = made.explain(died)
    assert "(its server was restarted 7 of 7 times within 10 minutes)" in failed.message
    assert failed.log_tail == ("last", "line")


@pytest.mark.fault("F08")
def test_a_server_that_served_for_long_is_started_at_once_and_old_restarts_are_forgiven(clock):
    made = restarts_of(2)
    assert [lived(made, clock, seconds) for seconds in (1.0, 1.0, 1.0)] == [0.0, 0.5, None]
    clock[0] += budget.WINDOW_S
    assert [lived(made, clock, seconds) for seconds in (60.0, 1.0)] == [0.0, 0.0]
    assert made.count == 4, "generations never repeat"
    assert made.report(SimpleNamespace()).count == 2  # type: ignore[arg-type]


def test_a_server_may_die_more_often_than_a_delay_can_be_doubled(clock):
    made = restarts_of(3000)
    assert [lived(made, clock, 1.0) for _ in range(2000)][-1] == budget.MAX_DELAY_S


def test_workers_are_not_restarted(clock):
    assert lived(restarts_of(5, role="worker"), clock, 100.0) is None


@pytest.mark.fault("F08")
def test_the_next_server_hears_which_workers_nobody_has_to_wait_for(clock):
    made = restarts_of(1)
    lost, done = messages.FenceWorker(2, 0, "killed"), messages.WorkerDone(1)
    for order in (lost, messages.Flush("input", 0), done, messages.Stop("end")):
        made.note(order)
    told: list[ToServer] = []
    made.repeat_orders(told.append)
    assert told == [lost, done]


@pytest.mark.fault("F08")
@pytest.mark.parametrize(
    ("start_in_pause", "told"),
    [(False, [False, True, True]), (True, [False, False, True])],
)
def test_a_child_restores_if_one_before_it_has_run_in_a_cluster_that_had_begun(
    clock: list[float], start_in_pause: bool, told: list[bool]
):
    made = restarts_of(3)
    orders: list[ToServer] = []
    made.note_start()
    made.has_begun = False
    made.tell_begun(orders.append)
    if not start_in_pause:
        made.note(messages.Start(()))
    for _ in range(2):
        made.take()
        if start_in_pause and len(orders) == 1:
            made.note(messages.Start(()))
        made.note_start()
        made.repeat_orders(orders.append)
    assert orders == [HasBegun(yes) for yes in told]


def test_a_child_is_told_nothing_before_the_driver_was_heard(clock: list[float]):
    made = restarts_of(3)
    orders: list[ToServer] = []
    for _ in range(3):
        made.note_start()
        made.repeat_orders(orders.append)
        made.take()
    assert orders == []
