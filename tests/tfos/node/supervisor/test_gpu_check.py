"""Whether a node's GPUs are there and free: verdicts, and nodes that start with a held GPU."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.support.fake_gpus import FakeGpus
from tfos.control import messages
from tfos.failure import GPU_UNUSABLE
from tfos.node import gpus
from tfos.node import task as node_task
from tfos.node.gpus import Gpu, GpuHolder, GpuToolFailed, HostGpus
from tfos.node.supervisor import gpu_check
from tfos.node.supervisor.gpu_check import GpuCheck, GpuTrouble, judge

pytestmark = pytest.mark.fault("F59")

BOTH = tuple(Gpu(str(n), f"GPU-{n}aa", "NVIDIA H100", "512", "81559") for n in range(2))
FREE = HostGpus(BOTH, ())
HELD = HostGpus(BOTH, (GpuHolder(900, "GPU-1aa", "30210", "/opt/python3", "eve"),))


def test_a_held_gpu_is_named_with_its_holder_and_the_next_step():
    told = judge(HELD, ["0", "1"])
    assert told is not None
    assert told.settle_s == 5.0
    assert told.text == (
        "GPU 1 (NVIDIA H100, 512 of 81559 MB used) is held by pid 900 (python3, user eve, 30210 "
        "MB). End these processes, or share the GPU: ClusterConfig(busy_gpus='warn')"
    )
    assert judge(HELD, ["0"]) is None
    assert judge(HELD, ["1"], {900}) is None


def test_a_gpu_that_is_not_there_is_named_with_those_that_are():
    told = judge(FREE, ["0", "2"])
    assert told is not None
    assert not told.settle_s
    assert "Spark gave this node GPU 2, and nvidia-smi lists 0, 1" in told.text


class Answers:
    """What nvidia-smi says, look after look; the last answer stays."""

    def __init__(self, *answers: HostGpus | GpuToolFailed | None) -> None:
        self._left = list(answers)
        self.looks = 0

    def __call__(self) -> HostGpus | None:
        self.looks += 1
        answer = self._left.pop(0) if len(self._left) > 1 else self._left[0]
        if isinstance(answer, GpuToolFailed):
            raise answer
        return answer


@pytest.fixture
def checked(monkeypatch):
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        now_s[0] += seconds

    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(gpu_check, "time", clock)

    def check(*answers: HostGpus | GpuToolFailed | None) -> tuple[GpuTrouble | None, int]:
        told: list[GpuTrouble | None] = []
        looked = Answers(*answers)
        GpuCheck(["1"], told.append, looked)._run()
        (once,) = told
        return once, looked.looks

    return check


def test_a_gpu_that_becomes_free_is_no_problem(checked):
    assert checked(HELD, HELD, FREE) == (None, 3)


def test_a_gpu_that_stays_held_is_told_once(checked):
    told, looks = checked(HELD)
    assert told is not None
    assert "is held by pid 900" in told.text
    assert looks > 1


OF_SPARK = HostGpus(BOTH, (GpuHolder(900, "GPU-1aa", "510", "/opt/python3", "eve", True),))
"""As a prediction leaves it."""


def test_a_gpu_that_an_idle_python_worker_of_spark_holds_is_awaited_until_spark_ends_it(checked):
    assert checked(*140 * [OF_SPARK], FREE) == (None, 141)  # 70 s
    told, looks = checked(OF_SPARK)
    assert told is not None
    assert "held by pid 900 (python3 of Spark's tasks, user eve, 510 MB)" in told.text
    assert looks > 141
    both = HostGpus(BOTH, (*OF_SPARK.holders, *HELD.holders))
    assert checked(both)[1] < 20


def test_a_python_worker_of_spark_is_known_by_its_daemon(tmp_path, monkeypatch):
    smi = FakeGpus(tmp_path, monkeypatch)
    line = [sys.executable, "-c", "input()", "pyspark.daemon", "pyspark.worker"]
    workers = [subprocess.Popen(each, stdin=subprocess.PIPE) for each in (line, [*line[:3], "x"])]
    try:
        smi.have(1, *((each.pid, 0) for each in workers))
        found = gpus.look()
    finally:
        for each in workers:
            each.communicate(b"\n")
    assert found is not None
    assert [each.is_spark for each in found.holders] == [True, False]


def test_a_missing_gpu_and_a_failing_program_are_told_at_once(checked):
    missing, looks = checked(HostGpus(BOTH[:1], ()))
    assert missing is not None
    assert (missing.is_certain, looks) == (True, 1)
    unknown, looks = checked(GpuToolFailed("nvidia-smi ended with status 9: no driver"))
    assert unknown is not None
    assert (unknown.is_certain, looks) == (False, 1)
    assert unknown.text == (
        "nobody knows whether GPU 1 is there and free: nvidia-smi ended with status 9: no driver"
    )


def test_a_host_without_the_program_has_nothing_to_tell(checked):
    assert checked(None) == (None, 1)


# ---- whole nodes ----


def nothing(args, ctx):
    """Return at once."""


@pytest.fixture
def smi(tmp_path, monkeypatch):
    monkeypatch.setattr(node_task, "gpus_of", lambda context, resource: ("0",))
    return FakeGpus(tmp_path, monkeypatch)


@pytest.mark.process
def test_a_worker_whose_gpu_is_not_there_does_not_start(bed, smi):
    smi.have(0)
    run = bed.start(bed.bundle("worker:0", nothing))
    failure = bed.failure("worker:0")
    assert failure.error_type == GPU_UNUSABLE
    assert "Spark gave this node GPU 0, and nvidia-smi lists none" in failure.message
    assert run.wait().outcome == "ended"
    bed.assert_nothing_left()


@pytest.mark.process
@pytest.mark.long
def test_a_worker_whose_gpu_is_held_does_not_start_and_names_the_holder(bed, smi):
    holder = subprocess.Popen(["/bin/sleep", "120"])
    try:
        smi.have(1, (holder.pid, 0))
        began_s = time.monotonic()
        run = bed.start(bed.bundle("worker:0", nothing))
        failure = bed.failure("worker:0")
        assert time.monotonic() - began_s < 20.0
    finally:
        holder.kill()
        holder.wait()
    assert failure.error_type == GPU_UNUSABLE
    assert failure.message.startswith("worker:0 on 127.0.0.1: GPU 0 (NVIDIA H100, ")
    assert f"is held by pid {holder.pid} (python3, user " in failure.message
    assert run.wait().outcome == "ended"
    bed.assert_nothing_left()


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize("how", ["warn", "shared"])
def test_a_held_gpu_is_shared_where_that_is_wanted(bed, smi, how):
    smi.have(1, (1, 0))
    bundle = bed.bundle("worker:0", nothing, **({"busy_gpus": "warn"} if how == "warn" else {}))
    if how == "shared":
        bundle = dataclasses.replace(bundle, shares_gpus=True)
    run = bed.start(bundle)
    if how == "warn":
        assert "GPU 0 (NVIDIA H100, " in bed.log_line("is held by pid 1 (python3, user root")
    bed.release("worker:0")
    bed.event("worker:0", messages.Done)
    bed.order("worker:0", messages.Stop("the test is over"))
    assert run.wait().outcome == "ended"
    bed.assert_nothing_left()
