"""A cluster that another thread stops while it is fed: train() raises, whatever ended first."""

from __future__ import annotations

import functools
import io
import re
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from feeding.protocol.row_ranges import AcceptedRows
from feeding.sender.task import FeedReport, FeedTask
from ps.stats.server_stats import OpenRendezvous, ServerStats
from rpc.auth.handshake import Credentials
from rpc.endpoint import Endpoint
from tfos.config import Checkpoints, ClusterConfig, Restarts
from tfos.console.console import Console
from tfos.console.progress import TrainingProgress
from tfos.control import messages
from tfos.control.coordinator import Coordinator
from tfos.control.members import Member, NodeStatus
from tfos.control.state.actions import Action
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import FeedJobError, FeedTimeout, NodeFailedError, PhaseError
from tfos.failure import NodeFailure, NodeId
from tfos.feed.cluster_feeder import ClusterFeeder
from tfos.feed.epoch_feeder import EpochFeeder
from tfos.feed.request import EpochNumbers, FeedCall, FeedRequest
from tfos.feed.watch import FeedWatch
from tfos.phases import ClusterPhase
from tfos.spark.jobs import TaskCounts
from tfos.topology import plan

pytestmark = pytest.mark.fault("F16")
REQUEST = FeedRequest(
    data=types.SimpleNamespace(mapPartitionsWithIndex=None),
    feed="input",
    feed_timeout_s=60.0,
    num_epochs=1,
)
CALL = FeedCall("input", 0.0, lambda: False, EpochNumbers(), 60.0, 60.0)
CLOSED = RuntimeError("feeding.errors.FeedClosed: worker:0 takes no more rows")


class Cluster:
    """Two workers and a server that run, and stop in the two steps of an abort()."""

    def __init__(self) -> None:
        self.config, self.console = ClusterConfig(), Console(enabled=False)
        self.coordinator = Coordinator(plan(3, 1), self.config, self.console)
        self.coordinator.act(self._start)
        self.thread: threading.Thread | None = None

    def _start(self, state: ClusterState) -> list[Action]:
        state.move(ClusterPhase.RESERVED)
        nodes = [NodeId(each.role, each.index, 0) for each in state.plan.nodes]
        for node in nodes:
            state.on_register(messages.Register(node, "0", "host", 1000), 0.0)
        for node in nodes:
            state.on_event(node, messages.Listening(Endpoint("127.0.0.1", 1)), 0.0)
        return []

    def serve(self, *waits: OpenRendezvous) -> None:
        """Have ps:0 report at what rendezvous workers wait."""
        stats = msgspec.msgpack.encode(ServerStats(0, "SERVING", 1, 1.0, open_rendezvous=waits))
        beat = messages.Heartbeat(NodeId("ps", 0, 0), 1, "serving", stats=stats)

        def report(state: ClusterState) -> list[Action]:
            state.on_heartbeat(beat, 0.0)
            return []

        self.coordinator.act(report)

    def stop(self, members: Callable[[ClusterView], list[Member]]) -> None:
        """Tell nodes to stop; they end at once."""

        def stop(state: ClusterState) -> list[Action]:
            found = members(state)
            actions = state.end(found, "the test wants it", grace_s=1.0)
            for member in found:
                member.status = NodeStatus.ENDED
            return actions

        self.coordinator.act(stop)

    def stop_workers(self) -> None:
        """Begin an abort(), and come to its end while somebody waits; until then it is RUNNING."""

        def end() -> None:
            self.stop(lambda state: state.servers)
            self.coordinator.close()

        self.stop(lambda state: state.workers)
        self.thread = threading.Timer(0.05, end)
        self.thread.start()

    def fail(self) -> None:
        """Fail because of worker:0; the others end at once."""
        node = NodeId("worker", 0, 0)
        failure = NodeFailure(node, "host", 1, "ZeroDivisionError", "the loss is gone")

        def fail(state: ClusterState) -> list[Action]:
            actions = state.fail(failure)
            for member in state.live():
                member.status = NodeStatus.ENDED
            return actions

        self.coordinator.act(fail)

    def jobs(self, feed: Callable[[FeedTask], list[FeedReport]]) -> ClusterFeeder:
        of_all = (self.coordinator, self.config, self.console)
        watch = FeedWatch(*of_all)
        epochs: Any = EpochFeeder(
            None, self.coordinator, Credentials.generate(), self.config, self.console, watch
        )
        epochs._feed = lambda run, task: feed(task)
        return ClusterFeeder("c", epochs, watch, *of_all)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    if made.thread is not None:
        made.thread.join()
    made.coordinator.close()


