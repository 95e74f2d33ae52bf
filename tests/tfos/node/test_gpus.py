"""What nvidia-smi tells, on its good days and its bad ones; the program is a script of the test."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.fake_gpus import FakeGpus
from tfos.node import gpus
from tfos.node.gpus import Gpu, GpuHolder, GpuToolFailed, HostGpus

pytestmark = pytest.mark.fault("F59")


@pytest.fixture
def smi(tmp_path, monkeypatch):
    return FakeGpus(tmp_path, monkeypatch)


def test_gpus_and_their_processes_are_read_with_user_and_memory(smi):
    smi.have(2, (os.getpid(), 1))
    found = gpus.look()
    assert found is not None
    assert found.gpus == (
        Gpu("0", "GPU-0aa-bb", "NVIDIA H100", "512", "81559"),
        Gpu("1", "GPU-1aa-bb", "NVIDIA H100", "512", "81559"),
    )
    (holder,) = found.holders
    assert str(holder) == f"pid {os.getpid()} (python3, user {getpass.getuser()}, 510 MB)"
    assert found.held(["0"]) == []
    assert found.held(["0", "1"]) == [(found.gpus[1], [holder])]
    assert found.held(["1"], {os.getpid()}) == []


def test_a_process_of_another_container_has_no_user_and_may_have_no_memory(smi):
    line = "4194304999, GPU-0aa-bb, [N/A], [Not Found]"
    smi.answer("0, GPU-0aa-bb, NVIDIA H100, 512, 81559", holders=[line])
    found = gpus.look()
    assert found is not None
    assert str(found.holders[0]) == "pid 4194304999 ([Not Found], in another container)"


def test_a_name_with_commas_and_lines_of_another_shape_do_not_shift_the_fields(smi):
    holders = ["7, GPU-0aa-bb, 5, python3 train.py, --x", "No running processes found"]
    smi.answer("0, GPU-0aa-bb, NVIDIA H100, 512, 81559", "", holders=holders)
    found = gpus.look()
    assert found is not None
    assert len(found.gpus) == 1
    assert [(each.pid, each.program) for each in found.holders] == [(7, "python3 train.py, --x")]


@pytest.mark.parametrize(
    ("addresses", "missing"),
    [
        (["0", "1"], []),
        (["2"], ["2"]),
        (["GPU-1aa", "gpu-0AA-BB"], []),
        (["GPU-7"], ["GPU-7"]),
        (["MIG-5f", "MIG-GPU-0aa/1/0"], []),
        (["10"], ["10"]),
    ],
)
def test_addresses_are_indexes_or_beginnings_of_uuids(addresses, missing):
    two = [Gpu(str(number), f"GPU-{number}aa-bb", "H100", "0", "9") for number in range(2)]
    assert HostGpus(tuple(two), ()).missing(addresses) == missing


def test_only_the_nodes_own_gpus_are_judged():
    two = [Gpu(str(number), f"GPU-{number}aa-bb", "H100", "0", "9") for number in range(2)]
    holder = GpuHolder(7, "GPU-0aa-bb", "5", "python", "eve")
    found = HostGpus(tuple(two), (holder,))
    assert found.held(["1"]) == []
    assert found.held(["GPU-0aa"]) == [(two[0], [holder])]


def test_a_host_without_the_program_is_no_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.look() is None


def test_a_program_that_fails_is_quoted(smi):
    smi.be("#!/bin/sh\necho 'could not talk to the driver'\nexit 9\n")
    with pytest.raises(GpuToolFailed, match="ended with status 9: could not talk to the driver"):
        gpus.look()


def test_a_program_that_hangs_is_ended_at_the_deadline(smi, tmp_path):
    smi.be("#!/bin/sh\nexec /bin/sleep 60\n")
    began_s = time.monotonic()
    with pytest.raises(GpuToolFailed, match=r"no answer in 0\.2 s"):
        gpus.look(0.2)
    assert time.monotonic() - began_s < 10.0


def test_a_program_that_hangs_in_the_driver_and_outlives_sigkill_is_left(smi, monkeypatch):
    """A broken GPU holds it in the kernel, and the node's start would wait with it."""
    smi.be("#!/bin/sh\nexec /bin/sleep 30\n")
    asked: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: asked.append(process))
    began_s = time.monotonic()
    with pytest.raises(GpuToolFailed, match=r"no answer in 0\.2 s"):
        gpus.look(0.2)
    assert time.monotonic() - began_s < 15.0
    (left,) = asked
    os.kill(left.pid, signal.SIGKILL)
    assert left.wait() == -signal.SIGKILL


def test_an_interrupt_ends_the_program(smi, monkeypatch):
    smi.be("#!/bin/sh\nexec /bin/sleep 30\n")
    asked: list[subprocess.Popen[str]] = []

    def interrupt(process, **_):
        asked.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gpus.look()
    assert [each.returncode for each in asked] == [-signal.SIGKILL]


def test_a_program_that_cannot_run_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    Path(tmp_path, "nvidia-smi").mkdir()
    with pytest.raises(GpuToolFailed, match="cannot run"):
        gpus.look()
