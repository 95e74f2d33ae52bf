"""Which way rows take from Spark's tasks to workers of the same host, of another one, and the error
of a trainer that dies at the other end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.full_disk import file_limit
from tfos import ClusterConfig, InputMode, NodeFailedError, TFCluster
from tfos.feed.dataframe import ArrowTask

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(170, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
ROWS = 3000


def keep(args: Any, ctx: Any) -> None:
    """Write the number of every row."""
    feed = ctx.get_data_feed()
    with Path(args, f"{ctx.task_index}.txt").open("w", buffering=1) as out:
        while not feed.should_stop():
            out.writelines(
                f"{row if isinstance(row, int) else row[0]}\n" for row in feed.next_batch(100)
            )


class Without:
    """Makes a partition's rows; meanwhile, something is missing in the task's process."""

    def __init__(self, take_away: Callable[[], Callable[[], object]]) -> None:
        self._take_away = take_away

    def __call__(self, rows: Iterator[int]) -> Iterator[int]:
        from feeding.sender.connection_pool import POOL

        POOL.clear()  # of what earlier tasks of this process have connected to
        give_back = self._take_away()
        try:
            yield from rows
        finally:
            give_back()


def memory() -> Callable[[], object]:
    """Let no file of this process become larger than 64 KiB, anonymous ones included."""
    limits = contextlib.ExitStack()
    limits.enter_context(file_limit(64 * 1024))
    return limits.close


def neighbour() -> Callable[[], object]:
    """Be on another host than everybody."""
    patch = mock.patch("rpc.client.connect.boot_id", return_value="of another host")
    patch.start()
    return patch.stop


@pytest.mark.long
def test_rows_take_shared_memory_and_ways_around_it_and_the_user_is_told(spark, tmp_path, capfd):
    from pyspark.sql import SparkSession

    def numbers(first: int) -> Any:
        return spark.parallelize(range(first, first + ROWS), 3)

    config = ClusterConfig(show_details=True)
    with TFCluster.reserve(spark, 2, 0, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(keep, str(tmp_path))
        cluster.train(SparkSession(spark).range(0, ROWS, 1, 3), 1, feed_timeout=60)
        cluster.train(numbers(ROWS), 1, feed_timeout=60)
        cluster.train(numbers(2 * ROWS).mapPartitions(Without(memory)), 1, feed_timeout=60)
        cluster.train(numbers(3 * ROWS).mapPartitions(Without(neighbour)), 1, feed_timeout=60)
    found = [int(row) for path in tmp_path.iterdir() for row in path.read_text().splitlines()]
    assert sorted(found) == list(range(4 * ROWS))
    told = re.compile(r"tfos \| feed 'input': its tasks connected to workers [1-6] times (.*)")
    lines = map(told.fullmatch, capfd.readouterr().err.splitlines())
    assert [line[1] for line in lines if line is not None] == [
        "through shared memory",
        "by its Unix socket: one of both shares no memory",
        "by TCP: it is on another host",
    ]


def die(args: Any, ctx: Any) -> None:
    """End as told once every feeder waits for room."""
    from feeding.receiver.data_feed import DataFeed

    feed: DataFeed = ctx.get_data_feed()
    feed.next_batch(1)
    end = time.monotonic() + 60
    while len(list(Path(args["out"]).glob("met-*"))) < args["feeders"] and time.monotonic() < end:
        time.sleep(0.01)
    unread = 0
    while unread != (unread := ctx.feed_channel.stats("input").unread_bytes) or unread < LIMIT:
        time.sleep(0.2)
    Path(args["out"], "died").write_text(repr(time.monotonic()))
    if args["signal"]:
        os.kill(os.getpid(), args["signal"])
    raise ZeroDivisionError("the loss is gone")


LIMIT = 100_000
FAILED_S = 10.0
"""For the errors of tasks of three busy JVMs; far less than their feed_timeout of 60 s."""


class WatchedTask:
    """An ArrowTask that writes when its first attempt has met its workers and how it fails."""

    def __init__(self, directory: Path, task: Any) -> None:
        self._directory, self._task = str(directory), ArrowTask(task)

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        from feeding.sender.worker_link import greet

        context = TaskContext.get()
        assert context is not None
        number, directory = context.partitionId(), Path(self._directory)
        if context.attemptNumber():
            yield from self._task(batches)
            return

        def watched(*args: Any) -> None:
            greet(*args)
            (directory / f"met-{number}").touch()

        try:
            with mock.patch("feeding.sender.feeder.greet", watched):
                yield from self._task(batches)
        except Exception as error:
            text = f"{time.monotonic()!r} {type(error).__name__}: {error}"
            (directory / f"failed-{number}").write_text(text)
            raise


def train_with_one(spark: Any, arguments: dict[str, Any]) -> None:
    """Feed three partitions to one worker, far more rows than it takes."""
    from pyspark.sql import SparkSession

    config = ClusterConfig(max_inflight_bytes=LIMIT)
    with TFCluster.reserve(spark, 1, 0, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(die, arguments)
        cluster.train(SparkSession(spark).range(0, 300_000, 1, 3), 1, feed_timeout=60)


@pytest.mark.fault("F36")
@pytest.mark.parametrize(
    ("number", "of_feeders", "of_train"),
    [
        pytest.param(
            *(
                0,
                "TrainerFailed: worker:0: the loss is gone",
                "ZeroDivisionError: the loss is gone",
            ),
            marks=pytest.mark.long,
            id="raises",
        ),
        pytest.param(
            signal.SIGKILL,
            "NoWorkerLeft: .*worker:0: PeerGone",
            "worker:0.*SIGKILL",
            id="killed",
        ),
    ],
)
def test_feeders_that_wait_fail_with_a_trainer_that_dies(
    spark, tmp_path, monkeypatch, number, of_feeders, of_train
):
    monkeypatch.setattr("tfos.feed.dataframe.ArrowTask", lambda task: WatchedTask(tmp_path, task))
    with pytest.raises(NodeFailedError, match=of_train):
        train_with_one(spark, {"out": str(tmp_path), "signal": int(number), "feeders": 3})
    died_s = float((tmp_path / "died").read_text())
    failed = [path.read_text().partition(" ") for path in tmp_path.glob("failed-*")]
    assert len(failed) == 3
    slowest_s = max(float(when) for when, _, _ in failed) - died_s
    assert slowest_s < FAILED_S
    assert all(re.match(of_feeders, text) for _, _, text in failed), failed
