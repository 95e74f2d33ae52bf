"""The Spark task of a slot: what it keeps in memory while its process trains."""

from __future__ import annotations

import os
import pickle
import tempfile
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark import Broadcast

from tfos.many.slot import task as task_module
from tfos.many.slot.specs import SlotSpec
from tfos.many.slot.task import SlotTask, _store
from tfos.node import versions

ITEMS = ((b"a", "1"), (b"bc", "2"))


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_the_items_of_all_slots_are_in_memory_only_until_they_are_stored(tmp_path, is_encrypted):
    path = tmp_path / "broadcast"
    path.write_bytes(pickle.dumps(ITEMS))
    items: Any = Broadcast(path=str(path))
    if is_encrypted:  # Spark has sent it over a socket
        items._value = items.value
        del items._path
    task = SlotTask(cast("Any", None), None, None, items, 0, {})
    for _ in range(2):  # Spark may start a task again in the same process
        with tempfile.TemporaryFile() as file:
            places, digests = _store(task._own([]), file)
            task._forget_items()
        assert hasattr(items, "_value") is is_encrypted
        assert (places, digests) == ({0: (0, 1), 1: (1, 2)}, {0: "1", 1: "2"})


def test_groups_have_no_broadcast_to_forget():
    names = SimpleNamespace(value=("a",))
    task = SlotTask(cast("Any", None), None, names, None, 0, {})
    task._forget_items()
    assert list(task._own([("a", b"rows", "d")])) == [(0, b"rows", "d")]


def test_a_slot_that_trains_has_forgotten_the_items(tmp_path, monkeypatch):
    path = tmp_path / "broadcast"
    path.write_bytes(pickle.dumps(ITEMS))
    items: Any = Broadcast(path=str(path))
    names, function = SimpleNamespace(value=("a", "b")), SimpleNamespace(value=b"")
    launched: list[SlotSpec] = []

    def launch(spec: SlotSpec) -> None:
        assert "_value" not in vars(items)
        launched.append(spec)
        os.write(spec.task_fd, b"ended")

    executor = SimpleNamespace(scratch_dir=str(tmp_path))
    monkeypatch.setattr(task_module, "_launch", launch)
    monkeypatch.setattr(task_module, "taken_keys", lambda run_id: None)
    monkeypatch.setattr(task_module, "find_executor", lambda **_: executor)
    settings: Any = SimpleNamespace(loopback=True, run_id="r")
    task = SlotTask(settings, function, names, items, 0, versions.installed())
    assert list(task(0, [])) == []
    assert launched[0].names == {0: "a", 1: "b"}
