"""The orders about epochs that one worker carries out."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from feeding.errors import FeedClosed
from tests.support.feed import Background, eventually
from tests.support.nodes import node_settings
from tfos.control import messages
from tfos.node.spec import NO_KEYS, ChildSpec, Executor, NodeBundle
from tfos.topology import PlannedNode
from tfos.worker.feeds import WorkerFeeds
from tfos.worker.reports.progress_meter import ProgressMeter


def spec() -> ChildSpec:
    return ChildSpec(
        attempt=0,
        bundle=NodeBundle(
            node=PlannedNode("worker", 1, 1),
            control_keys=NO_KEYS,
            rpc_secret=b"S" * 32,
            settings=node_settings(num_workers=2, num_ps=0),
        ),
        executor=Executor("7", "h", 0, 1, "/work", "", "/tmp", ""),
        link_fd=-1,
        socket_dir="/tmp",
        log_dir="/logs",
    )


def waiting() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "tfos-await_flush"]


def test_an_epoch_that_is_ended_again_behind_lost_rows_is_awaited_by_one_thread():
    sent: list[Any] = []
    feeds = WorkerFeeds(spec(), sent.append, ProgressMeter(), threading.Event())
    for rounds in range(3):
        feeds.carry_out(messages.FeedAgain("input", 0))
        feeds.carry_out(messages.Flush("input", 0, None, rounds))
    feeds.carry_out(messages.Flush("validation", 0, None, 0))
    num_waiting = len(waiting())
    feeds.channel.drain()
    eventually(lambda: not waiting(), "the end of the epochs")
    feeds.carry_out(messages.Flush("input", 1, None, 0))
    eventually(lambda: len(sent) >= 3 and not waiting(), "the next epoch")
    told = [(each.feed, each.epoch) for each in sent]
    assert (num_waiting, sorted(told)) == (2, [("input", 0), ("input", 1), ("validation", 0)])


def test_a_feed_may_be_quiet_for_longer_than_any_deadline_of_feeding():
    feeds = WorkerFeeds(spec(), [].append, ProgressMeter(), threading.Event())
    reading = Background(lambda: feeds.channel.take("input"))
    assert feeds.channel._state.config.starve_timeout_s > 3e9
    feeds.channel.close()
    with pytest.raises(FeedClosed):
        reading.result()
