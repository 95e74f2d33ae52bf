"""The driver's shell with real clients: orders leave at once, waiters wake, causes come first."""

from __future__ import annotations

import io
import queue
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id, report_to, running
from tests.support.waiting import wait_until
from tfos.config import Checkpoints, ClusterConfig, Restarts
from tfos.console.console import Console
from tfos.control import messages
from tfos.control.authority import ClusterAuthority
from tfos.control.client import ControlClient
from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.restarts.budget import RestartBudget
from tfos.control.state.actions import Action
from tfos.control.state.cluster_state import ClusterState
from tfos.errors import ControlRefused
from tfos.failure import EXECUTOR_LOST, NODE_SILENT, NodeFailure
from tfos.phases import ClusterPhase
from tfos.topology import plan

WAIT_S = 10.0


class Bed:
    def __init__(self, config: ClusterConfig | None = None) -> None:
        self.out = io.StringIO()
        self.authority = ClusterAuthority("bed")
        self.console = Console(stream=self.out)
        config = config or ClusterConfig(heartbeat_s=0.1, reconnect_s=0.3)
        self.coordinator = Coordinator(plan(3, 1), config, self.console)
        self.port = self.coordinator.start("127.0.0.1", self.authority.driver())
        self.nodes: dict[str, Node] = {}

    def join(self, name: str) -> Node:
        self.nodes[name] = node = Node(self, name)
        return node

    def join_all(self) -> None:
        for name in ("ps:0", "worker:0", "worker:1"):
            self.join(name)
        assert self.coordinator.wait(lambda s: s.phase is ClusterPhase.RUNNING, WAIT_S)
        for node in self.nodes.values():
            node.expect(messages.Start)

    def shown(self) -> str:
        assert self.console.flush(WAIT_S)
        return self.out.getvalue()

    def close(self) -> None:
        for node in self.nodes.values():
            node.client.close()
        self.coordinator.close()


class Node:
    """A supervisor's client that registers and serves."""

    def __init__(self, bed: Bed, name: str) -> None:
        self.id = node_id(name)
        self.orders: queue.Queue[messages.Order] = queue.Queue()
        self.num_events = 0
        self.client = ControlClient(
            f"127.0.0.1:{bed.port}", "bed", self.id, bed.authority.node(name)
        )
        assert self.client.register(messages.Register(self.id, "1", "h", 7)).accepted
        self.client.orders(self.orders.put, lambda reason: None)
        self.report(messages.Listening(Endpoint("h", 1)))

    def report(self, event: messages.Event) -> None:
        self.num_events += 1
        self.client.report(event, self.num_events)

    def expect(self, kind: type[messages.Order]) -> messages.Order:
        order = self.orders.get(timeout=WAIT_S)
        assert isinstance(order, kind), order
        return order

    def fail(self, **fields: object) -> None:
        failure = NodeFailure(self.id, "h", 7, **fields)  # type: ignore[arg-type]
        self.report(messages.Failed(failure))


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    made.close()


def test_the_roster_reaches_every_node(bed):
    bed.join_all()


def test_output_of_nodes_is_shown_with_its_origin(bed):
    node = bed.join("worker:1")
    node.client.log(messages.LogBatch(node.id, ("hello \x1b[31m",), 2))
    assert bed.shown().splitlines()[-2:] == [
        r"worker:1@h | hello \x1b[31m",
        "worker:1@h | (2 lines dropped: over the rate limit; see its log)",
    ]


@pytest.mark.attack("A24")
def test_a_node_that_floods_the_driver_is_cut_to_the_rate(bed):
    """500 batches of 1,000 lines, by a node that does not keep its own limit."""
    node = bed.join("worker:1")
    began_s = time.monotonic()
    for _ in range(500):
        bed.coordinator.on_log(messages.LogBatch(node.id, ("y",) * 1000))
    admitted = 2000 + 400 * (time.monotonic() - began_s)
    lines = bed.shown().splitlines()
    assert lines.count("worker:1@h | y") <= admitted
    dropped = sum(int(line.split("(")[1].split()[0]) for line in lines if "lines dropped" in line)
    assert lines.count("worker:1@h | y") + dropped == 500_000


