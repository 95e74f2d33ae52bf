"""The order of a cluster's end, and how long each part of it may take."""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.auth.handshake import Credentials
from tests.support.cluster_states import node_id, report_to, running
from tfos.config import ClusterConfig, Restarts
from tfos.console.console import Console
from tfos.control import messages
from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.state.actions import Action, Send
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.node_jobs import NodeJobs
from tfos.driver.shutdown import Shutdown
from tfos.errors import NodeFailedError, ShutdownTimeout
from tfos.failure import NODE_JOB_FAILED, NodeFailure
from tfos.phases import ClusterPhase
from tfos.spark.jobs import JVM_ENDED, SparkJob
from tfos.topology import plan

DEADLINE_S = 60.0
GRACE_S = 600.0
"""While it passes, main_fun returns."""


class Jobs(NodeJobs):
    """Jobs that bring the workers' values for some looks."""

    def __init__(self, looks: int = 0) -> None:
        self.looks = looks
        self.looks_at_end = -1
        self.on_first_look: Callable[[], None] = lambda: None

    def is_bringing(self, ended: Collection[str]) -> bool:
        if self.looks and "worker:0" in ended:
            self.looks -= 1
            first, self.on_first_look = self.on_first_look, lambda: None
            first()
            return True
        return False

    def end(self, timeout_s: float) -> bool:
        self.looks_at_end = self.looks
        return True


class Waits(Coordinator):
    """A coordinator of a worker and a server that notes how long is waited, and waits not."""

    def __init__(self, config: ClusterConfig) -> None:
        self.shown = io.StringIO()
        super().__init__(plan(2, 1), config, Console(enabled=False, stream=self.shown))
        self._state = running(plan(2, 1), config=config)
        self.waited_s: list[float] = []

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        if timeout_s == GRACE_S:
            self.returns()
        return self.read(done)

    def raises(self, error_type: str = "ValueError") -> None:
        failure = NodeFailure(
            node_id("worker:0"), "host-b", 7, error_type=error_type, message="bad row"
        )
        report_to(self, node_id("worker:0"), messages.Failed(failure))

    def returns(self, *, hands_over: bool = False) -> None:
        report_to(self, node_id("worker:0"), messages.Done(hands_over=hands_over))


class Stops(Waits):
    """One whose worker stops as it is told."""

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        if self.read(lambda state: state.workers[0].stop_ordered):
            self.on_stream_opened(node_id("worker:0"), 1)
            self.on_stream_closed(node_id("worker:0"), 1)
        return super().wait(done, timeout_s)


class Tells(Waits):
    """One whose nodes do not stop; it notes in order whom it tells to stop, and its waits."""

    def __init__(self, config: ClusterConfig) -> None:
        self.told: list[object] = []
        super().__init__(config)

    def act(self, decide: Callable[[ClusterState], list[Action]]) -> None:
        def noted(state: ClusterState) -> list[Action]:
            actions = decide(state)
            self.told += [
                (each.node.role, each.order.grace_s, each.order.is_orderly)
                for each in actions
                if isinstance(each, Send) and isinstance(each.order, messages.Stop)
            ]
            return actions

        super().act(noted)

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        self.told.append(pytest.approx(timeout_s, abs=4.0))  # a busy machine's clock goes on
        return super().wait(done, timeout_s)


def shutdown_of(coordinator: Waits, config: ClusterConfig, jobs: Jobs | None = None) -> Shutdown:
    made = Shutdown(coordinator, config, coordinator._console, Credentials("c", b"k" * 32))
    made.begin(jobs or Jobs())
    return made


@pytest.mark.parametrize("abort_s", [1.0, 3.0, 8.0, 10.0, 60.0])
@pytest.mark.parametrize("grace_s", [0.0, 30.0])
def test_exit_handlers_of_a_worker_have_their_grace_before_the_servers_are_stopped(
    abort_s: float, grace_s: float
):
    config = ClusterConfig(abort_s=abort_s)
    coordinator = Waits(config)
    coordinator.returns()
    shutdown_of(coordinator, config).shutdown((), grace_s=grace_s, timeout_s=math.inf)
    stops_s = coordinator.waited_s[-3]  # then the servers', and that of the values
    assert stops_s == pytest.approx(max(0.6 * abort_s, max(5.0, grace_s) + 1.0))


@pytest.mark.parametrize("is_orderly", [False, True])
def test_servers_are_stopped_behind_the_workers_and_who_does_not_end_is_named(is_orderly: bool):
    config = ClusterConfig(abort_s=100.0)
    coordinator = Tells(config)
    ending = shutdown_of(coordinator, config)
    if is_orderly:
        coordinator.returns()
        coordinator.told.clear()
        ending.shutdown((), grace_s=0.0, timeout_s=math.inf)
    else:
        ending.abort("nobody needs it")
    grace_s = 5.0 if is_orderly else 2.0
    at = coordinator.told.index(("worker", grace_s, is_orderly))
    servers = coordinator.told.index(("ps", grace_s, False))
    assert coordinator.told[at + 1] == 60.0
    assert at + 1 < servers < coordinator.told.index(70.0)
    assert coordinator._console.flush(DEADLINE_S)
    assert "ps:0, worker:0 did not confirm the stop within 100 s" in coordinator.shown.getvalue()


