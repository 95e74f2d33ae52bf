"""Models in a Python worker: how often they are read, and what TensorFlow finds of the host."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import TaskContext

from tfos.errors import SettingsError
from tfos.predict import loading
from tfos.predict.signature import ModelSource, TensorInfo

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


@pytest.fixture
def made(monkeypatch):
    """Models that are read, without TensorFlow: the one call of each."""
    calls: list[loading.Call] = []

    def read(source: Any, file: Any, digest: str) -> loading.LoadedModel:
        calls.append(lambda tensors: tensors)
        return loading.LoadedModel(digest, {"x": TensorInfo("float32", ())}, {}, call=calls[-1])

    monkeypatch.setattr(loading, "_read_keras", read)
    monkeypatch.setattr(loading, "_limit_to_task", lambda: None)
    monkeypatch.setattr(loading, "_loaded", {})
    return calls


def test_a_model_whose_file_is_the_same_is_not_read_again(tmp_path, made):
    """Each one that is read stays in the memory of Spark's Python worker until others come."""
    path = tmp_path / "m.keras"
    path.write_bytes(b"first")
    sources = [ModelSource(path=str(path)), ModelSource(content=b"first")]
    signatures = [loading.read_signature(each) for each in sources]
    assert [loading.read_signature(each) for each in sources] == signatures
    assert len(made) == 2
    path.write_bytes(b"second")
    second = loading.read_signature(sources[0])
    assert second.digest != signatures[0].digest
    assert [loading.loaded(each).call for each in (*signatures, second)] == made


@pytest.mark.parametrize(
    "name", ["saved_model.pb", "saved_model.pbtxt", "variables/variables.index", "assets/a/words"]
)
def test_a_saved_model_of_which_a_file_has_changed_is_another_one(tmp_path, name):
    """The text of the graph is read where the bytes are not there."""
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    digests = []
    for content in (b"first", b"second"):
        file.write_bytes(content)
        digests.append(loading._digest(tmp_path))
    assert digests[0] != digests[1]


def test_retries_after_a_model_has_changed_do_not_read_it_again(tmp_path, made):
    path = tmp_path / "m.keras"
    path.write_bytes(b"first")
    signature = loading.read_signature(ModelSource(path=str(path)))
    loading._loaded.clear()
    path.write_bytes(b"second")
    for _ in range(4):
        with pytest.raises(SettingsError, match=r"m\.keras has changed since its names"):
            loading.loaded(signature)
    assert len(made) == 2


def test_a_model_that_is_replaced_before_it_is_read_is_not_taken_for_the_old_one(
    tmp_path, made, monkeypatch
):
    """TensorFlow's import lies between; a path may be given a new model at any time."""
    path = tmp_path / "m.keras"
    path.write_bytes(b"first")
    signature = loading.read_signature(ModelSource(path=str(path)))
    loading._loaded.clear()
    with monkeypatch.context() as patched:
        patched.setattr(loading, "_limit_to_task", lambda: path.write_bytes(b"second"))
        with pytest.raises(SettingsError, match=r"m\.keras has changed since its digest"):
            loading.loaded(signature)
    with pytest.raises(SettingsError, match=r"m\.keras has changed since its names"):
        loading.loaded(signature)
    path.write_bytes(b"first")
    assert loading.loaded(signature).digest == signature.digest