@pytest.mark.attack("A15")
def test_a_worker_that_reports_in_the_chiefs_place_is_refused(bed):
    bed.join_all()
    with pytest.raises(ControlRefused, match="worker:1 may not report TensorBoardUp; only the"):
        bed.nodes["worker:1"].report(messages.TensorBoardUp("http://evil:80"))
    assert "evil" not in bed.shown()
    assert bed.coordinator.read(lambda state: state.tensorboard) is None


def test_a_failure_wakes_who_waits_and_stops_the_others(bed):
    bed.join_all()
    woken = threading.Event()

    def wait() -> None:
        bed.coordinator.wait(lambda state: state.phase is ClusterPhase.FAILED, WAIT_S)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    bed.nodes["worker:1"].fail(error_type="ValueError", message="m", traceback="T")
    assert woken.wait(WAIT_S)
    waiter.join(WAIT_S)
    bed.nodes["worker:0"].expect(messages.Stop)
    bed.nodes["ps:0"].expect(messages.Stop)
    error = bed.coordinator.error()
    assert error is not None
    assert error.failures[0].node.name == "worker:1"


def test_a_vanished_node_is_lost_within_seconds(bed):
    bed.join_all()
    bed.nodes["worker:1"].client.close()
    # Sooner than silence alone would tell.
    assert ClusterConfig().hang_s > WAIT_S
    assert bed.coordinator.wait(lambda state: bool(state.failures), WAIT_S)
    lost = bed.nodes["ps:0"].expect(messages.FenceWorker)
    assert isinstance(lost, messages.FenceWorker)
    assert lost.rank == 1
    assert bed.coordinator.phase is ClusterPhase.RUNNING


def test_a_cause_comes_before_the_symptom_that_was_reported_first(bed):
    bed.join_all()
    bed.nodes["worker:0"].fail(error_type="ps.errors.ServerGone", message="ps:0", traceback="T")
    bed.nodes["ps:0"].expect(messages.Stop)
    bed.coordinator.act(
        lambda state: state.fail(state.members["ps:0"].failure("", "killed by SIGSEGV"))
    )
    error = bed.coordinator.error()
    assert error is not None
    assert [failure.node.name for failure in error.failures] == ["ps:0", "worker:0"]


def test_the_headline_is_explained_and_a_loss_before_it_is_not_counted_after_it(bed):
    bed.join_all()
    bed.coordinator.explain_by(
        lambda failure, _waits: msgspec.structs.replace(failure, message=f"{failure.message} (137)")
    )
    assert bed.coordinator.raised_error() is None
    bed.nodes["worker:1"].fail(error_type=EXECUTOR_LOST, message="executor 1 ended")
    assert bed.coordinator.wait(lambda state: bool(state.failures), WAIT_S)
    bed.nodes["ps:0"].fail(error_type=EXECUTOR_LOST, message="executor 2 ended")
    assert bed.coordinator.wait(lambda state: bool(state.fatal), WAIT_S)
    told = [failure.message for failure in bed.coordinator.failures()]
    assert told == ["executor 1 ended (137)", "executor 2 ended (137)"]
    error = bed.coordinator.raised_error()
    assert str(error).splitlines()[0] == "ExecutorLost: executor 2 ended (137)"
    assert str(error).endswith("1 more failure before it: worker:1")
    assert "after it" not in str(error)


