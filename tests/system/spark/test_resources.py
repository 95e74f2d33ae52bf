"""Nodes with resources of their role: cores, simulated GPUs, memory, and hosts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter

import pytest

from tests.support.fake_gpus import FakeGpus
from tests.support.spark_masters import Standalone
from tests.support.spark_submit import ROOT, submit
from tfos import Checkpoints, ClusterConfig, InputMode, Resources, Restarts, TFCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300, func_only=True)]

HELD_S = 20.0
"""docs/faults.md promises it."""
PROGRAMS = ROOT / "tests" / "support" / "programs"
PLACES = PROGRAMS / "places_nodes.py"


def threads(_args, _ctx) -> str:
    """Return this worker's compute threads."""
    return os.environ["OMP_NUM_THREADS"]


def _seen(output: str) -> list:
    """Return what a program has printed after SEEN."""
    lines = [line.partition("SEEN ")[2] for line in output.splitlines()]
    return [json.loads(line) for line in lines if line]


@pytest.fixture
def standalone(tmp_path, spark_environment):
    """A master without workers."""
    running = Standalone(tmp_path)
    yield running
    running.stop()


@pytest.mark.executors
@pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True)
def test_each_node_goes_to_an_executor_of_its_own(spark, capsys):
    with TFCluster.reserve(
        spark,
        3,
        1,
        input_mode=InputMode.TENSORFLOW,
        worker_resources=Resources(cores=1),
        placement="spread",
    ) as cluster:
        cluster.start(threads, None)
        at = {node.name: node.executor_id for node in cluster.status().nodes}
    assert cluster.results() == ["1", "1"]
    assert len(set(at.values())) == 3
    said = (
        "placement='spread': 2 nodes of workers are on 1 host, 2 wanted; Spark has executors on 1"
    )
    assert said in capsys.readouterr().err


@pytest.mark.long
def test_workers_have_the_gpus_and_cores_of_their_role_and_servers_no_gpu(tmp_path):
    output = submit(
        PROGRAMS / "shows_resources.py",
        str(tmp_path),
        master="local-cluster[2,4,1024]",
        cwd=tmp_path,
    )
    by_task, without, by_role = _seen(output)
    workers, _ = by_task
    # Each task takes both GPUs of an executor, so the server's place is beside a worker.
    assert sorted(workers) == [["0", "4,GPU-5", "1"], ["1", "4,GPU-5", "1"]]
    assert [gpus for _, gpus, _ in without[0]] == ["-1", "-1"]
    workers, server = by_role
    assert {executor for executor, _, _ in workers} != {server}
    assert sorted(each[1:] for each in workers) == [["4", "2"], ["GPU-5", "2"]]
    assert len({executor for executor, _, _ in workers}) == 1


@pytest.mark.long
@pytest.mark.fault("F59")
def test_a_start_fails_by_a_gpu_that_another_process_holds_or_shares_it(tmp_path, monkeypatch):
    smi = tmp_path / "bin"
    smi.mkdir()
    FakeGpus(smi, monkeypatch).have(1, (os.getpid(), 0))
    program = PROGRAMS / "meets_a_held_gpu.py"
    output = submit(program, str(tmp_path), master="local-cluster[1,1,1024]", cwd=tmp_path)
    (error, seconds), shared = _seen(output)
    assert seconds < HELD_S
    held_by = f"is held by pid {os.getpid()} (python3, user "
    assert error.startswith("GpuUnusable: worker:0 on 127.0.0.1: GPU 0 (NVIDIA H100, 512 of 81559")
    assert held_by in error
    assert shared == ["0 PCI_BUS_ID"]
    assert f"tfos: GPU 0 (NVIDIA H100, 512 of 81559 MB used) {held_by}" in output


@pytest.mark.long
def test_nodes_are_spread_over_hosts_and_packed(standalone, tmp_path):
    for host in ("127.0.0.1", "127.0.0.2"):
        standalone.add_workers(1, host=host, cores=4)
    output = submit(PLACES, "hosts", master=standalone.url, cwd=tmp_path)
    spread, packed = _seen(output)
    hosts = Counter(host for node, (_, host) in spread.items() if node != "ps:0")
    assert hosts == {"127.0.0.1": 2, "127.0.0.2": 2}
    assert len({host for _, host in packed.values()}) == 1
    assert "placement=" not in output


@pytest.mark.long
def test_roles_have_memory_of_their_own_with_dynamic_allocation(standalone, tmp_path):
    standalone.add_workers(1, cores=8, memory="7g")
    first, again = _seen(submit(PLACES, "memory", master=standalone.url, cwd=tmp_path))
    profiles = {node: profile for node, (profile, _) in first.items()}
    assert profiles["worker:0"] == profiles["worker:1"] != profiles["ps:0"]
    assert "0" not in profiles.values()
    assert {node: profile for node, (profile, _) in again.items()} == profiles


def until_joined(args, ctx) -> int:
    """Return this worker's compute threads; worker:1 kills its first attempt."""
    deadline = time.monotonic() + 120
    while not ctx.attempt and time.monotonic() < deadline:
        if ctx.task_index and not os.path.exists(args):
            os.kill(os.getpid(), signal.SIGKILL)
        if not ctx.task_index and os.path.exists(args):
            break
        time.sleep(0.05)
    open(args, "w").close()
    return int(os.environ["OMP_NUM_THREADS"])


@pytest.mark.long
@pytest.mark.parametrize("spark", ["local-cluster[2,3,1024]"], indirect=True)
def test_a_worker_that_is_started_again_has_the_resources_of_its_role(spark, tmp_path):
    config = ClusterConfig(
        restarts=Restarts(workers=1), checkpoints=Checkpoints(directory=str(tmp_path / "saves"))
    )
    with TFCluster.reserve(
        spark,
        3,
        1,
        input_mode=InputMode.TENSORFLOW,
        worker_resources=Resources(cores=2),
        config=config,
    ) as cluster:
        cluster.start(until_joined, str(tmp_path / "joined"))
    assert cluster.results() == [2, 2]