@pytest.mark.parametrize(
    ("hands_over", "is_lost", "looks_left"),
    [
        (True, False, 0),
        (False, False, 5),  # nothing comes: a task that Spark repeats may wait for a slot
        (True, True, 5),  # nor from a host that was lost after main_fun had returned
    ],
)
def test_values_of_ended_workers_are_awaited_before_their_jobs_are_cancelled(
    hands_over: bool, is_lost: bool, looks_left: int
):
    config, jobs = ClusterConfig(), Jobs(looks=5)
    coordinator = Stops(config)
    coordinator.returns(hands_over=hands_over)
    if is_lost:
        coordinator._state.workers[0].status = NodeStatus.LOST
    shutdown_of(coordinator, config, jobs).shutdown((), grace_s=0.0, timeout_s=math.inf)
    assert jobs.looks_at_end == looks_left


def test_an_abort_ends_the_wait_for_values():
    config, jobs = ClusterConfig(), Jobs(looks=200_000)
    coordinator = Stops(config)
    coordinator.returns(hands_over=True)
    ending = shutdown_of(coordinator, config, jobs)
    aborts = threading.Thread(target=ending.abort, args=("Ctrl-C",))
    jobs.on_first_look = aborts.start
    ending.shutdown((), grace_s=0.0, timeout_s=math.inf)
    aborts.join(DEADLINE_S)
    assert jobs.looks_at_end > 0
    assert not aborts.is_alive()


@pytest.mark.parametrize(
    ("is_ended", "ended", "is_bringing"),
    [
        (False, {"worker:0", "worker:1"}, True),
        (False, {"worker:0"}, False),  # the other one is lost: its job may never end
        (True, {"worker:0", "worker:1"}, False),
    ],
)
def test_a_job_brings_values_until_it_ends_if_all_its_nodes_have_ended_well(
    is_ended: bool, ended: set[str], is_bringing: bool
):
    jobs = object.__new__(NodeJobs)
    job: SparkJob[Any] = SparkJob(None, "tag", "", list, lambda job: None)
    if is_ended:
        job._ended.set()
    jobs._jobs = {job: plan(2, 0).workers}
    assert jobs.is_bringing(ended) is is_bringing


class _Gone:
    """A JVM that has ended."""

    @property
    def java(self) -> None:
        raise ConnectionRefusedError(111, "Connection refused")


def test_values_that_a_job_has_not_brought_are_told_with_the_reason():
    jobs = object.__new__(NodeJobs)
    job: SparkJob[Any] = SparkJob(None, "tag", "", list, lambda job: None)
    jobs._jobs, jobs._sc = {job: plan(1, 0).workers}, SimpleNamespace(_jvm=_Gone())
    assert jobs.lost_values() == {}
    job.error = ConnectionRefusedError(111, "Connection refused")
    assert jobs.lost_values() == {"worker:0": JVM_ENDED}
    job._cancelled = True
    assert jobs.lost_values()["worker:0"].startswith("Spark had not brought them when")


def test_a_main_fun_that_is_late_is_named_and_given_no_grace():
    config = ClusterConfig()
    coordinator = Waits(config)
    with pytest.raises(ShutdownTimeout, match=r"within 0.001 s on worker:0@host-b \("):
        shutdown_of(coordinator, config).shutdown((), grace_s=GRACE_S, timeout_s=0.001)
    assert GRACE_S not in coordinator.waited_s


def test_the_parameters_are_saved_where_a_late_main_fun_is_that_of_a_chief_that_is_started_again(
    monkeypatch,
):
    saved: list[float] = []
    monkeypatch.setattr(
        "tfos.driver.final_checkpoint.FinalCheckpoint.save", lambda _, timeout_s: saved.append(0.0)
    )
    config = ClusterConfig(restarts=Restarts(workers=1), save_on_interrupt="/saves")
    coordinator = Waits(config)
    killed = NodeFailure(node_id("worker:0"), "host-b", 7, message="killed", signal=9)
    report_to(coordinator, node_id("worker:0"), messages.Failed(killed))
    with pytest.raises(ShutdownTimeout, match="on worker:0@host-b"):
        shutdown_of(coordinator, config).shutdown((), grace_s=0.0, timeout_s=0.001)
    assert saved


