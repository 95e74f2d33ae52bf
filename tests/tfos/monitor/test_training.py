"""What the driver says of workers that have not trained a row yet."""

from __future__ import annotations

import pytest

from tests.support.cluster_states import node_id, running
from tfos.control import messages
from tfos.monitor.training import sample, starting
from tfos.topology import plan


class Cluster:
    """Two workers and a server that run."""

    def __init__(self) -> None:
        self.state = running(plan(3, 1))
        self.seq = 0

    def tell(self, name: str, event: messages.Event, at_s: float) -> None:
        self.state.on_event(node_id(name), event, at_s)

    def beat(self, name: str, trained_rows: int = 0, **progress: float) -> None:
        self.seq += 1
        feeds = (messages.FeedSnapshot("input", trained_rows=trained_rows),)
        beat = messages.Heartbeat(
            node_id(name), self.seq, "main_fun", progress=progress, feeds=feeds
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
    worker = sample(cluster.state, "input", 7.0).workers["worker:0"]
    assert (worker.rows, worker.steps, worker.loss) == (640, 10, 0.5)
    assert cluster.state.members["worker:0"].trained_rows == 640
    cluster.beat("worker:0", 640, at_s=8.0, steps=11.0, loss=0.4, epochs_begun=2.0)
    assert sample(cluster.state, "input", 8.0).workers["worker:0"].loss == 0.4
    last = messages.Done((stats,), progress={"at_s": 9.0, "steps": 20.0})
    cluster.tell("worker:0", last, 9.0)
    assert sample(cluster.state, "input", 9.0).workers["worker:0"].steps == 20


def test_without_a_feed_rows_are_what_main_fun_reports(cluster):
    cluster.beat("worker:0", 64, at_s=5.0, steps=1.0, rows=32.0)
    assert sample(cluster.state, None, 7.0).workers["worker:0"].rows == 32
