"""What the driver says of workers that have not trained a row yet."""

from __future__ import annotations

from typing import Any

import pytest

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id, running
from tfos.config import ClusterConfig, Restarts
from tfos.console.progress import TrainingProgress
from tfos.control import messages
from tfos.failure import EXECUTOR_LOST, NodeFailure
from tfos.monitor.training import sample, starting
from tfos.topology import plan


class Cluster:
    """Two workers and a server that run."""

    def __init__(self, config: ClusterConfig | None = None) -> None:
        self.state = running(plan(3, 1), config=config)
        self.seq = 0

    def tell(self, name: str, event: messages.Event, at_s: float) -> None:
        self.state.on_event(node_id(name), event, at_s)

    def beat(self, name: str, trained_rows: int = 0, attempt: int = 0, **progress: float) -> None:
        self.seq += 1
        feeds = (messages.FeedSnapshot("input", trained_rows=trained_rows),)
        beat = messages.Heartbeat(
            node_id(name, attempt), self.seq, "main_fun", progress=progress, feeds=feeds
        )
        self.state.on_heartbeat(beat, 0.0)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_the_activity_of_all_workers_is_one(cluster):
    for name, at_s in (("worker:0", 3.0), ("worker:1", 4.0)):
        cluster.tell(name, messages.PhaseChanged("main_fun: import tensorflow"), at_s)
    assert starting(cluster.state, 15.0) == "import tensorflow 12 s"
    cluster.tell("worker:1", messages.PhaseChanged("main_fun: import tensorflow"), 16.0)
    assert starting(cluster.state, 16.0) == "import tensorflow 13 s"  # since it began


def test_workers_that_do_different_things_are_counted(cluster):
    cluster.tell("worker:0", messages.PhaseChanged("main_fun: first step"), 10.0)
    cluster.tell("worker:1", messages.PhaseChanged("main_fun"), 4.0)
    assert starting(cluster.state, 15.0) == "first step 5 s (1), main_fun runs 11 s (1)"


def test_a_main_fun_that_may_train_without_a_report_is_not_told_as_a_start(cluster):
    for name in ("worker:0", "worker:1"):
        cluster.tell(name, messages.PhaseChanged("main_fun: import tensorflow"), 4.0)
    told = sample(cluster.state, "input", 15.0).starting
    assert told == "workers are starting: import tensorflow 11 s"
    cluster.tell("worker:1", messages.PhaseChanged("main_fun"), 14.0)
    told = sample(cluster.state, "input", 15.0).starting
    assert told == "workers: import tensorflow 11 s (1), main_fun runs 1 s (1)"
    cluster.tell("worker:0", messages.PhaseChanged("main_fun"), 15.0)
    assert sample(cluster.state, "input", 16.0).starting == "workers: main_fun runs 2 s"


def test_nothing_starts_any_more_once_a_row_is_trained(cluster):
    cluster.beat("worker:0", trained_rows=64)
    assert starting(cluster.state, 15.0) == ""
    assert sample(cluster.state, "input", 15.0).starting == ""


def test_the_end_of_an_epoch_brings_newer_numbers_than_the_last_heartbeat(cluster):
    cluster.beat("worker:0", 64, at_s=5.0, steps=1.0, loss=2.0, epochs_begun=1.0)
    stats = messages.FeedSnapshot("input", trained_rows=640)
    numbers = {"at_s": 6.0, "steps": 10.0, "loss": 0.5, "epochs_begun": 1.0}
    cluster.tell("worker:0", messages.FlushReached("input", 0, stats, numbers), 7.0)
    worker = sample(cluster.state, "input", 7.0).workers["worker:0.0"]
    assert (worker.rows, worker.steps, worker.loss) == (640, 10, 0.5)
    assert cluster.state.members["worker:0"].trained_rows == 640
    cluster.beat("worker:0", 640, at_s=8.0, steps=11.0, loss=0.4, epochs_begun=2.0)
    assert sample(cluster.state, "input", 8.0).workers["worker:0.0"].loss == 0.4
    last = messages.Done((stats,), progress={"at_s": 9.0, "steps": 20.0})
    cluster.tell("worker:0", last, 9.0)
    assert sample(cluster.state, "input", 9.0).workers["worker:0.0"].steps == 20


def test_without_a_feed_rows_are_what_main_fun_reports(cluster):
    cluster.beat("worker:0", 64, at_s=5.0, steps=1.0, rows=32.0)
    assert sample(cluster.state, None, 7.0).workers["worker:0.0"].rows == 32


@pytest.mark.parametrize("feed", ["input", None])
def test_rows_of_a_lost_attempt_stay_trained_and_its_successor_counts_from_nothing(
    feed: str | None,
):
    cluster = Cluster(ClusterConfig(restarts=Restarts(workers=1)))
    progress = TrainingProgress(num_epochs=2)
    begun: dict[str, Any] = {"epochs_begun": 1.0, "loss": 0.5}
    cluster.beat("worker:0", 600, at_s=5000.0, steps=60.0, rows=600.0, **begun)
    progress.start_epoch(1, sample(cluster.state, feed, 10.0))
    cluster.beat("worker:0", 640, at_s=5004.0, steps=64.0, rows=640.0, **begun)
    progress.add(sample(cluster.state, feed, 14.0))
    assert (progress.rows, progress.rows_per_s) == (40, 10)
    killed = NodeFailure(node_id("worker:0"), "h", 7, error_type=EXECUTOR_LOST)
    cluster.tell("worker:0", messages.Failed(killed), 15.0)
    progress.add(sample(cluster.state, feed, 15.0))
    assert (progress.rows, cluster.state.point(15.0).rows) == (40, 640)
    again = node_id("worker:0", 100)
    cluster.state.on_register(messages.Register(again, "1", "h", 8), 16.0)
    cluster.state.on_event(again, messages.Listening(Endpoint("h", 1)), 16.0)
    for at_s, rows in ((50.0, 0), (51.0, 20), (52.0, 40)):  # its host came up later
        numbers: dict[str, Any] = {
            "steps": rows / 10,
            "rows": float(rows),
            "epochs_begun": 1.0,
            "loss": 0.25,
        }
        cluster.beat("worker:0", rows, attempt=100, at_s=at_s, **numbers)
        progress.add(sample(cluster.state, feed, at_s - 20.0))
    assert (progress.rows, progress.rows_per_s, progress.loss) == (80, 20, 0.25)
    assert cluster.state.point(30.0)[1:3] == (68, 680)
