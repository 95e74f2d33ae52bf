"""Which checkpoint is the newest, when a run went on from an older one than there was."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint import choice
from ps.checkpoint.inspect import inspect
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError
from ps.manifest.manifest import Hyper
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest

pytestmark = pytest.mark.socket

HYPER = Hyper(1.0)


@pytest.mark.fault("F41")
def test_a_newer_step_that_was_away_for_a_while_is_not_gone_back_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Step 950 cannot be seen when a run goes on from 900; later it can, and 920 is this run's."""
    manifest = make_manifest(rule=ADD)
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for step in (900, 950):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            client.save(tmp_path, step)
    open_file = LocalStorage.open

    def away(self: LocalStorage, name: str) -> Any:
        if name.startswith("step-950"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return open_file(self, name)

    with cluster("inproc", num_servers=1) as bed, monkeypatch.context() as patched:
        patched.setattr(LocalStorage, "open", away)
        client = bed.client()
        assert client.restore(tmp_path) == 900
        assert "step 900 is restored, not step 950, which has a higher number" in caplog.text
        client.push(filled(manifest, 5.0), hyper=HYPER, rows=1)
        with pytest.raises(CheckpointError, match=r"step 950 was in .* went on from an older one"):
            client.save(tmp_path, 950)
        client.save(tmp_path, 920)
    assert choice.latest(tmp_path) == inspect(tmp_path).newest == 920
    assert choice.newest_sound(tmp_path, strict=True).step == 920
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        choice.newest_sound(tmp_path, strict=True, job="another")
    caplog.clear()
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 920
        assert "step 920 is restored, not step 950, which has a higher number" in caplog.text
        assert set(bed.pulled(client)["trainable"].tolist()) == {6.0}
        client.save(tmp_path, 930, options=SaveOptions(keep=1))
    assert choice.steps_on_disk(storage_at(tmp_path)) == [930], (
        "what was passed over goes before what is newer"
    )


def test_a_new_root_survives_a_crash_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[Path] = []
    monkeypatch.setattr("ps.checkpoint.storage._sync_directory", synced.append)
    with cluster("inproc") as bed:
        (client,) = bed.workers(make_manifest(), filled(make_manifest()))
        client.save(tmp_path / "runs" / "seven", 1)
    assert synced[:2] == [tmp_path, tmp_path / "runs"]
    assert synced[-1] == tmp_path / "runs" / "seven"
