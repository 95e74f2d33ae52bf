"""GPUs among the facts of a place."""

from __future__ import annotations

import os

import pytest

from tests.support.fake_gpus import FakeGpus
from tfos.doctor.collection import CollectRequest, collect

LOOK = CollectRequest(checks=("gpus",))


@pytest.mark.fault("F59")
def test_gpus_are_listed_with_who_computes_there(tmp_path, monkeypatch):
    smi = FakeGpus(tmp_path, monkeypatch)
    smi.have(2, (os.getpid(), 1))
    facts = collect(LOOK)["gpus"]
    assert facts["gpus"][0] == "0 NVIDIA H100, 512 of 81559 MB used"
    (held,) = facts["held"]
    assert held.startswith(f"1 by pid {os.getpid()} (python3, user ")


def test_a_host_without_the_program_or_with_a_broken_one_says_so(tmp_path, monkeypatch):
    smi = FakeGpus(tmp_path, monkeypatch)
    smi.be("#!/bin/sh\nexit 9\n")
    assert collect(LOOK) == {"gpus": {"failed": "nvidia-smi ended with status 9: "}}
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert collect(LOOK) == {"gpus": {}}