def failure_of(cluster: Cluster, error: Exception) -> Exception:
    watch = FeedWatch(cluster.coordinator, cluster.config, cluster.console)
    return watch.failure(CALL, error)


def test_a_job_that_fails_before_the_phase_changes_is_a_symptom_of_the_stop(cluster, monkeypatch):
    monkeypatch.setattr("tfos.feed.watch._BLAME_S", 0.0)  # a stop that has begun is waited for
    cluster.stop_workers()
    found = failure_of(cluster, CLOSED)
    assert isinstance(found, PhaseError)
    assert "the cluster became CLOSED while it was fed" in str(found)


def test_a_job_that_fails_is_a_symptom_of_a_node_that_failed(cluster):
    cluster.fail()
    assert isinstance(failure_of(cluster, CLOSED), NodeFailedError)


def test_rows_that_do_not_fit_are_told_although_the_cluster_is_being_stopped(cluster):
    cluster.stop_workers()
    found = failure_of(cluster, RuntimeError("feeding.errors.RowError: row 3 has no image"))
    assert isinstance(found, FeedJobError)
    assert "row 3 has no image" in str(found)


def test_an_epoch_that_finds_the_workers_stopped_is_no_empty_report(cluster):
    cluster.stop_workers()
    with pytest.raises(PhaseError, match="the cluster became CLOSED while it was fed"):
        cluster.jobs(lambda task: []).train(REQUEST)


def test_an_epoch_that_begins_as_the_cluster_has_failed_is_no_empty_report(cluster):
    """train() found it running; every main_fun raised before the epoch had its workers."""
    cluster.fail()
    with pytest.raises(NodeFailedError, match="the loss is gone"):
        cluster.jobs(lambda task: []).train(REQUEST)


def test_workers_that_are_stopped_before_they_trained_what_they_accepted(cluster):
    def accepted(task: FeedTask) -> list[FeedReport]:
        cluster.stop_workers()
        rows = AcceptedRows([(0, 30, 0)]).pack()
        return [FeedReport(0, rows=30, partition_rows=30, accepted={0: rows})]

    with pytest.raises(PhaseError, match="the cluster became CLOSED while it was fed"):
        cluster.jobs(accepted).train(REQUEST)


TIMED_OUT = "feeding.errors.FeedTimeout: no worker consumed anything of feed 'input' for 600 s: x"


@pytest.mark.parametrize(
    ("reason", "key", "text"),
    [
        (TIMED_OUT, "fit/0/begin", "'fit/0/begin' waits for worker 1 since 595 s: .*feed_timeout"),
        (TIMED_OUT, "", "600 s: x$"),
        ("ValueError: no column y", "fit/0/begin", "no column y$"),
    ],
)
def test_a_feed_that_nobody_takes_names_for_whom_the_others_wait(
    cluster, monkeypatch, reason, key, text
):
    monkeypatch.setattr("tfos.feed.watch._BLAME_S", 0.0)
    cluster.serve(*([OpenRendezvous(key, 595.0, (1,))] if key else []))
    found = failure_of(cluster, RuntimeError(reason))
    assert isinstance(found, FeedTimeout if reason == TIMED_OUT else FeedJobError)
    assert re.search(text, str(found)), str(found)


def test_a_chief_that_is_silent_is_not_told_as_rows_that_nobody_takes(cluster, monkeypatch):
    monkeypatch.setattr("tfos.feed.watch._LOOK_S", 0.01)
    watch = FeedWatch(cluster.coordinator, cluster.config, cluster.console)
    progress = TrainingProgress(1)
    with pytest.raises(FeedTimeout, match="epoch 1 of 'input' waits for the chief") as told:
        watch.until(lambda _: False, CALL, progress, stall_s=0.02, of_chief=True)
    assert "If validation is that slow raise feed_timeout=60;" in str(told.value)
    assert "Checkpoints(timeout_s=...)" in str(told.value)


def test_a_feed_whose_slots_other_fits_hold_waits_for_them_and_says_so(cluster, monkeypatch):
    monkeypatch.setattr("tfos.feed.watch._LOOK_S", 0.01)
    monkeypatch.setattr("tfos.feed.watch.SHARED_SLOTS_S", 0.3)
    shared, out = replace(cluster.config, shares_slots=True), io.StringIO()
    watch = FeedWatch(cluster.coordinator, shared, Console(stream=out, enabled=False))
    job: Any = types.SimpleNamespace(tasks=TaskCounts(8, 2, 0))
    until = functools.partial(
        watch.until, lambda _: False, CALL, TrainingProgress(1), job=job, stall_s=0.02
    )
    with pytest.raises(FeedTimeout, match=r"run no task for 0 s \(2 of 8 ended\): other jobs"):
        until()
    assert out.getvalue().count("It goes on once one is free") == 1
    job.tasks = None  # all tasks have ended: it is workers that stand still
    monkeypatch.setattr("tfos.feed.watch.SHARED_SLOTS_S", 1e6)
    with pytest.raises(FeedTimeout, match="no worker took a row"):
        until()


