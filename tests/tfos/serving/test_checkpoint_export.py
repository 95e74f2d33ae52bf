"""Exports of checkpoint directories: whole states and deltas, against the rows that were saved."""

from __future__ import annotations

import shutil
import tempfile
import types
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ps.checkpoint.tables import reader
from ps.manifest.manifest import Hyper
from ps.manifest.rule_spec import Adagrad
from tests.support.exports import values
from tests.support.ps_cluster import cluster, filled
from tests.support.saved_tables import SavedTables
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tfos.errors import CheckpointError, ExportError
from tfos.serving import checkpoint_export, export_tables, load, read_rows
from tfos.serving.export_format import ExportManifest, encode_with_digest

__all__ = ["table_kernels_loaded"]
pytestmark = pytest.mark.usefixtures("table_kernels_loaded")


@pytest.fixture
def saved(tmp_path: Path) -> SavedTables:
    """Steps 1, 2 and 3: whole, delta, delta; ids 0..9 are gone in the last one."""
    made = SavedTables(table(ttl_s=64.0), 2)
    root = tmp_path / "saves"
    made.push(range(100))
    made.save(root, 1)
    made.now_s += 40
    made.push(range(10, 100))
    made.push(range(200, 220))
    made.save(root, 2)
    made.now_s += 40
    made.push(range(50, 60))
    made.push()
    made.save(root, 3)
    return made


EXPECTED = {
    1: dict.fromkeys(range(100), 1.0),
    2: {**dict.fromkeys(range(10), 1.0), **dict.fromkeys(range(10, 100), 2.0)}
    | dict.fromkeys(range(200, 220), 1.0),
    3: {**dict.fromkeys(range(10, 100), 2.0), **dict.fromkeys(range(50, 60), 3.0)}
    | dict.fromkeys(range(200, 220), 1.0),
}


def export(tmp_path: Path, name: str = "e", **options: Any) -> ExportManifest:
    return export_tables(tmp_path / "saves", tmp_path / name, progress=False, **options)


def rows_at(path: Path) -> dict[int, float]:
    return {
        one: value
        for ids, rows in read_rows(str(path), "user")
        for one, value in zip(ids.tolist(), values(rows), strict=True)
    }


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("step", [1, 2, 3, None])
def test_each_step_is_exported_as_it_was(tmp_path, step):
    manifest = export(tmp_path, step=step)
    assert rows_at(tmp_path / "e") == EXPECTED[step or 3]
    assert manifest.step == (step or 3)
    assert manifest.base is None


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("is_by_path", [True, False])
@pytest.mark.parametrize(("since", "step"), [(1, 2), (2, 3), (1, 3), (3, 3)])
def test_a_delta_of_a_chain_holds_what_has_changed(tmp_path, since, step, is_by_path):
    export(tmp_path, "old", step=since)
    export(tmp_path, "d", step=step, since=tmp_path / "old" if is_by_path else since)
    check_delta(tmp_path, EXPECTED[step])
    changed = [one for one in EXPECTED[since] if EXPECTED[since][one] != EXPECTED[step].get(one)]
    new = EXPECTED[step].keys() - EXPECTED[since].keys()
    delta = export(tmp_path, "d", step=step, since=since).tables[0]
    assert delta.num_rows + delta.num_removed == len(changed) + len(new)


