"""What the driver is told of the chief's saves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ps.manifest.manifest import Hyper
from tests.support.nodes import node_settings
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest
from tests.support.waiting import wait_until
from tfos.config import Checkpoints
from tfos.control.messages import NotSaved
from tfos.worker.run_saves import RunSaves
from tfos.worker.saver import ChiefSaver

pytestmark = pytest.mark.socket


@pytest.mark.fault("F40")
def test_the_driver_is_told_of_a_last_save_that_failed(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("ps.client.saving.periodic_saver._RETRY_S", 0.001)
    root = tmp_path / "saves"
    checkpoints = Checkpoints(directory=str(root), every_s=3600.0)
    sent: list[Any] = []
    manifest = make_manifest(rule=ADD)
    with cluster("inproc") as bed:
        servers = SimpleNamespace(saver=lambda: ChiefSaver(checkpoints, bed.client))
        context: Any = SimpleNamespace(is_chief=True, servers=servers)
        unused: Any = None
        saves = RunSaves(
            node_settings(feeds=(), checkpoints=checkpoints), unused, unused, sent.append
        )
        saves.begin(context)
        client = bed.client()
        client.seed(manifest, filled(manifest))
        wait_until(
            lambda: saves._saver is not None and saves._saver.saved_step == 0, "the first save"
        )
        client.push(filled(manifest, 1.0), hyper=Hyper(1.0), rows=1)
        root.rename(tmp_path / "away")
        root.touch()
        saver = saves.end()
        assert saver is not None
        error = saves.close(saver)
    assert "Not a directory" in error
    assert sent == [NotSaved(str(root), error, 0, is_last=True)]


def test_no_save_begins_before_the_record_of_epochs_is_this_runs(tmp_path: Path):
    """It would be the newest, with the epochs of the run that this one goes on from."""
    checkpoints = Checkpoints(directory=str(tmp_path), every_s=3600.0)
    manifest, told = make_manifest(rule=ADD), list[str]()

    def begin(saver: Any, *_: Any, **__: Any) -> None:
        told.append(saver.save_between())

    with cluster("inproc") as bed:
        client = bed.client()
        client.seed(manifest, filled(manifest))
        servers = SimpleNamespace(
            saver=lambda: ChiefSaver(checkpoints, bed.client), resumes_epochs=False
        )
        context: Any = SimpleNamespace(is_chief=True, servers=servers, ps_client=None)
        trained: Any = SimpleNamespace(begin=begin)
        unused: Any = None
        settings = node_settings(feeds=("input",), checkpoints=checkpoints)
        saves = RunSaves(settings, trained, unused, unused)
        saves.begin(context)
        saver = saves.end()
        assert saver is not None
        wait_until(lambda: saver.saved_step == 0, "the first save")
        saver.close()
    assert told[0], "this save was to wait"
