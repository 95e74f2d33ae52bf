"""Executors that come late, go early, are busy, or have another release than the driver."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.support.feed import Background
from tests.support.spark_masters import STANDALONE, await_executors, standalones
from tests.support.waiting import JVM_PAUSE_S, wait_until
from tfos import ClusterConfig, InputMode, NodeFailedError, TFCluster
from tfos.console.console import Console
from tfos.errors import NotEnoughSlots
from tfos.failure import EXECUTOR_LOST
from tfos.node import versions
from tfos.spark import locality

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240, func_only=True)]
three_executors = pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True)

FOUND_S = 30.0
ARRIVED_S = 100.0
_until = partial(wait_until, timeout_s=ARRIVED_S, pause_s=JVM_PAUSE_S)


def wait_for_file(args, ctx):
    """Say that main_fun runs, and return when the driver says so."""
    Path(args["out"], f"running-{ctx.task_index}-{os.getpid()}").touch()
    end = time.monotonic() + 60
    while not Path(args["out"], "stop").exists() and time.monotonic() < end:
        time.sleep(0.05)


def nothing(args, ctx):
    """Return at once."""


def count(args, ctx):
    """Train nothing, but take all rows."""
    ctx.ps_client()
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(100)


class HeldUp:
    """Arguments that take a worker long to unpickle: until the driver's program lets it go on."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def __reduce__(self):
        return _arrive, (self._directory,)


def _arrive(directory):
    Path(directory, "arrived").touch()
    end = time.monotonic() + 60
    while not Path(directory, "go").exists() and time.monotonic() < end:
        time.sleep(0.05)
    return {"out": directory}


def executor_jvm(executor_id: str) -> psutil.Process:
    """The JVM of one executor of this test's Spark."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "org.apache.spark.executor.CoarseGrainedExecutorBackend" in command:
            at = command.index("--executor-id")
            if command[at + 1] == executor_id and os.getpid() in _ancestors(process):
                return process
    raise AssertionError(f"no JVM of executor {executor_id}")


def _ancestors(process: psutil.Process) -> set[int]:
    return {parent.pid for parent in process.parents()}


def _node(cluster: TFCluster, name: str):
    return next(node for node in cluster.status().nodes if node.name == name)


@three_executors
@pytest.mark.fault("F55")
def test_another_release_on_the_executors_fails_the_start_with_a_table(spark, monkeypatch):
    here = versions.installed()
    driver = {**here, "tfos": "9.9", "numpy": "1.0"}
    monkeypatch.setattr(versions, "installed", lambda: driver)
    cluster = TFCluster.reserve(spark, 2, 1)
    with pytest.raises(NodeFailedError) as caught:
        cluster.start(nothing, None)
    lines = str(caught.value).splitlines()
    assert "VersionSkew: executor " in lines[0]
    assert [line.split() for line in lines[1:4]] == [
        ["driver", "executor"],
        ["tfos", "9.9", here["tfos"]],
        ["numpy", "1.0", here["numpy"]],
    ]
    assert "--archives" in lines[4]


@three_executors
@pytest.mark.fault("F14")
def test_a_killed_executor_takes_its_node_with_it_and_no_other(spark, tmp_path):
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW) as cluster:
        cluster.start(wait_for_file, {"out": str(tmp_path)})
        nodes = {node.name: node for node in cluster.status().nodes}
        lost = psutil.Process(nodes["worker:1"].pid)
        family = [lost, *lost.children(recursive=True)]
        executor_jvm(nodes["worker:1"].executor_id).send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=FOUND_S)
        assert alive == []
        _until(lambda: cluster.failures, "the loss is known")
        (failure,) = cluster.failures
        assert (failure.node.name, failure.error_type) == ("worker:1", EXECUTOR_LOST)
        assert psutil.pid_exists(nodes["worker:0"].pid)
        assert psutil.pid_exists(nodes["ps:0"].pid)
        (tmp_path / "stop").touch()
    assert [each.node.name for each in cluster.failures] == ["worker:1"]
    await_executors(spark, 3)


@three_executors
@pytest.mark.fault("F20")
def test_a_task_that_spark_retries_replaces_its_first_attempt_and_fences_it(spark, tmp_path):
    """The first attempt is frozen when its executor dies, so that both are alive at once."""
    with TFCluster.reserve(spark, 2, 1) as cluster:
        starting = Background(lambda: cluster.start(wait_for_file, HeldUp(tmp_path)))
        _until((tmp_path / "arrived").exists, "the first attempt unpickles main_fun")
        first = _node(cluster, "worker:0")
        supervisor = psutil.Process(first.pid)
        supervisor.suspend()
        executor_jvm(first.executor_id).kill()
        _until(lambda: _node(cluster, "worker:0").attempt == 1, "the second attempt registers")
        supervisor.resume()
        (tmp_path / "go").touch()
        starting.result(ARRIVED_S)
        psutil.wait_procs([supervisor], timeout=FOUND_S)
        assert not supervisor.is_running()
        second = _node(cluster, "worker:0")
        assert (second.attempt, second.status) == (1, "running")
        assert second.pid != first.pid
        _until(lambda: list(tmp_path.glob("running-*")), "main_fun runs")
        (tmp_path / "stop").touch()
    assert len(list(tmp_path.glob("running-*"))) == 1
    assert cluster.failures == ()
    await_executors(spark, 3)


@three_executors
def test_cached_rows_near_the_slot_of_a_server_are_fed_from_free_slots_at_once(spark, monkeypatch):
    rows = spark.parallelize(range(600), 6).cache()
    rows.count()
    settings = spark._jsc.sc().conf()
    monkeypatch.setattr(locality, "_SETTINGS", ())  # so it counts as Spark's own
    settings.set(locality.WAIT, "600s")
    with TFCluster.reserve(spark, 3, num_ps=1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(count)
        report = cluster.train(rows, 1, feed_timeout=30)
        assert report is not None
        assert report.trained_rows == 600
    assert not settings.contains(locality.WAIT)


@pytest.mark.long
@pytest.mark.fault("F18")
@pytest.mark.parametrize("spark", [STANDALONE], indirect=True)
def test_executors_that_come_late_are_waited_for_and_busy_ones_do_not_count(
    spark, tmp_path, monkeypatch
):
    told: list[str] = []
    seen_waiting = threading.Event()

    def note(_, text):
        told.append(text)
        if text.startswith("waiting"):
            seen_waiting.set()

    monkeypatch.setattr(Console, "line", note)
    patient = ClusterConfig(slot_wait_s=2 * ARRIVED_S)
    reserving = Background(lambda: TFCluster.reserve(spark, 4, 1, config=patient))
    assert seen_waiting.wait(ARRIVED_S)
    assert "need 4 task slots at once (1 ps + 3 workers), Spark offers 3 (executors " in told[0]
    assert told[0].endswith("Waiting for more executors, 200 s at most")
    assert not reserving.done
    standalones[spark.master].add_workers(1)
    with reserving.result(ARRIVED_S) as cluster:
        cluster.start(wait_for_file, {"out": str(tmp_path)})
        assert len({node.executor_id for node in cluster.status().nodes}) == 4
        began = time.monotonic()
        with pytest.raises(NotEnoughSlots) as refused:
            TFCluster.reserve(spark, 2, 1)
        assert time.monotonic() - began < 5 + FOUND_S
        assert "need 2 task slots at once (1 ps + 1 worker), Spark offers 0" in str(refused.value)
        assert "4 x 1 slot, 4 of them held by running tasks" in str(refused.value)
        (tmp_path / "stop").touch()
