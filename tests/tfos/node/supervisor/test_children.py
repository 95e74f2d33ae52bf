"""A child's environment and its document."""

import json
import os
import subprocess
import sys

import pytest

from tfos.node import bootstrap, procfs
from tfos.node.supervisor import children
from tfos.topology import PlannedNode


@pytest.mark.parametrize(
    ("threads", "cores", "inherited", "expected"),
    [(0, 2, None, "2"), (3, 2, None, "3"), (0, 2, "5", "5"), (3, 2, "5", "3"), (0, 0, "x", "1")],
)
def test_every_thread_pool_gets_the_same_size(threads, cores, inherited, expected):
    base = {} if inherited is None else {"OMP_NUM_THREADS": inherited}
    env = children.child_env(base, threads=threads, cores=cores)
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        assert env[name] == expected


def test_the_users_tensorflow_settings_win():
    env = children.child_env({"TF_NUM_INTRAOP_THREADS": "7"}, threads=2, cores=1)
    assert env["TF_NUM_INTRAOP_THREADS"] == "7"


@pytest.mark.parametrize(
    ("role", "gpus", "resource", "expected"),
    [
        ("worker", ("4", "GPU-5"), "gpu", "4,GPU-5"),
        ("worker", (), "gpu", "inherited"),
        ("worker", ("4",), None, "-1"),
        ("ps", ("4",), "gpu", "-1"),
        ("ps", (), "gpu", "-1"),
    ],
)
def test_a_worker_sees_the_gpus_of_its_task_and_a_server_none(role, gpus, resource, expected):
    visible = children.visible_gpus(PlannedNode(role, 0, 0), gpus, resource)
    base = {"CUDA_VISIBLE_DEVICES": "inherited"}
    env = children.child_env(base, threads=0, cores=1, gpus=visible)
    assert env["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("base", "shares", "expected"),
    [
        ({}, False, None),
        ({}, True, "true"),
        ({"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, True, "false"),
    ],
)
def test_tensorflow_takes_memory_as_it_needs_it_where_others_share_the_gpu(base, shares, expected):
    env = children.child_env(base, threads=0, cores=1, gpus=("4",), shares_gpus=shares)
    assert env.get("TF_FORCE_GPU_ALLOW_GROWTH") == expected


@pytest.mark.attack("A17")
def test_sparks_own_secrets_do_not_reach_user_code():
    base = {"PYTHON_WORKER_FACTORY_SECRET": "s", "PYSPARK_GATEWAY_SECRET": "s", "HOME": "/h"}
    env = children.child_env(base, threads=0, cores=1)
    assert "s" not in env.values()
    assert env["HOME"] == "/h"


def run_document(body, **options):
    document = bootstrap.document_fd("probe", body, **options)
    try:
        return subprocess.run(
            bootstrap.command(document, "a probe"),
            pass_fds=[document],
            capture_output=True,
            text=True,
            timeout=20,
        )
    finally:
        os.close(document)


@pytest.fixture
def probe(tmp_path):
    (tmp_path / "probe.py").write_text(
        "import json, os, sys\n"
        "def main(body):\n"
        "    print(json.dumps([len(body), sys.path[0], os.getppid(), os.getsid(0)]))\n"
    )
    return [str(tmp_path), *sys.path]


def test_a_large_document_arrives_whole_without_a_reader(probe):
    done = run_document(bytes(3_000_000), sys_path=probe, parent_pid=os.getpid())
    assert json.loads(done.stdout)[:3] == [3_000_000, probe[0], os.getpid()]


def test_a_child_whose_parent_died_before_it_looked_ends(probe):
    done = run_document(b"", sys_path=probe, parent_pid=1)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_detached_process_has_its_own_session_and_another_parent(probe):
    done = run_document(b"", sys_path=probe, detach=True)
    _, _, parent, session = json.loads(done.stdout)
    assert parent != os.getpid()
    assert session != os.getsid(0)


@pytest.mark.parametrize(
    ("command", "expected"),
    [("exit 4", (4, None)), ("kill -SEGV $$", (None, 11))],
)
def test_a_child_tells_how_it_ended(command, expected):
    read, write = os.pipe()
    os.set_blocking(read, False)
    process = subprocess.Popen(["sh", "-c", command], stdout=write)
    os.close(write)
    child = children.Child(process.pid, read, None)
    process.returncode = 0
    assert procfs.wait_exited([child.pidfd], 10)
    how = child.reap()
    assert how is not None
    assert (how.exit_code, how.signal_number) == expected
    assert child.read_output() == b""
    child.close()
