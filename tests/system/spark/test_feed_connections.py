"""Connections of feed tasks on a real Spark: many partitions share them, and they end with their
cluster, while Spark and its Python processes go on."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from tests.support.waiting import JVM_PAUSE_S, wait_until
from tfos import ClusterConfig, InputMode, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(170, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
PARTITIONS = 12
WORKERS = 2
PROCESSES = 3
CLOSED_S = 20.0


def drop(_: Any, ctx: Any) -> None:
    """Read every row."""
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(100)


def idle_connections(_: int) -> tuple[int, int]:
    """Return this process and how many connections it keeps."""
    from feeding.sender.connection_pool import POOL

    return os.getpid(), len(POOL)


def kept(spark: Any) -> dict[int, int]:
    """Return how many connections each Python process keeps."""
    return dict(spark.parallelize(range(12), 12).map(idle_connections).collect())


def test_partitions_share_connections_which_end_with_their_cluster(spark, capfd):
    rows = spark.parallelize(range(PARTITIONS * 10), PARTITIONS)
    for _ in range(2):  # the second cluster is fed by the processes that fed the first
        with TFCluster.reserve(
            spark, WORKERS, 0, input_mode=InputMode.SPARK, config=ClusterConfig(show_details=True)
        ) as cluster:
            cluster.start(drop)
            done = cluster.train(rows, 2, feed_timeout=60)
            assert done is not None
            assert [epoch.trained_rows for epoch in done.epochs] == [PARTITIONS * 10] * 2
            assert 0 < max(kept(spark).values()) <= WORKERS
        wait_until(
            lambda: not any(kept(spark).values()),
            "the end of connections to workers that have ended",
            CLOSED_S,
            pause_s=JVM_PAUSE_S,
        )
    told = re.findall(r"its tasks connected to workers (\d+) times", capfd.readouterr().err)
    assert len(told) == 2
    assert max(map(int, told)) <= PROCESSES * WORKERS