@pytest.mark.parametrize("num_losses", [1, 49, 120])
@pytest.mark.parametrize(
    ("kind", "headline"),
    [
        (NODE_SILENT, NODE_SILENT),
        ("ps.errors.RequestTimeout", "ps.errors.RequestTimeout"),
        ("tfos.errors.RankLost", EXECUTOR_LOST),
        ("ValueError", "ValueError"),
    ],
)
def test_a_loss_that_the_cluster_has_survived_is_the_headline_of_a_lost_rank_alone(
    num_losses: int, kind: str, headline: str
):
    coordinator = Coordinator(plan(202, 1), ClusterConfig(), Console(enabled=False))
    coordinator._state = running(plan(202, 1))
    workers = coordinator.read(lambda state: [each.node for each in state.workers])
    for node in workers[1 : num_losses + 1]:
        lost = NodeFailure(node, "h", 7, error_type=EXECUTOR_LOST, message=f"of {node.name}")
        report_to(coordinator, node, messages.Failed(lost))
    assert coordinator.phase is ClusterPhase.RUNNING
    failure = NodeFailure(workers[0], "h", 7, error_type=kind, message="an end")
    coordinator.act(lambda state: state.fail(failure))
    for node in workers[-70:]:
        after = NodeFailure(node, "h", 7, error_type="RankLost", traceback="tb")
        report_to(coordinator, node, messages.Failed(after))
    error = coordinator.error()
    assert error is not None
    assert error.failures[0].error_type == headline
    if headline == EXECUTOR_LOST:  # the newest: it is what the others wait for
        assert error.failures[0].message == f"of {workers[num_losses].name}"
    kept = coordinator.failures()
    assert error.num_earlier == kept.index(error.failures[0])
    assert failure in kept
    assert coordinator.read(lambda state: state.by_cause())[0] == error.failures


def test_the_loss_of_a_server_that_is_not_back_is_the_cause_of_who_waits_for_it():
    coordinator = Coordinator(plan(3, 1), ClusterConfig(), Console(enabled=False))
    saves = ClusterConfig(checkpoints=Checkpoints(directory="/saves"), restarts=Restarts(ps=1))
    coordinator._state = running(plan(3, 1), config=saves)
    coordinator.replace_by(lambda wanted: None)
    lost = NodeFailure(node_id("ps:0"), "h", 7, error_type=EXECUTOR_LOST)
    report_to(coordinator, lost.node, messages.Failed(lost))
    assert coordinator.phase is ClusterPhase.RUNNING
    waits = NodeFailure(node_id("worker:1"), "h", 8, error_type="ps.errors.ServerGone")
    report_to(coordinator, waits.node, messages.Failed(waits))
    error = coordinator.error()
    assert error is not None
    assert error.failures[0] == lost


@pytest.mark.parametrize("kind", ["RankLost", "ps.errors.ServerGone"])
def test_a_server_that_has_come_back_explains_no_later_failure(kind: str):
    coordinator = Coordinator(plan(5, 1), ClusterConfig(), Console(enabled=False))
    coordinator._state = running(plan(5, 1))
    killed = NodeFailure(node_id("ps:0"), "h", 7, error_type=EXECUTOR_LOST)
    report_to(coordinator, killed.node, messages.Restarted(killed, 1, 2))
    for name, raised in (("worker:1", kind), ("worker:3", "ValueError")):
        failure = NodeFailure(node_id(name), "h", 7, error_type=raised, traceback="tb")
        report_to(coordinator, failure.node, messages.Failed(failure))
    coordinator._state.members["ps:0"].status = NodeStatus.ENDED
    error = coordinator.error()
    assert error is not None
    assert error.failures[0].error_type == "ValueError"


def test_a_lost_rank_is_explained_by_the_loss_before_what_others_raise_for_it():
    coordinator = Coordinator(plan(5, 1), ClusterConfig(), Console(enabled=False))
    coordinator._state = running(plan(5, 1))
    for name, kind in (("worker:3", EXECUTOR_LOST), ("worker:1", "RankLost")):
        failure = NodeFailure(node_id(name), "h", 7, error_type=kind)
        report_to(coordinator, failure.node, messages.Failed(failure))
    wrapped = NodeFailure(node_id("worker:2"), "h", 7, error_type="RuntimeError", traceback="tb")
    report_to(coordinator, wrapped.node, messages.Failed(wrapped))
    error = coordinator.error()
    assert error is not None
    assert error.failures[0].error_type == EXECUTOR_LOST


@pytest.mark.parametrize("place", [0, 30, 70, 120, 199])
def test_the_cause_is_the_headline_wherever_it_comes_among_more_failures_than_are_kept(place: int):
    coordinator = Coordinator(plan(201, 1), ClusterConfig(), Console(enabled=False))
    coordinator._state = running(plan(201, 1))
    workers = coordinator.read(lambda state: [each.node for each in state.workers])
    for number, node in enumerate(workers):
        kind, text = "tfos.errors.RankLost", "its own error is the cause"
        if number == place:
            kind, text = "builtins.ValueError", "broken row"
        failure = NodeFailure(node, "h", 7, error_type=kind, message=text, traceback="tb")
        report_to(coordinator, node, messages.Failed(failure))
    error = coordinator.error()
    assert error is not None
    assert str(error).splitlines()[0] == "builtins.ValueError: broken row"
    kept = [each.node.index for each in coordinator.failures()]
    assert len(kept) == 100
    assert kept[:50] == list(range(50))
    assert kept[-40:] == list(range(160, 200))


