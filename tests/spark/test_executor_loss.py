"""F14 on a real executor: its JVM is killed, its node ends with it, the others finish."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.spark.conftest import await_executors
from tfos import InputMode, TFCluster
from tfos.control.messages import EXECUTOR_LOST

pytestmark = [
    pytest.mark.spark,
    pytest.mark.fault("F14"),
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]

FOUND_S = 10.0


def wait_for_file(args, ctx):
    """Say that main_fun runs, and return when the driver says so."""
    Path(args["out"], f"running-{ctx.task_index}").touch()
    end = time.monotonic() + 60
    while not Path(args["out"], "stop").exists() and time.monotonic() < end:
        time.sleep(0.05)


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


def test_a_killed_executor_takes_its_node_with_it_and_no_other(spark, tmp_path):
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW) as cluster:
        cluster.start(wait_for_file, {"out": str(tmp_path)})
        nodes = {node.name: node for node in cluster.status().nodes}
        lost = psutil.Process(nodes["worker:1"].pid)
        family = [lost, *lost.children(recursive=True)]
        executor_jvm(nodes["worker:1"].executor_id).send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(family, timeout=FOUND_S)
        assert alive == []
        deadline = time.monotonic() + FOUND_S
        while not cluster.failures:
            assert time.monotonic() < deadline, cluster.status()
            time.sleep(0.02)
        (failure,) = cluster.failures
        assert (failure.node.name, failure.error_type) == ("worker:1", EXECUTOR_LOST)
        assert psutil.pid_exists(nodes["worker:0"].pid)
        assert psutil.pid_exists(nodes["ps:0"].pid)
        (tmp_path / "stop").touch()
    assert [each.node.name for each in cluster.failures] == ["worker:1"]
    await_executors(spark, 3)
