"""What TensorFlow finds of a host when a Spark task loads a model: the task's cores and GPUs."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext

from tfos.predict import loading

NAMES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_FORCE_GPU_ALLOW_GROWTH")


@pytest.mark.parametrize(
    ("given", "before", "expected"),
    [
        (["3", "4"], {}, ["3,4", "PCI_BUS_ID", None]),
        (["3"], {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ["3", "PCI_BUS_ID", None]),
        ([], {"CUDA_VISIBLE_DEVICES": "7"}, ["7", None, None]),  # Spark schedules none
        (["3"], {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, ["3", "FASTEST_FIRST", None]),
    ],
)
def test_a_task_sees_its_gpus_takes_their_memory_as_it_needs_it_and_leaves_the_environment(
    monkeypatch, given, before, expected
):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    seen: list[Any] = []

    def listed(kind):
        seen.append(list(map(os.environ.get, NAMES)))
        return [f"a {kind}"]

    config = SimpleNamespace(
        threading=SimpleNamespace(
            set_intra_op_parallelism_threads=seen.append,
            set_inter_op_parallelism_threads=seen.append,
        ),
        list_physical_devices=listed,
        experimental=SimpleNamespace(set_memory_growth=lambda *growth: seen.append(growth)),
    )
    monkeypatch.setitem(sys.modules, "tensorflow", SimpleNamespace(config=config))
    resources = {"gpu": SimpleNamespace(addresses=given)} if given else {}
    context = SimpleNamespace(resources=lambda: resources, cpus=lambda: 2)
    monkeypatch.setattr(TaskContext, "get", lambda: context)
    environment = dict(os.environ)
    loading._limit_to_task()
    assert seen == [2, 2, expected, ("a GPU", True)]
    assert dict(os.environ) == environment


def test_a_program_that_is_no_task_keeps_its_environment(monkeypatch):
    monkeypatch.setattr(TaskContext, "get", lambda: None)
    before = dict(os.environ)
    loading._limit_to_task()
    assert dict(os.environ) == before
