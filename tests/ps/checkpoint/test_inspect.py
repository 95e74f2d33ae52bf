"""What people are told of a checkpoint directory, and its values without tfos."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.checkpoint import reader
from ps.checkpoint.choice import read_manifest
from ps.checkpoint.format import Checkpoint, decode_manifest
from ps.checkpoint.inspect import clock_of, export_npz, inspect, table_arrays
from ps.checkpoint.reader import ChainFiles
from ps.checkpoint.restore import read_values, verify_files
from ps.checkpoint.score import Score
from ps.checkpoint.tables.format import read_checked
from ps.checkpoint.writer import commit, write_shard
from ps.cli.main import main
from ps.client.saving.saver import SaveOptions
from ps.dense.shard import DenseShard
from ps.errors import CheckpointError
from ps.manifest.manifest import Adam, GroupSpec, Hyper, Manifest, ParamSpec
from tests.support.ps_cluster import cluster, filled, random_arrays
from tests.support.tables import ones, table, with_tables

pytestmark = pytest.mark.socket

PARAMS = (ParamSpec("dense/kernel", (7, 11)), ParamSpec("scale", ()), ParamSpec("none", (0, 3)))
MANIFEST = Manifest(groups=(GroupSpec("trainable", "float32", Adam(), PARAMS),), bucket_bytes=128)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """Steps 1 (full), 2 and 3 (deltas) of two servers; the values of the last."""
    root = tmp_path / "saves"
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(MANIFEST, random_arrays(MANIFEST, 0))
        for step in (1, 2, 3):
            client.push(random_arrays(MANIFEST, step), hyper=Hyper(0.1), rows=1)
            score = Score("val_loss", 0.25, higher_is_better=False) if step == 2 else None
            client.save(root, step, options=SaveOptions(full_every=9, score=score))
        return root, bed.pulled(client)


def test_an_export_is_readable_without_us(saved, tmp_path: Path):
    root, values = saved
    out = tmp_path / "out.npz"
    done = subprocess.run(
        [sys.executable, "-m", "ps", "export", str(root), "--npz", str(out), "--slots"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"{out}: 9 arrays of step 3\n"), done.stderr
    with np.load(out, allow_pickle=False) as found:
        assert found["trainable/dense/kernel"].shape == (7, 11)
        assert found["trainable/scale"].shape == ()
        assert found["trainable/none"].shape == (0, 3)
        flat = np.concatenate([found[f"trainable/{p.name}"].ravel() for p in PARAMS])
        assert np.array_equal(flat, values["trainable"])
        slots = {name.rpartition(":")[2] for name in found if ":" in name}
        assert len(slots) == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_directory_is_described_with_what_is_wrong(saved, capsys):
    root, _ = saved
    data = root / "step-2" / "ps-1.data"
    whole = data.read_bytes()
    data.write_bytes(b"\xff" + whole[1:])
    (root / "step-9").mkdir()
    assert main(["inspect", str(root)]) == 0
    text = capsys.readouterr().out
    assert f"{root}: newest step 1\n" in text
    assert "lease: nobody saves here" in text
    assert "step 9: INCOMPLETE: step 9 has no readable manifest" in text
    assert "step 3: adds to step 2, async, clock 3, 2 servers" in text
    assert "DAMAGED: it needs step 2: " in text
    assert text.count("  scored: val_loss 0.25\n") == 1
    assert "step-2/ps-1.data is damaged: the digest of bucket" in text
    assert "group trainable: float32, rule adam, slots" in text
    assert "    dense/kernel [7, 11]" in text
    data.write_bytes(whole)
    assert clock_of(root, 3) == 3
    assert main(["inspect", str(root), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["newest"], [step["step"] for step in report["steps"]]) == (3, [9, 3, 2, 1])
    assert report["steps"][1]["job"].startswith("test-")


@pytest.mark.attack("A18", "A24")
def test_names_in_a_checkpoint_neither_steer_the_terminal_nor_pass_for_lines(
    tmp_path: Path, capsys
):
    name = "user\x1b[2J\n  whole: every digest is right\u202e"
    manifest = with_tables(table(name))
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        client.save(tmp_path, 1)
    assert main(["inspect", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert r"table user\x1b[2J\n  whole: every digest is right\u202e: float32[4]" in text
    assert all(line.isprintable() for line in text.splitlines())
    assert text.splitlines().count("  whole: every digest is right") == 1
    assert main(["export", f"{tmp_path}/\x1b[2J", "--npz", str(tmp_path / "x.npz")]) == 2
    assert r"/\x1b[2J" in capsys.readouterr().err


def test_each_manifest_is_read_once_also_of_deltas(saved, monkeypatch: pytest.MonkeyPatch):
    root, _ = saved
    read: list[int] = []

    def decoded(data: bytes, path: str) -> Checkpoint:
        checkpoint = decode_manifest(data, path)
        read.append(checkpoint.step)
        return checkpoint

    monkeypatch.setattr(reader, "decode_manifest", decoded)
    report = inspect(root)
    assert [(each.step, each.error) for each in report.steps] == [(3, ""), (2, ""), (1, "")]
    assert sorted(read) == [1, 2, 3]


def test_a_step_that_lacks_a_file_still_says_which_steps_its_run_has_passed_over(tmp_path: Path):
    root = tmp_path / "saves"
    with cluster("inproc", num_servers=1) as bed:
        (client,) = bed.workers(MANIFEST, random_arrays(MANIFEST, 0))
        for step in (1, 5):
            client.save(root, step)
        bed.servers[0].close()
    with cluster("inproc", num_servers=1) as bed:
        client = bed.client()
        client.restore(root, step=1)
        client.save(root, 6)
    (root / "step-6" / "ps-0.data").unlink()
    report = inspect(root)
    assert [bool(each.error) for each in report.steps] == [True, False, False]
    assert report.newest == 1


def test_each_table_is_read_once_for_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names, ids = ("a", "b", "c"), np.arange(100)
    manifest = with_tables(*map(table, names))
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for step in (1, 2):
            client.tables.push({name: (ids, ones(ids)) for name in names}, hyper=Hyper(0.1))
            client.save(tmp_path, step, options=SaveOptions(full_every=9))
    read: list[tuple[str, int, str]] = []

    def noted(file: Any, path: str, expected: Any, what: str) -> bytes:
        read.append((path, file.tell(), what))
        return read_checked(file, path, expected, what)

    monkeypatch.setattr("ps.checkpoint.tables.format.read_checked", noted)
    arrays = dict(table_arrays(tmp_path, read_manifest(tmp_path)))
    assert [arrays[f"tables/{name}/ids"].tolist() for name in names] == [ids.tolist()] * 3
    assert len({path for path, _, _ in read}) == 4
    assert len(read) == len(set(read)), "a piece was read twice"


def test_the_lease_is_shown_while_somebody_saves(tmp_path: Path):
    with cluster("inproc") as bed:
        (client,) = bed.workers(MANIFEST, random_arrays(MANIFEST, 0))
        client.save(tmp_path, 1)
        assert inspect(tmp_path).lease.startswith(f"job '{bed.credentials.cluster_id}' (host")


def test_nothing_to_restore_and_errors_have_their_own_status(tmp_path: Path, capsys):
    assert main(["inspect", str(tmp_path / "absent")]) == 1
    assert "no checkpoint is here, or no such directory" in capsys.readouterr().out
    out = str(tmp_path / "x.npz")
    assert main(["export", str(tmp_path), "--npz", out]) == 2
    assert "ps export: no complete checkpoint in" in capsys.readouterr().err


def test_a_step_that_newer_saves_remove_while_it_is_read_is_not_called_damaged(
    saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    root, out, read = saved[0], tmp_path / "x.npz", read_values

    def removed(chain: ChainFiles, wanted: set[int]) -> Any:
        shutil.rmtree(root / "step-3")
        return read(chain, wanted)

    monkeypatch.setattr("ps.checkpoint.inspect.read_values", removed)
    assert main(["export", str(root), "--npz", str(out), "--step", "3"]) == 2
    assert f"step 3 of {root} was removed while it was read" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("gone", ["step-1", "step-3", "step-3/manifest.json"])
def test_a_report_leaves_out_what_newer_saves_remove_meanwhile(saved, monkeypatch, gone: str):
    """Read already or not. Its manifest goes first: the directory stays without some files."""
    root, verify = saved[0], verify_files

    def removed(storage: Any, checkpoint: Checkpoint) -> Any:
        if checkpoint.step == 3:
            storage.remove(gone)
            storage.remove(f"{gone[:6]}/ps-1.data")
        return verify(storage, checkpoint)

    monkeypatch.setattr("ps.checkpoint.inspect.verify_files", removed)
    left = [(step, "") for step in (3, 2, 1) if f"step-{step}" != gone[:6]]
    assert [(each.step, each.error) for each in inspect(root).steps] == left


@pytest.mark.attack("A18")
@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/../../x", "..\\x", "a\0b", "a//b", ".", "a/\u202e/b", "\n"]
)
def test_a_name_that_leads_out_of_the_archive_is_refused_escaped(tmp_path: Path, name: str):
    group = GroupSpec("g", "float32", Adam(), (ParamSpec(name, (3,)),))
    shard = DenseShard(Manifest(groups=(group,)), rank=0, num_servers=1, num_workers=1)
    record = write_shard(tmp_path, "ab", rank=0, shard=shard)
    commit(tmp_path, "ab", step=1, manifest=shard.manifest, shards=[record])
    out = tmp_path / "out.npz"
    with pytest.raises(CheckpointError, match="cannot be a name in an archive") as refused:
        export_npz(tmp_path, read_manifest(tmp_path), out)
    assert ascii(f"g/{name}") in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1"]
