"""Parameter servers beside the driver: they train, take no slots, and end with the driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec
from tests.support.waiting import WAIT_S
from tfos import InputMode, NodeFailedError, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]


ROOT = Path(__file__).parents[3]


def push(args, ctx):
    """Push ones so often, and return what the servers hold then."""
    client = ctx.ps_client()
    if ctx.is_chief:
        group = GroupSpec("g", "float32", SGD(), (ParamSpec("w", (8,)),))
        client.seed(Manifest(groups=(group,)), {"g": np.zeros(8, np.float32)})
    client.attach()
    for _ in range(args["pushes"]):
        client.push({"g": np.ones(8, np.float32)}, hyper=Hyper(1.0), rows=1)
    if args["waits"]:
        while True:
            time.sleep(0.1)
    return os.getpid()


def test_all_executors_are_workers_and_the_servers_end_with_the_cluster(spark, capfd):
    args = {"pushes": 3, "waits": False}
    cluster = TFCluster.run(
        spark, push, args, 5, 2, driver_ps_nodes=True, input_mode=InputMode.TENSORFLOW
    )
    nodes = {node.name: node for node in cluster.status().nodes}
    own = [psutil.Process(nodes[name].pid) for name in ("ps:0", "ps:1")]
    assert {nodes[name].executor_id for name in ("ps:0", "ps:1")} == {"driver"}
    cluster.shutdown()
    assert len(set(cluster.results())) == 3  # of three executors with one slot each
    _, left = psutil.wait_procs(own, timeout=WAIT_S)
    assert left == []
    assert "all parameters are on the driver's host" in capfd.readouterr().err


@pytest.mark.long
def test_a_killed_server_beside_the_driver_is_the_headline(spark):
    args = {"pushes": 1, "waits": True}
    cluster = TFCluster.run(spark, push, args, 4, 1, driver_ps_nodes=True)
    (server,) = [node for node in cluster.status().nodes if node.name == "ps:0"]
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(NodeFailedError, match="ps:0"):
        cluster.shutdown(timeout=60)


PROGRAM = """
import sys, time
from pyspark import SparkContext
from tests.system.spark.test_driver_servers import push
from tfos import TFCluster
args = {"pushes": 1, "waits": True}
cluster = TFCluster.run(SparkContext(), push, args, 3, 1, driver_ps_nodes=True)
print(*[node.pid for node in cluster.status().nodes if node.name == "ps:0"], flush=True)
time.sleep(300)
"""


@pytest.mark.long
@pytest.mark.fault("F13")
def test_a_server_beside_a_killed_driver_ends_at_once(spark):
    master = "--master local[3] --conf spark.ui.enabled=false pyspark-shell"
    environ = {**os.environ, "PYSPARK_SUBMIT_ARGS": master, "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environ, stdout=subprocess.PIPE, text=True
    )
    try:
        assert driver.stdout is not None
        supervisor = psutil.Process(int(driver.stdout.readline()))
        own = [supervisor, *supervisor.children()]
        assert len(own) == 2
        driver.kill()
        gone, _ = psutil.wait_procs(own, timeout=15.0)
        assert len(gone) == 2
    finally:
        driver.kill()
        driver.wait()
        assert driver.stdout is not None
        driver.stdout.close()
