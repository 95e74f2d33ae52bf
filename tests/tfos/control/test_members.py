"""The driver's record of one node: what is newer of what overtakes, what a new attempt has."""

from __future__ import annotations

from typing import Any

import pytest

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id
from tfos.control.members import Member, NodeStatus, mean_loss
from tfos.control.messages import (
    BatchReport,
    Done,
    FeedSnapshot,
    FlushReached,
    Heartbeat,
    InCollective,
    PhaseChanged,
    Register,
    StrategyBuilt,
)
from tfos.failure import NodeFailure, NodeId
from tfos.topology import plan

WORKER = node_id("worker:0")
SIGSEGV, SIGTERM = 11, 15


def member(attempt: int = 0) -> Member:
    found = Member(plan(2, 1).workers[0])
    found.take(register(attempt), 10.0)
    return found


def register(attempt: int) -> Register:
    node = NodeId(WORKER.role, WORKER.index, attempt)
    return Register(node=node, executor_id="5", host="host-b", pid=7)


def beat(seq: int, phase: str = "training", **progress: float) -> Heartbeat:
    return Heartbeat(WORKER, seq, phase, progress=progress)


def failure(message: str, attempt: int = 0, **fields: Any) -> NodeFailure:
    node = NodeId(WORKER.role, WORKER.index, attempt)
    return NodeFailure(node, "host-b", 7, message=message, **fields)


def test_a_heartbeat_that_a_newer_one_has_overtaken_says_nothing():
    worker = member()
    for seq, steps in ((1, 10.0), (3, 30.0), (2, 20.0), (3, 99.0)):
        worker.take_heartbeat(beat(seq, f"phase {seq}", steps=steps), 10.0 + seq)
    assert worker.progress == {"steps": 30.0}
    assert (worker.phase, worker.phase_since_s) == ("phase 3", 13.0)


def test_a_phase_lasts_from_the_first_word_of_it_and_a_beat_without_one_changes_none():
    worker = member()
    worker.note(PhaseChanged("training"), 20.0)
    worker.take_heartbeat(beat(1, "training"), 30.0)
    worker.take_heartbeat(beat(2, ""), 40.0)
    assert (worker.phase, worker.phase_since_s) == ("training", 20.0)


def test_a_node_moves_only_by_what_its_numbers_show():
    worker = member()
    for seq, steps in ((1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)):
        worker.take_heartbeat(beat(seq, steps=steps), 10.0 * seq)
    assert worker.moved_s == 30.0


@pytest.mark.parametrize(
    ("ends", "kept"),
    [
        ([("lost", None), ("killed", SIGSEGV)], "killed"),
        ([("killed", SIGSEGV), ("lost", None)], "killed"),
        ([("killed", SIGSEGV), ("killed again", SIGSEGV)], "killed"),
        ([("lost", None), ("silent", None)], "lost"),
        ([("lost", None), ("stopped", SIGTERM)], "lost"),
    ],
)
def test_an_attempt_has_ended_as_its_first_record_says_or_the_first_of_a_crash(ends, kept):
    worker = member()
    for message, number in ends:
        worker.ends_by(failure(message, signal=number))
    assert worker.loss.message == kept
    assert (worker.crash is None) is (kept == "lost")


def test_how_another_attempt_has_ended_says_nothing_of_this_one():
    worker = member(attempt=1)
    worker.ends_by(failure("killed", signal=SIGSEGV))
    assert (worker.end, worker.crash) == (None, None)
    assert worker.loss.message == "worker:0 was lost"
    assert worker.loss.node.attempt == 1


def test_the_newest_epoch_of_a_feed_stays_whichever_report_comes_last():
    worker = member()
    for epoch in (0, 2, 1):
        worker.note(FlushReached("input", epoch), 20.0 + epoch)
    assert worker.flushes["input"].epoch == 2
    assert worker.moved_s == 22.0


def test_the_newest_answers_of_a_chief_are_kept():
    chief = member()
    for number in (*range(1, 70), 3):
        chief.note(BatchReport("input", number, True, {}), 20.0)
    chief.note(BatchReport("input", 69, False, {}), 20.0)
    assert sorted(chief.batches["input"]) == [*range(6, 70)]
    assert not chief.batches["input"][69].is_done


