"""What a user reads of the save that an interrupted cluster makes at last."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ps.checkpoint.choice import latest, steps_on_disk
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.manifest.manifest import Hyper
from ps.protocol import messages
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest
from tests.support.waiting import wait_until
from tfos.driver.final_checkpoint import FinalCheckpoint

pytestmark = [pytest.mark.socket, pytest.mark.fault("F15")]
MANIFEST = make_manifest(rule=ADD)


class Heard:
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.line = self.warn = self.lines.append


def save(bed: Cluster, directory: Path, timeout_s: float = 10.0) -> str:
    servers = [SimpleNamespace(endpoint=each, is_live=True, name="ps") for each in bed.endpoints]
    state = SimpleNamespace(servers=servers, workers=[None] * bed.num_workers)
    coordinator: Any = SimpleNamespace(read=lambda look: look(state))
    console: Any = Heard()
    FinalCheckpoint(str(directory), coordinator, bed.credentials, console).save(timeout_s)
    return console.lines[0]


def test_it_saves_what_the_servers_hold_once(tmp_path: Path):
    with cluster("inproc", num_servers=2) as bed:
        assert save(bed, tmp_path).startswith(f"nothing to save to {tmp_path}")
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.push(filled(MANIFEST, 1.0), hyper=Hyper(1.0), rows=1)
        assert save(bed, tmp_path).startswith(
            f"saved the parameters after 1 updates to {tmp_path}/step-1"
        )
        assert save(bed, tmp_path).startswith(
            f"the parameters after 1 updates are in {tmp_path}/step-1 already"
        )
    assert steps_on_disk(storage_at(tmp_path)) == [latest(tmp_path)] == [1]


def test_servers_that_workers_left_a_clock_apart_are_saved_as_they_are(tmp_path: Path):
    manifest = make_manifest(rule=ADD, consistency="sync")
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.push(filled(manifest, 1.0), hyper=Hyper(1.0), rows=1)
        push = partial(messages.Push, manifest.hash(), rows=0, hyper=None, pull=False, null=True)
        client._servers.change(
            lambda number: push(number=number),
            timeout_s=10,
            links=client._servers.links[:1],
        )
        assert [server.clock for server in client.describe()] == [2, 1]
        assert save(bed, tmp_path).startswith(f"saved the parameters after 2 updates to {tmp_path}")
    with cluster("inproc", num_servers=2) as bed:
        restored = bed.client()
        assert restored.restore(tmp_path) == 2
        assert [server.clock for server in restored.describe()] == [2, 2]


def test_what_changed_after_the_last_update_is_saved_too(tmp_path: Path):
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.push(filled(MANIFEST, 1.0), hyper=Hyper(1.0), rows=1)
        client.save(tmp_path, None)
        client.assign(filled(MANIFEST, 7.0))
        assert save(bed, tmp_path).startswith(
            f"saved the parameters after 1 updates to {tmp_path}/step-2"
        )
        assert save(bed, tmp_path).startswith(
            f"the parameters after 1 updates are in {tmp_path}/step-2 already"
        )
    with cluster("inproc") as bed:
        restored = bed.client()
        assert restored.restore(tmp_path) == 2
        assert set(bed.pulled(restored)["trainable"].tolist()) == {7.0}


def test_it_is_the_newest_beside_another_runs_checkpoints(tmp_path: Path):
    for value, step in ((1.0, 0), (2.0, 1)):
        with cluster("inproc") as bed:
            bed.workers(MANIFEST, filled(MANIFEST, value))
            assert f"to {tmp_path}/step-{step} " in save(bed, tmp_path)
    with cluster("inproc") as bed:
        restored = bed.client()
        assert restored.restore(tmp_path) == 1
        assert set(bed.pulled(restored)["trainable"].tolist()) == {2.0}


def test_another_job_that_saves_there_is_in_the_way(tmp_path: Path):
    with cluster("inproc") as other, cluster("inproc") as bed:
        other.workers(MANIFEST, filled(MANIFEST))[0].save(tmp_path, 5)
        bed.workers(MANIFEST, filled(MANIFEST))
        said = save(bed, tmp_path)
    assert said.startswith("the parameters were not saved")
    assert f"{tmp_path} is used by job" in said
    assert "abort_s" not in said, "more time would not help"


@pytest.mark.slow
def test_a_file_system_that_hangs_holds_the_end_up_no_longer_than_allowed(
    tmp_path: Path, monkeypatch
):
    put, is_back = LocalStorage.put, threading.Event()

    def hang(*given, **options) -> None:
        assert is_back.wait(60)
        put(*given, **options)

    monkeypatch.setattr(LocalStorage, "put", hang)
    with cluster("inproc") as bed:
        bed.workers(MANIFEST, filled(MANIFEST))
        said = save(bed, tmp_path, timeout_s=5.0)
        is_back.set()
        wait_until(lambda: steps_on_disk(storage_at(tmp_path)) == [0], "the save that went on")
    assert f"were not saved to {tmp_path} within 5.0 s: it is still in progress" in said
    assert "A larger abort_s" in said


def test_it_saves_where_no_thread_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Python 3.12 starts none while the interpreter exits, where an unattended cluster ends."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if not thread.name.startswith("rpc-"):  # those of the servers, which do not exit
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.push(filled(MANIFEST, 1.0), hyper=Hyper(1.0), rows=1)
        monkeypatch.setattr(threading.Thread, "start", refuse)
        told = save(bed, tmp_path)
        assert told.startswith(f"saved the parameters after 1 updates to {tmp_path}/step-1")
    assert [each.name for each in tmp_path.iterdir()] == ["step-1"]


def test_a_save_for_which_no_thread_can_be_started_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> str:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(FinalCheckpoint, "_try", refuse)
    with cluster("inproc", num_servers=1) as bed:
        told = save(bed, tmp_path)
    assert told.startswith(f"the parameters were not saved to {tmp_path}: can't")