def test_closing_twice_is_fine_and_ends_the_wait_of_others(bed):
    woken = threading.Event()

    def wait() -> None:
        bed.coordinator.wait(lambda state: state.phase is ClusterPhase.CLOSED, WAIT_S)
        woken.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    bed.coordinator.close()
    bed.coordinator.close()
    assert woken.wait(WAIT_S)
    waiter.join(WAIT_S)


def test_a_part_that_does_not_close_is_told_and_the_others_and_the_server_close(bed):
    def fail() -> None:
        raise OSError("the disk is full")

    closed = threading.Event()
    bed.coordinator.at_close(fail)
    bed.coordinator.at_close(closed.set)
    bed.coordinator.close()
    assert closed.is_set()
    assert bed.coordinator._server is None
    assert "did not close: OSError: the disk is full" in bed.shown()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", bed.port)) != 0


def _cannot_start(action: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_node_that_cannot_be_started_again_is_lost_and_others_are_still_found():
    config = ClusterConfig(heartbeat_s=0.1, reconnect_s=0.3, restarts=Restarts(workers=1))
    bed = Bed(config)
    try:
        bed.coordinator.replace_by(_cannot_start)
        bed.join_all()
        bed.nodes["worker:1"].client.close()
        assert bed.coordinator.wait(
            lambda s: s.members["worker:1"].status is NodeStatus.LOST, WAIT_S
        )
        assert "RuntimeError: can't start new thread" in bed.shown()
        bed.nodes["worker:0"].client.close()
        assert bed.coordinator.wait(lambda s: s.phase is ClusterPhase.FAILED, WAIT_S)
    finally:
        bed.close()


def test_each_attempt_that_cannot_be_begun_waits_for_a_tick_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(RestartBudget, "take", lambda *_: 0.0)
    bed = Bed(ClusterConfig(heartbeat_s=0.1, reconnect_s=0.3, restarts=Restarts(workers=1000)))
    ticks: list[int] = []
    tried_at: list[int] = []
    on_tick = ClusterState.on_tick

    def counted(state: ClusterState, now_s: float) -> list[Action]:
        ticks.append(0)
        return on_tick(state, now_s)

    def cannot_start(_: object) -> None:
        tried_at.append(len(ticks))
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ClusterState, "on_tick", counted)
    try:
        bed.coordinator.replace_by(cannot_start)
        bed.join_all()
        bed.nodes["worker:1"].client.close()
        assert bed.coordinator.wait(lambda s: len(tried_at) > 2, WAIT_S)
        assert len(set(tried_at)) == len(tried_at)
    finally:
        bed.close()


@pytest.mark.parametrize(("times", "phase"), [(1, "RUNNING"), (2, "FAILED"), (5, "FAILED")])
def test_an_error_in_the_search_for_silent_nodes_is_told_and_ends_a_cluster_that_repeats_it(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, times: int, phase: str
):
    bed.join_all()
    calls: queue.Queue[int] = queue.Queue()
    on_tick = ClusterState.on_tick

    def broken(state: ClusterState, now_s: float) -> list[Action]:
        calls.put(calls.qsize())
        if calls.qsize() <= times:
            raise KeyError("worker:9")
        return on_tick(state, now_s)

    monkeypatch.setattr(ClusterState, "on_tick", broken)
    assert bed.coordinator.wait(lambda s: calls.qsize() > 2, WAIT_S)
    wait_until(lambda: calls.qsize() > times, "a tick after the errors", WAIT_S)
    assert bed.coordinator.phase is ClusterPhase[phase]
    told = "cannot look for silent nodes: KeyError: 'worker:9'"
    assert bed.shown().count(told) == 1
    assert (phase == "FAILED") == any(told in each.message for each in bed.coordinator.failures())