def test_the_newest_numbers_are_those_of_the_workers_own_clock():
    worker = member()
    worker.take_heartbeat(beat(1, at_s=5.0, loss=0.5), 20.0)
    worker.note(FlushReached("input", 0, progress={"at_s": 7.0, "loss": 0.25}), 21.0)
    assert worker.progress["loss"] == 0.25
    worker.done = Done(progress={"at_s": 9.0, "loss": 0.125})
    assert worker.progress["loss"] == 0.125


def test_the_newest_counts_of_a_feed_are_those_of_the_most_rows():
    worker = member()
    beats = (FeedSnapshot("input", trained_rows=80, dropped_rows=1), FeedSnapshot("other"))
    worker.take_heartbeat(Heartbeat(WORKER, 1, "training", feeds=beats), 20.0)
    worker.note(FlushReached("input", 0, FeedSnapshot("input", trained_rows=96)), 21.0)
    worker.last_feeds = (FeedSnapshot("input", trained_rows=90, is_drained=True),)
    assert worker.feed("input").trained_rows == 96
    assert {each.feed for each in worker.feeds} == {"input", "other"}
    assert worker.trained_rows == 96
    assert not worker.reads("input")
    assert worker.reads("other")


def test_a_new_attempt_has_nothing_of_the_last_one():
    worker = member()
    worker.take_heartbeat(beat(9, steps=90.0), 20.0)
    worker.note(FlushReached("input", 4), 20.0)
    worker.note(BatchReport("", 0, True, {}), 20.0)
    for event in (InCollective(2), StrategyBuilt()):
        worker.note(event, 20.0)
    worker.ends_by(failure("killed", signal=SIGSEGV))
    worker.endpoint, worker.free_port = Endpoint("host-b", 9), 10
    worker.last_feeds = (FeedSnapshot("input"),)
    worker.done, worker.is_unheard, worker.stop_ordered = Done(), True, True
    worker.stream, worker.stream_lost_s, worker.last_report = 2, 19.0, 8
    worker.num_tied = 0  # asked for only in a collective
    worker.take(register(1), 30.0)
    assert worker == Member(
        worker.planned,
        NodeStatus.REGISTERED,
        attempt=1,
        executor_id="5",
        host="host-b",
        pid=7,
        phase="registered",
        phase_since_s=30.0,
        registered_s=30.0,
        heard_s=30.0,
        moved_s=30.0,
    )


def test_a_lost_worker_has_no_part_in_the_loss():
    workers = [member() for _ in range(3)]
    for number, worker in enumerate(workers):
        worker.take_heartbeat(beat(1, loss=float(number)), 20.0)
    assert mean_loss(workers) == 1.0
    workers[2].status = NodeStatus.LOST
    workers[1].status = NodeStatus.DONE
    assert mean_loss(workers) == 0.5
    assert mean_loss(workers[2:]) is None


def test_a_copy_stays_as_it_is_when_the_node_goes_on():
    worker = member()
    worker.take_heartbeat(beat(1, steps=1.0), 20.0)
    worker.note(FlushReached("input", 0), 20.0)
    worker.note(BatchReport("input", 1, True, {}), 20.0)
    copied = worker.copied()
    assert copied == worker
    worker.take_heartbeat(beat(2, steps=2.0), 21.0)
    worker.note(FlushReached("other", 1), 21.0)
    worker.note(BatchReport("input", 2, True, {}), 21.0)
    assert copied.progress == {"steps": 1.0}
    assert (len(copied.beats), [*copied.flushes], [*copied.batches["input"]]) == (1, ["input"], [1])


def test_the_record_of_a_lost_attempt_stays_when_another_one_registers():
    worker = member()
    worker.take_heartbeat(beat(1, steps=1.0), 20.0)
    lost = worker.as_lost(is_first=False)
    worker.take(register(1), 30.0)
    assert (lost.status, lost.attempt, lost.progress) == (NodeStatus.LOST, 0, {"steps": 1.0})
    assert lost.loss.message == "worker:0 was lost"
