"""TensorFlow's own strategies on executors, by TF_CONFIG alone."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

import cloudpickle
import psutil
import pytest

from tests.support.node_children import child_of
from tests.support.spark_masters import REPO
from tests.support.waiting import JVM_PAUSE_S, wait_until
from tfos import InputMode, TFCluster
from tfos.errors import NodeFailedError

TOLD_S = 15.0
"""From the kill to the exception."""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.tf,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]


@pytest.fixture
def example(request, monkeypatch):
    name = request.param
    monkeypatch.syspath_prepend(str(REPO / "examples" / "native"))
    module = importlib.import_module(name)
    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules[name]


def behind_a_proxy(args, ctx):
    """Run a main_fun where the environment names a proxy, at which nobody listens."""
    import os

    os.environ["https_proxy"] = "http://127.0.0.1:9"
    main_fun, own = args
    return main_fun(own, ctx)


def until_told(args, ctx):
    """Schedule steps until a file appears; count them in a file of their own."""
    import os

    import tensorflow as tf

    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.TFConfigClusterResolver()
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        count = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def step():
        count.assign_add(1)

    done = 0
    while True:
        for _ in range(20):
            coordinator.schedule(step)
        coordinator.join()
        done += 20
        with open(f"{args}.new", "w") as file:
            file.write(str(done))
        os.replace(f"{args}.new", args)


def build_late(args, ctx):
    """Build the strategy once a file appears."""
    import time
    from pathlib import Path

    import tensorflow as tf

    Path(f"{args}-here").touch()
    while not Path(args).exists():
        time.sleep(0.05)
    Path(f"{args}-begun").touch()
    tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())


def wait_for_file(path):
    wait_until(path.exists, f"{path.name} of main_fun", pause_s=JVM_PAUSE_S)


def wait_for_steps(path, more_than):
    def steps() -> int:
        return int(path.read_text()) if path.exists() else 0

    wait_until(lambda: steps() > more_than, f"steps after {more_than}", pause_s=JVM_PAUSE_S)
    return steps()


@pytest.mark.parametrize("example", ["parameter_server"], indirect=True)
def test_a_coordinator_trains_fed_rows_and_its_workers_own(spark, example):
    import numpy as np

    args = example.parse(["--fed", "--cluster_size", "3"])
    rows = np.random.default_rng(0).uniform(-1, 1, (3000, 2))
    pairs = [(row.astype("f4"), np.float32(row @ example.TRUE_WEIGHTS)) for row in rows]
    with TFCluster.reserve(
        spark, args.cluster_size, args.num_ps, ps="tensorflow", input_mode=InputMode.SPARK
    ) as cluster:
        cluster.start(behind_a_proxy, (example.main_fun, args))
        report = cluster.train(spark.parallelize(pairs, 4), num_epochs=2)
        assert report is not None
        assert report.epochs[0].trained_rows == 3000
        pids = [child_of(cluster, name).pid for name in ("ps:0", "worker:0", "chief:0")]
    assert cluster.results()[0] == pytest.approx(example.TRUE_WEIGHTS, abs=1e-2)
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.long
@pytest.mark.parametrize("example", ["multi_worker"], indirect=True)
def test_mirrored_workers_agree(spark, example):
    with TFCluster.reserve(spark, 2, num_ps=0, ps="tensorflow") as cluster:
        cluster.start(example.main_fun, example.parse([]))
    first, second = cluster.results()
    assert first == second
    assert first == pytest.approx(example.TRUE_WEIGHTS, abs=1e-2)


@pytest.mark.long
def test_a_lost_worker_is_done_without_and_a_lost_server_is_the_headline(spark, tmp_path, capfd):
    steps = tmp_path / "steps"
    cluster = TFCluster.reserve(spark, 4, 1, ps="tensorflow")
    with cluster:
        cluster.start(until_told, str(steps))
        before = wait_for_steps(steps, 0)
        os.kill(child_of(cluster, "worker:1").pid, signal.SIGKILL)
        before = wait_for_steps(steps, before + 100)
        wait_for_steps(steps, before + 100)
        os.kill(child_of(cluster, "ps:0").pid, signal.SIGKILL)
        with pytest.raises(NodeFailedError) as caught:
            cluster.shutdown(timeout=60)
    text = str(caught.value)
    assert "UnavailableError" in text.splitlines()[0]
    assert "TensorFlow's parameter server ps:0 was lost" in text
    assert "tf.train.CheckpointManager" in text
    told = capfd.readouterr().err
    assert "the chief's coordinator gives its work to worker:0" in told
    assert "no login" in told


@pytest.mark.long
@pytest.mark.fault("F02")
@pytest.mark.parametrize("is_waiting", [False, True], ids=["before", "in-the-constructor"])
def test_a_worker_that_is_lost_before_the_strategy_fails_the_cluster(spark, tmp_path, is_waiting):
    build = tmp_path / "build"
    with TFCluster.reserve(spark, 4, 1, ps="tensorflow") as cluster:
        cluster.start(build_late, str(build))
        wait_for_file(tmp_path / "build-here")
        worker = child_of(cluster, "worker:1")
        if is_waiting:  # a stopped worker does not answer the constructor
            worker.suspend()
            build.touch()
            wait_for_file(tmp_path / "build-begun")
        worker.kill()
        killed_s = time.monotonic()
        with pytest.raises(NodeFailedError) as caught:
            cluster.shutdown(timeout=60)
        told_s = time.monotonic() - killed_s
    text = str(caught.value)
    assert "worker:1" in text.splitlines()[0]
    assert "killed by SIGKILL. It was lost before main_fun had built Param" in text
    assert "start the cluster again" in text
    assert told_s < TOLD_S
