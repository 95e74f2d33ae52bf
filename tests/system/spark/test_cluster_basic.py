"""Whole clusters on every kind of Spark: feed, train, infer, end."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.spark_masters import STANDALONE
from tfos import InputMode, TFCluster
from tfos.control.members import NodeStatus

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240, func_only=True)]
MOSTLY_ON_EXECUTORS = pytest.mark.parametrize(
    "spark",
    [
        "local-cluster[3,1,1024]",
        pytest.param("local[4]", marks=pytest.mark.long),
        pytest.param(STANDALONE, marks=pytest.mark.long),
    ],
    indirect=True,
)


def consume(args, ctx):
    """Take the whole feed; write and return what was taken."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    rows = []
    while not feed.should_stop():
        rows += feed.next_batch(args["batch"])
    _write(args["out"], ctx, {"rows": len(rows), "sum": sum(rows)})
    return ctx.rank, {"rows": np.array(rows)}


def describe(args, ctx):
    """Write what ctx says."""
    _write(
        args["out"],
        ctx,
        {
            "job": ctx.job_name,
            "index": ctx.task_index,
            "chief": ctx.is_chief,
            "workers": ctx.num_workers,
            "spec": {role: len(nodes) for role, nodes in ctx.cluster_spec.items()},
            "executor": ctx.executor_id,
            "pid": os.getpid(),
            "tf_config": json.loads(os.environ["TF_CONFIG"])["task"],
        },
    )


def square(args, ctx):
    """Answer every row with its square."""
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_batch(args["batch"])
        feed.batch_results([row * row for row in batch])


def _write(out, ctx, value):
    Path(out, f"{ctx.job_name}-{ctx.task_index}.json").write_text(json.dumps(value))


def _read(out: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def test_every_row_of_every_epoch_is_trained_once(spark, tmp_path):
    args = {"batch": 32, "out": str(tmp_path)}
    rows = spark.parallelize(range(1000), 5)
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(consume, args)
        report = cluster.train(rows, num_epochs=2)
        assert report is not None
        assert [(e.epoch, e.fed_rows, e.trained_rows, e.dropped_rows) for e in report.epochs] == [
            (0, 1000, 1000, 0),
            (1, 1000, 1000, 0),
        ]
        assert {node.name for node in cluster.status().nodes} == {"ps:0", "worker:0", "worker:1"}
    ranks, taken = zip(*cluster.results(), strict=True)
    assert ranks == (0, 1)
    np.testing.assert_array_equal(
        np.sort(np.concatenate([each["rows"] for each in taken])), np.repeat(range(1000), 2)
    )
    assert {node.status for node in cluster.status().nodes} == {NodeStatus.ENDED.value}
    assert cluster.failures == ()


@MOSTLY_ON_EXECUTORS
def test_uneven_and_empty_partitions_end_without_a_hang(spark, tmp_path):
    args = {"batch": 64, "out": str(tmp_path)}
    rows = spark.parallelize([0, 0, 0, 0], 4).mapPartitionsWithIndex(
        lambda index, _: range(index * 100 if index != 1 else 0)
    )
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(consume, args)
        report = cluster.train(rows, num_epochs=1)
        empty = cluster.train(spark.parallelize([], 2), num_epochs=1)
    assert report is not None
    assert empty is not None
    assert (report.fed_rows, report.trained_rows) == (500, 500)
    assert (empty.fed_rows, empty.trained_rows) == (0, 0)


@MOSTLY_ON_EXECUTORS
def test_run_takes_the_arguments_of_tensorflowonspark(spark, tmp_path):
    cluster = TFCluster.run(
        spark,
        describe,
        {"out": str(tmp_path)},
        3,
        1,
        tensorboard=False,
        input_mode=TFCluster.InputMode.TENSORFLOW,
        master_node="chief",
        reservation_timeout=120,
    )
    cluster.shutdown()
    told = _read(tmp_path)
    assert set(told) == {"chief-0", "worker-0"}
    assert told["chief-0"]["chief"]
    assert not told["worker-0"]["chief"]
    for each in told.values():
        assert each["workers"] == 2
        assert each["spec"] == {"ps": 1, "chief": 1, "worker": 1}
        assert each["tf_config"] == {"type": each["job"], "index": each["index"]}
    assert told["chief-0"]["pid"] != told["worker-0"]["pid"]


def test_inference_gives_one_result_per_row_in_order(spark):
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(square, {"batch": 7})
        results = cluster.inference(spark.parallelize(range(100), 3))
        assert results.collect() == [row * row for row in range(100)]
        assert results.count() == 100


@MOSTLY_ON_EXECUTORS
def test_two_clusters_and_a_job_of_the_user_share_one_context(spark, tmp_path):
    outs = [tmp_path / "a", tmp_path / "b"]
    for out in outs:
        out.mkdir()
    with TFCluster.reserve(spark, 2, 1, input_mode=InputMode.SPARK) as one:
        one.start(consume, {"batch": 8, "out": str(outs[0])})
        with TFCluster.reserve(spark, 2, 1, input_mode=InputMode.SPARK) as two:
            two.start(consume, {"batch": 8, "out": str(outs[1])})
            assert one.cluster_id != two.cluster_id
            two.train(spark.parallelize(range(50), 2), num_epochs=1)
            assert spark.parallelize(range(10), 2).sum() == 45
            one.train(spark.parallelize(range(20), 2), num_epochs=1)
        one.train(spark.parallelize(range(20), 2), num_epochs=1)
    assert [_read(out)["worker-0"]["rows"] for out in outs] == [40, 50]


@MOSTLY_ON_EXECUTORS
def test_a_running_job_of_the_user_is_neither_cancelled_nor_waited_for(spark, tmp_path):
    """It holds one slot of at least three from before the start until after the shutdown."""
    stop = tmp_path / "stop"

    def hold(_):
        deadline = time.monotonic() + 60
        while not stop.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield stop.exists()

    held: list[bool] = []
    job = threading.Thread(
        target=lambda: held.extend(spark.parallelize([0], 1).mapPartitions(hold).collect())
    )
    job.start()
    try:
        with TFCluster.reserve(spark, 2, 1, input_mode=InputMode.SPARK) as cluster:
            cluster.start(consume, {"batch": 8, "out": str(tmp_path)})
            cluster.train(spark.parallelize(range(20), 2), num_epochs=1)
        assert job.is_alive()
    finally:
        stop.touch()
        job.join(60)
    assert held == [True]


@pytest.mark.fault("F21")
@pytest.mark.parametrize("spark", ["local-cluster[1,3,1024]"], indirect=True)
def test_several_nodes_of_one_executor_have_their_own_identity(spark, tmp_path):
    with TFCluster.reserve(spark, 3, 1) as cluster:
        cluster.start(describe, {"out": str(tmp_path)})
        nodes = cluster.status().nodes
    assert {node.executor_id for node in nodes} == {"0"}
    assert len({node.pid for node in nodes}) == 3
    told = _read(tmp_path)
    assert {(each["job"], each["index"]) for each in told.values()} == {
        ("worker", 0),
        ("worker", 1),
    }
    assert len({each["pid"] for each in told.values()}) == 2
