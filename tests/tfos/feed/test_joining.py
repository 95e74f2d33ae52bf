"""Workers that are started again while rows are fed: which attempt has trained what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from feeding.protocol.row_ranges import AcceptedRows
from feeding.sender.task import FeedReport
from feeding.sender.worker_link import process_key
from rpc.endpoint import Endpoint
from tfos.config import ClusterConfig, Restarts
from tfos.control import messages
from tfos.control.state.cluster_state import ClusterState
from tfos.failure import NodeFailure, NodeId
from tfos.feed.epoch import EpochFeed, targets_of
from tfos.feed.request import EpochNumbers, FeedCall
from tfos.phases import ClusterPhase
from tfos.topology import plan

FIRST, SECOND = process_key(1, 0), process_key(1, 100)


def counted(trained: int) -> messages.FlushReached:
    counts = messages.EpochRowCounts(0, trained, trained)
    return messages.FlushReached("input", 0, messages.FeedSnapshot("input", epochs=(counts,)))


def worker(index: int, attempt: int = 0) -> NodeId:
    return NodeId("worker", index, attempt)


def comes(state: ClusterState, node: NodeId) -> None:
    state.on_register(messages.Register(node, "0", "host", 1 + node.attempt), 0.0)
    state.on_event(node, messages.Listening(Endpoint("h", 1)), 0.0)


@pytest.mark.fault("F01")
def test_the_attempts_of_a_worker_count_apart():
    state = ClusterState(plan(2, 0), ClusterConfig(restarts=Restarts(workers=1)))
    state.move(ClusterPhase.RESERVED)
    for index in range(2):
        comes(state, worker(index))
    task: Any = SimpleNamespace(feed="input", epoch=0)
    call = FeedCall("input", 0.0, lambda: False, EpochNumbers(), 60.0, 60.0)
    run = EpochFeed(None, task, call, None, counts=True)  # type: ignore[arg-type]
    run.ledger.add([FeedReport(0, rows=30, accepted={0: packed(0, 10), FIRST: packed(10, 20)})])
    state.on_event(worker(1), counted(5), 0.0)
    assert run.new_losses(state) == []
    failure = NodeFailure(worker(1), "host", 7, message="killed", signal=9)
    state.on_event(worker(1), messages.Failed(failure), 0.0)
    (lost,) = run.new_losses(state)
    assert run.ledger.take_lost(run.last_of([lost])) == {0: ((15, 30),)}
    comes(state, worker(1, 100))
    assert [target.process for target in targets_of(state)] == [0, SECOND]
    again = FeedReport(0, rows=15, accepted={SECOND: packed(15, 15)})
    run.ledger.add([again], again=True)
    assert run.new_losses(state) == []
    state.on_event(worker(0), counted(10), 0.0)
    state.on_event(worker(1, 100), counted(15), 0.0)
    report = run.report(state, seconds=1.0)
    assert (report.fed_rows, report.trained_rows, report.dropped_rows) == (30, 30, 0)
    assert report.per_worker == {"worker:0": 10, "worker:1": 20}


def packed(first: int, count: int) -> bytes:
    return AcceptedRows([(first, count, 0)]).pack()
