"""A worker whose node task has returned lives on while Spark runs no job at all.

pyspark ends idle Python workers after a minute; a node must not be one of their descendants.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.plain_steps import PlainSteps
from tests.support.waiting import WAIT_S, wait_until
from tfos import InputMode, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(400, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]

QUIET_S = 150.0


def train_in_silence(args, ctx):
    """Take an epoch, push steps for a long time without rows, take another epoch."""
    steps = PlainSteps(ctx, 1000)
    feed = ctx.get_data_feed()
    taken = 0
    while taken == 0:
        taken += len(feed.next_batch(10_000))
    end = time.monotonic() + args["quiet_s"]
    while time.monotonic() < end:
        steps.step()
    Path(args["out"], f"quiet-{ctx.task_index}").write_text(str(steps.count))
    while not feed.should_stop():
        taken += len(feed.next_batch(10_000))
    Path(args["out"], f"taken-{ctx.task_index}").write_text(str(taken))


def test_workers_train_through_two_minutes_without_a_spark_job(spark, tmp_path):
    rows = spark.parallelize(range(4000), 8)
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(train_in_silence, {"quiet_s": QUIET_S, "out": str(tmp_path)})
        cluster.train(rows, num_epochs=1)
        wait_until(
            lambda: len(list(tmp_path.glob("quiet-*"))) == 2,
            cluster.status,
            QUIET_S + WAIT_S,
            pause_s=1.0,
        )
        cluster.train(rows, num_epochs=1)
    assert cluster.failures == ()
    assert all(int(path.read_text()) > 100 for path in tmp_path.glob("quiet-*"))
    assert sum(int(path.read_text()) for path in tmp_path.glob("taken-*")) == 8000