def test_a_feed_whose_tasks_run_is_left_to_their_own_limits(cluster, monkeypatch):
    """They see each row that is taken; a worker's heartbeat tells of it later, or of a long step
    nothing at all.
    """
    monkeypatch.setattr("tfos.feed.watch._LOOK_S", 0.0)
    now_s = iter(range(1000))
    monkeypatch.setattr("tfos.feed.watch.time", types.SimpleNamespace(monotonic=now_s.__next__))
    watch = FeedWatch(cluster.coordinator, cluster.config, cluster.console)
    job: Any = types.SimpleNamespace(tasks=TaskCounts(8, 2, 1))
    looks = iter([False] * 60)
    watch.until(lambda _: next(looks, True), CALL, TrainingProgress(1), job=job, stall_s=5.0)
    assert next(now_s) > 20, "it stood still for longer than that"


@pytest.mark.parametrize("shares", [True, False])
def test_an_epoch_is_fed_in_waves_where_other_fits_need_slots(cluster, shares):
    config = replace(cluster.config, shares_slots=shares)
    watch = FeedWatch(cluster.coordinator, config, cluster.console)
    of_all = (cluster.coordinator, Credentials.generate(), config, cluster.console)
    assert (EpochFeeder(None, *of_all, watch)._waves() is not None) is shares


def test_an_epoch_that_stalls_names_for_whom_workers_wait(cluster):
    cluster.serve(OpenRendezvous("fit/1/begin", 9.0, (1,)))
    watch = FeedWatch(cluster.coordinator, cluster.config, cluster.console)
    text = str(watch._stalled(CALL, 5.0, None))
    assert "no worker took a row or made a step for 5 s" in text
    assert "rendezvous 'fit/1/begin' waits for worker 1 since 9 s: a fit begins once" in text


def test_an_epoch_that_stalls_while_a_worker_is_started_again_names_that_worker(cluster):
    config = replace(cluster.config, restarts=Restarts(workers=1))
    coordinator = Coordinator(plan(2, 1), config, cluster.console)
    coordinator.act(lambda state: cluster._start(state))
    killed = NodeFailure(NodeId("worker", 0, 0), "host", 1, message="killed", signal=9)
    coordinator.act(lambda state: state.on_event(killed.node, messages.Failed(killed), 0.0))
    text = str(FeedWatch(coordinator, config, cluster.console)._stalled(CALL, 5.0, None))
    assert re.search(r"has not ended at worker:0 \(.*; lost, is started again\)\. If", text), text


def test_an_epoch_that_stalls_names_the_limit_that_checkpoints_have_raised(cluster):
    saves = Checkpoints(directory="/runs/7", keep_best="loss", timeout_s=600.0)
    config = replace(cluster.config, checkpoints=saves)
    watch = FeedWatch(cluster.coordinator, config, cluster.console)
    text = str(watch._stalled(CALL, saves.limit_s, None))
    assert "for 1530 s" in text
    assert (
        "If steps are that slow raise Checkpoints(timeout_s=600), or feed_timeout=60 above the "
        "1530 s that follow" in text
    )
    assert "If steps are that slow raise feed_timeout=60;" in str(watch._stalled(CALL, 60.0, None))


@pytest.mark.parametrize("raises", [True, False])
def test_a_task_that_waited_longer_than_feed_timeout_says_whose_limit_it_was(
    cluster, monkeypatch, raises
):
    monkeypatch.setattr("tfos.feed.watch._BLAME_S", 0.0)
    saves = Checkpoints(directory="/runs/7", keep_best="loss" if raises else None, timeout_s=600.0)
    watch = FeedWatch(
        cluster.coordinator, replace(cluster.config, checkpoints=saves), cluster.console
    )
    reason = TIMED_OUT.replace("600", "1530")
    call = replace(CALL, limit_s=saves.limit_s if raises else 60.0)
    failure = watch.failure(call, RuntimeError(reason))
    assert isinstance(failure, FeedTimeout)
    text = str(failure)
    assert ("feed_timeout=60 was raised to 1530 s by Checkpoints(timeout_s=600)" in text) is raises