def check_delta(tmp_path: Path, expected: dict[int, float]) -> None:
    """Serve the older export, refresh it with the delta, look every id up."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    served = load(tmp_path / "old", cache, progress=False)
    served.refresh(tmp_path / "d")
    found = values(served.lookup("user", np.arange(300)))
    assert found == [expected.get(one, 0.0) for one in range(300)]


@pytest.mark.parametrize("since", [1, 2, 3])
def test_a_delta_over_a_whole_save_compares_both(tmp_path, saved, since):
    saved.push(range(90, 110))
    saved.save(tmp_path / "saves", 4, full=True)
    export(tmp_path, "old", step=since)
    export(tmp_path, "d", since=since)
    expected = dict(EXPECTED[3])
    for one in range(90, 110):
        expected[one] = expected.get(one, 0.0) + 1.0
    check_delta(tmp_path, expected)


@pytest.mark.usefixtures("saved")
def test_a_delta_to_an_older_step_goes_back(tmp_path):
    export(tmp_path, "old", step=3)
    export(tmp_path, "d", step=1, since=3)
    check_delta(tmp_path, EXPECTED[1])


def test_a_step_that_is_gone_is_refused(tmp_path, saved):
    export(tmp_path, "old", step=2)
    export(tmp_path, "delta", step=3, since=2)
    saved.save(tmp_path / "saves", 4, full=True)
    for step in (1, 2, 3):
        shutil.rmtree(tmp_path / "saves" / f"step-{step}")
    with pytest.raises(ExportError, match="no delta since step 2: it is gone from"):
        export(tmp_path, "d", since=2)
    with pytest.raises(ExportError, match="no delta since step 3: it is gone from"):
        export(tmp_path, "d", since=tmp_path / "delta")
    export(tmp_path, "d", since=tmp_path / "old")  # compares with the export's own rows
    check_delta(tmp_path, EXPECTED[3])
    with pytest.raises(CheckpointError, match="step 7"):
        export(tmp_path, step=7)


@pytest.mark.usefixtures("saved")
def test_an_export_of_another_save_of_its_step_is_compared_by_its_own_rows(tmp_path):
    """As of a run that has begun anew in a directory that was emptied, and has come to its step."""
    manifest = msgspec.structs.replace(export(tmp_path, "old", step=2), state="other-2")
    (tmp_path / "old" / "export.json").write_bytes(encode_with_digest(manifest))
    assert export(tmp_path, "d", since=tmp_path / "old").base == "other-2"
    check_delta(tmp_path, EXPECTED[3])


@pytest.mark.parametrize(("since", "gone"), [(None, 3), (1, 1)])
def test_a_step_that_newer_saves_remove_while_it_is_read_is_not_called_damaged(
    tmp_path, saved, monkeypatch, since, gone
):
    saved.push(range(5))
    saved.save(tmp_path / "saves", 4, full=True)

    def removed(*args: Any, **options: Any) -> Any:
        shutil.rmtree(tmp_path / "saves" / f"step-{gone}")  # as retention, the manifest with it
        return reader.read_rows(*args, **options)

    monkeypatch.setattr(checkpoint_export, "read_rows", removed)
    with pytest.raises(CheckpointError, match=f"^step {gone} of .* was removed while it was read"):
        export(tmp_path, step=3 if since is None else 4, since=since)
    assert not (tmp_path / "e").exists()


def test_a_damaged_step_is_not_called_removed(tmp_path, saved):
    saved.save(tmp_path / "saves", 4, full=True)
    name = tmp_path / "saves" / "step-4" / "ps-0.data"
    name.write_bytes(b"x" + name.read_bytes()[1:])
    with pytest.raises(CheckpointError, match="is damaged"):
        export(tmp_path, step=4)


@pytest.mark.usefixtures("saved")
def test_rows_that_exceed_memory_wait_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tfos.serving.checkpoint_export.DEFAULT_MEMORY_BYTES", 500)
    (tmp_path / "staging").mkdir()
    export(tmp_path, staging_dir=tmp_path / "staging")
    assert rows_at(tmp_path / "e") == EXPECTED[3]
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.usefixtures("saved")
def test_a_full_disk_of_rows_that_wait_is_named_with_what_is_free(tmp_path, monkeypatch):
    """The error named neither the directory nor the argument."""
    real = tempfile.mkdtemp

    def full(**options: Any) -> str:
        made = Path(real(**options))
        for part in range(256):
            (made / str(part)).symlink_to("/dev/full")
        return str(made)

    monkeypatch.setattr("tfos.serving.checkpoint_export.DEFAULT_MEMORY_BYTES", 500)
    monkeypatch.setattr("ps.sorted_rows.sorter.tempfile", types.SimpleNamespace(mkdtemp=full))
    (tmp_path / "staging").mkdir()
    text = r"to .*/e: its files have no room in \S*/staging, where [\d.]+ MB are free .*staging_dir"
    with pytest.raises(ExportError, match=text):
        export(tmp_path, staging_dir=tmp_path / "staging")
    assert list((tmp_path / "staging").iterdir()) == []
    assert not (tmp_path / "e").exists()


def test_other_tables_are_refused(tmp_path, saved):
    export(tmp_path, "old", step=3)
    shutil.rmtree(tmp_path / "saves")
    wider = SavedTables(table(dim=5), 1)
    wider.save(tmp_path / "saves", 1)
    told = r"'user' .float32.4.*step 1 has 'user' .float32.5.*whole export"
    with pytest.raises(ExportError, match=told):
        export(tmp_path, since=tmp_path / "old")
    assert saved is not wider


def test_each_of_several_tables_has_its_own_rows_without_their_slots(tmp_path, cache):
    manifest, ids = with_tables(table("user", Adagrad()), table("item")), np.arange(80)
    pushes: list[dict[str, Any]] = [{"user": ids[:50], "item": ids[30:]}, {"item": ids[:9]}]
    with cluster(num_servers=2) as bed:
        (chief,) = bed.workers(manifest, filled(manifest))
        for step, pushed in enumerate(pushes):
            grads = {name: (own, ones(own)) for name, own in pushed.items()}
            chief.tables.push(grads, hyper=Hyper(0.1))
            chief.save(tmp_path / "saves", step)
        expected = chief.tables.lookup({"user": ids, "item": ids})
    export(tmp_path, "old", step=0)
    made = {each.name: each.num_rows for each in export(tmp_path, "d", since=0).tables}
    assert made == {"user": 0, "item": 9}
    served = load(tmp_path / "old", cache, progress=False)
    served.refresh(tmp_path / "d")
    for name, rows in expected.items():
        np.testing.assert_array_equal(served.lookup(name, ids), rows)
    assert [served.num_rows(name) for name in expected] == [50, 59]