@pytest.mark.fault("F03")
@pytest.mark.parametrize("is_raised", [True, False])
def test_a_program_that_ends_without_a_call_that_raises_a_failure_is_warned_of_it(is_raised: bool):
    config = ClusterConfig()
    coordinator = Waits(config)
    ending = shutdown_of(coordinator, config)
    coordinator.raises()
    if is_raised:
        with pytest.raises(NodeFailedError, match="bad row"), ending.raising():
            ending.raise_failure()
    ending._at_exit()
    told = "which no call has raised: ValueError: bad row; failed: worker:0 (host-b"
    assert (told in coordinator.shown.getvalue()) is not is_raised
    assert "main_fun still runs" not in coordinator.shown.getvalue()


@pytest.mark.fault("F03")
def test_a_failure_that_an_abort_has_hidden_is_told_once_when_the_program_ends(monkeypatch):
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", lambda call, *_: at_exit.append(call))
    config = ClusterConfig()
    coordinator = Waits(config)
    ending = shutdown_of(coordinator, config)
    coordinator.raises()
    ending.abort("its Spark job was cancelled")
    assert "which no call has raised" not in coordinator.shown.getvalue()
    for _ in range(2):
        at_exit[-1]()
    assert coordinator.shown.getvalue().count("which no call has raised: ValueError: bad row") == 1


@pytest.mark.fault("F03")
@pytest.mark.parametrize("has_failed", [True, False])
def test_a_cluster_is_closed_as_failed_if_it_has(has_failed, monkeypatch):
    monkeypatch.setattr("atexit.register", lambda *_: None)
    config = ClusterConfig()
    coordinator = Waits(config)
    ending = shutdown_of(coordinator, config)
    if has_failed:
        coordinator.raises()
    ending.abort("its Spark job was cancelled")
    assert coordinator.phase is (ClusterPhase.FAILED if has_failed else ClusterPhase.CLOSED)


@pytest.mark.fault("F03")
def test_a_failure_is_raised_once_all_records_of_it_may_be_there():
    config = ClusterConfig()
    coordinator = Waits(config)
    ending = shutdown_of(coordinator, config)
    ending.raise_failure()
    coordinator.raises()
    with pytest.raises(NodeFailedError, match="bad row"):
        ending.raise_failure()
    assert coordinator.waited_s == [config.abort_s]
    with pytest.raises(NodeFailedError, match="bad row"), ending.raising():
        ending.shutdown((), grace_s=0.0, timeout_s=60.0)
    coordinator.waited_s.clear()
    ending.shutdown((), grace_s=0.0, timeout_s=60.0)  # its user has seen it
    assert coordinator.waited_s == []


@pytest.mark.fault("F16")
@pytest.mark.parametrize("has_returned", [True, False])
def test_a_program_that_ends_while_main_fun_runs_is_warned_that_it_stops_it(has_returned: bool):
    config = ClusterConfig()
    coordinator = Waits(config)
    ending = shutdown_of(coordinator, config)
    if has_returned:
        coordinator.returns()
    ending._at_exit()
    told = "main_fun still runs on worker:0@host-b, and stops it: call cluster.shutdown()"
    assert (told in coordinator.shown.getvalue()) is not has_returned


@pytest.mark.fault("F15")
@pytest.mark.parametrize("has_failed", [True, False])
def test_a_program_that_an_interrupt_ends_is_not_told_what_its_user_knows(monkeypatch, has_failed):
    monkeypatch.setattr("sys.last_value", KeyboardInterrupt(), raising=False)
    config = ClusterConfig()
    coordinator = Waits(config)
    ending = shutdown_of(coordinator, config)
    if has_failed:
        coordinator.raises(NODE_JOB_FAILED)
    ending._at_exit()
    told = coordinator.shown.getvalue()
    assert "main_fun still runs" not in told
    assert "which no call has raised" not in told


@pytest.mark.fault("F16")
def test_a_forked_child_that_ends_leaves_the_cluster_to_its_parent(monkeypatch):
    """A program, or a cell, forks inside of `with cluster`; the child ends by sys.exit."""
    config = ClusterConfig()
    coordinator = Waits(config)
    ending = shutdown_of(coordinator, config)
    coordinator.raises()
    own = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: own + 1)
    in_child = ending.is_abandoned  # by which the end of a `with` block aborts nothing
    ending.tell_failure(is_interrupted=False)
    ending._at_exit()
    with monkeypatch.context() as patched:
        patched.setattr("tfos.driver.shutdown.InterruptibleCall", pytest.fail)
        ending._close_unused()  # the frame of an unused cluster ends with the child
    assert coordinator.waited_s == []
    assert coordinator.shown.getvalue() == ""
    monkeypatch.setattr("os.getpid", lambda: own)
    assert (in_child, ending.is_abandoned) == (True, False)
    ending._at_exit()
    assert coordinator.waited_s
    assert "ValueError: bad row" in coordinator.shown.getvalue()
