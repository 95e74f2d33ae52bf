"""Checkpoints on a real HDFS whose servers die, freeze and refuse, and on one that works."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from typer.testing import CliRunner

from feeding.filesystem.config import FileSystemConfig
from feeding.filesystem.registry import filesystem_for
from ps.checkpoint.choice import latest, read_manifest, steps_on_disk
from ps.checkpoint.format import step_name
from ps.checkpoint.restore import verify
from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError
from ps.manifest.manifest import Hyper
from scripts.local_hdfs.cluster import LocalHdfs
from tests.support.counted_pushes import push_until_told
from tests.support.keras_training import serving
from tests.support.nodes import NodeBed
from tests.support.ps_cluster import ADD, Cluster, cluster, filled, make_manifest, random_arrays
from tests.support.tables import ones, table, with_tables
from tests.support.waiting import wait_until
from tfos.cli.main import app
from tfos.config import Checkpoints
from tfos.console.console import Console
from tfos.control import messages
from tfos.files.checkpoint_storage import RemoteStorage, Storages
from tfos.serving import export_tables, load, read_rows
from tfos.serving.server_export import ServerExport
from tfos.worker.saver import ChiefSaver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PATIENT = Storages(config=FileSystemConfig(call_timeout_s=3, patience_s=100))
# A busy machine trains the steps, and starts a NameNode, in more than the minute of the test.
FOR_MINUTES_S = 300.0
FOR_MINUTES = Storages(config=FileSystemConfig(call_timeout_s=3, patience_s=FOR_MINUTES_S))
HURRIED = Storages(config=FileSystemConfig(call_timeout_s=0.5, patience_s=5))
MANIFEST = make_manifest(20_000, rule=ADD)
ONES = filled(MANIFEST, 1.0)
HYPER = Hyper(1.0)


@pytest.fixture
def directory(hdfs: LocalHdfs) -> str:
    return f"{hdfs.url}/{secrets.token_hex(4)}"


def pushed(client: PSClient, count: int) -> None:
    for _ in range(count):
        client.push(ONES, hyper=HYPER, rows=1)


def rows_by_id(client: PSClient) -> dict[int, bytes]:
    return {
        int(number): bytes(row)
        for ids, batch in client.tables.scan("user")
        for number, row in zip(ids, batch, strict=True)
    }


class Trainer:
    """Pushes until it is stopped; a save that blocked it would show in its count."""

    def __init__(self, bed: Cluster) -> None:
        self.client = bed.client(1)
        self.client.attach()
        self.pushes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.client.push(ONES, hyper=HYPER, rows=1)
            self.pushes += 1

    def await_more(self, count: int, what: str) -> None:
        seen = self.pushes
        wait_until(lambda: self.pushes >= seen + count, what, 60.0)

    def close(self) -> None:
        self._ended.set()
        self._thread.join()


def test_saves_go_on_after_everything_was_killed_with_another_number_of_servers(
    hdfs: LocalHdfs, directory: str, tmp_path: Path
):
    start = random_arrays(MANIFEST, 0)
    with cluster(num_servers=2, open_storage=PATIENT) as bed:
        (client,) = bed.workers(MANIFEST, start)
        for step in (1, 2, 3):
            pushed(client, 1)
            path = client.save(directory, step, options=SaveOptions(keep=2, full_every=3))
            assert path == f"{directory}/{step_name(step)}"
        expected = bed.pulled(client)
        with pytest.raises(CheckpointError, match=f"step 3 exists in {directory}"):
            client.save(directory, 3)
    storage = PATIENT(directory)
    assert sorted(storage.names()) == ["step-1", "step-2", "step-3"]  # what the deltas need stays
    verify(storage, read_manifest(storage, 3))
    with cluster(num_servers=3, open_storage=PATIENT) as bed:
        client = bed.client()
        assert client.restore(directory) == 3
        found = bed.pulled(client)
        assert np.array_equal(found["trainable"], expected["trainable"])
        pushed(client, 1)
        client.save(directory, None)
        assert latest(storage) == 4
    shown = CliRunner().invoke(app, ["inspect", directory])
    assert shown.exit_code == 0
    assert shown.output.startswith(f"{directory}: newest step 4\nlease: nobody saves here\n")
    assert shown.output.count("whole: every digest is right") == 4
    out = tmp_path / "out.npz"
    told = CliRunner().invoke(app, ["export", directory, "--npz", str(out), "--step", "3"])
    assert told.output == f"{out}: 2 arrays of step 3\n"
    with np.load(out) as arrays:
        flat = np.concatenate([arrays["trainable/dense/kernel"], arrays["trainable/dense/bias"]])
    assert np.array_equal(flat, expected["trainable"])


@pytest.mark.long
@pytest.mark.fault("F42")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' save
def test_rows_of_a_full_table_come_back_from_a_chain_of_deltas(directory: str, tmp_path: Path):
    manifest = with_tables(table(max_rows=400, when_full="lru", segments=4))
    with cluster(open_storage=PATIENT) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for number in range(52):
            ids = np.arange(number * 10, number * 10 + 12)
            client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
            if number in (39, 45, 51):
                client.save(directory, number, options=SaveOptions(full_every=9))
        saved = rows_by_id(client)
    assert read_manifest(PATIENT(directory)).is_delta
    with cluster(open_storage=PATIENT) as bed:
        client = bed.client()
        client.restore(directory)
        client.seed(manifest, filled(manifest))
        assert rows_by_id(client) == saved
    out = tmp_path / "out.npz"
    told = CliRunner().invoke(app, ["export", directory, "--npz", str(out)])
    assert told.exit_code == 0, told.output
    with np.load(out) as arrays:
        exported = map(bytes, arrays["tables/user/values"])
        assert dict(zip(arrays["tables/user/ids"].tolist(), exported, strict=True)) == saved
    exported_there(directory, saved, tmp_path)
    model_exported_there(directory, tmp_path)


def exported_there(directory: str, saved: dict[int, bytes], tmp_path: Path) -> None:
    """Export checkpoints and running servers to HDFS; serve and load rows from there."""
    whole, delta, live = (f"{directory}-exports/{name}" for name in ("39", "51", "live"))
    export_tables(directory, whole, step=39, progress=False)
    export_tables(directory, delta, since=whole, progress=False)
    served = load(whole, tmp_path / "cache", progress=False)
    served.refresh(delta)
    found = served.lookup("user", np.array(sorted(saved)))
    assert [row.tobytes() for row in found] == [saved[number] for number in sorted(saved)]
    manifest = with_tables(table(max_rows=400, when_full="lru", segments=4))
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        export = ServerExport(client.tables.scan, manifest.tables, "", Console(enabled=False))
        export.write(live)
        for ids, rows in read_rows(whole, "user"):
            client.tables.load_rows("user", ids, rows)
        export.write(live)  # replaces the one without rows
        loaded = {
            int(n): row.tobytes()
            for ids, rows in read_rows(live, "user")
            for n, row in zip(ids, rows, strict=True)
        }
        assert loaded == rows_by_id(client)
        assert loaded


def model_exported_there(directory: str, tmp_path: Path) -> None:
    """`ctx.export` of a Keras model with a table: rows inside, beside, and changed ones."""
    import keras

    from tfos.keras import Embedding, load_model
    from tfos.keras.fit.distribute import distribute
    from tfos.keras.fit.table_export import export_with_tables

    x = np.random.default_rng(0).integers(0, 500, (256, 2))
    y = (x[:, 0] > 250).astype("float32")
    given = keras.Input((2,), dtype="int64")
    rows = Embedding(4, table="user", combiner="sum")(given)
    model = keras.Model(given, keras.layers.Dense(1, "sigmoid")(rows))
    model.compile("adagrad", "binary_crossentropy", jit_compile=False)
    root = f"{directory}-models"

    def predicted(one: Any) -> Any:
        return one.predict(x, batch_size=256, verbose=0)

    with serving(num_servers=2) as bed:
        ctx = bed.contexts[0]
        distribute(model, ctx)
        model.fit(x[:128], y[:128], batch_size=32, verbose=0)
        first = export_with_tables(model, f"{root}/first", ctx, tables="beside")
        served = load(first, tmp_path / "models", progress=False)
        np.testing.assert_array_equal(served.predict(x), predicted(model))
        model.fit(x[128:], y[128:], batch_size=32, verbose=0)
        served.refresh(
            export_with_tables(model, f"{root}/second", ctx, tables="beside", since=first)
        )
        np.testing.assert_array_equal(served.predict(x), predicted(model))
        inside = load_model(export_with_tables(model, f"{root}/inside.keras", ctx))
        np.testing.assert_array_equal(predicted(inside), predicted(model))
        saved = export_with_tables(model, f"{root}/inside", ctx)
        assert "saved_model.pb" in [entry.name for entry in filesystem_for(saved).entries(saved)]


@pytest.mark.long
@pytest.mark.fault("F40")
def test_a_save_is_repeated_when_a_datanode_is_killed_while_it_is_written(
    hdfs: LocalHdfs, directory: str, monkeypatch
):
    write = RemoteStorage.sync
    killed: list[BinaryIO] = []
    go_on = threading.Event()

    def kill_first(self: RemoteStorage, file: BinaryIO) -> None:
        if not killed:
            killed.append(file)
            hdfs.kill_datanode(0)
            assert go_on.wait(100)
        write(self, file)

    with cluster(num_servers=2, num_workers=2, open_storage=PATIENT) as bed:
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST))
        client.save(directory, 1)
        storage = PATIENT(directory)
        monkeypatch.setattr(RemoteStorage, "sync", kill_first)
        trainer = Trainer(bed)
        saving = threading.Thread(target=client.save, args=(directory, 2))
        saving.start()
        try:
            wait_until(lambda: bool(killed), "the kill")
            trainer.await_more(20, "steps beside a save that waits for a DataNode")
            assert latest(storage) == 1
            go_on.set()
            saving.join(200)
            assert latest(storage) == 2
        finally:
            go_on.set()
            hdfs.start_datanode(0)
            trainer.close()
    verify(storage, read_manifest(storage, 2))
    assert sorted(storage.names()) == ["step-1", "step-2"]


@pytest.mark.fault("F40")
def test_a_frozen_namenode_fails_saves_by_name_and_never_a_step(
    hdfs: LocalHdfs, directory: str, caplog
):
    plan = Checkpoints(directory=directory, every_s=0.2, keep=2)
    with cluster(num_servers=2, num_workers=2, open_storage=HURRIED) as bed:
        saver = ChiefSaver(plan, bed.client, HURRIED)
        saver.start()
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST))
        trainer = Trainer(bed)
        storage = PATIENT(directory)
        try:
            wait_until(lambda: (latest(storage) or 0) > 0, "the first save", 60.0)
            hdfs.freeze_namenode()
            caplog.clear()
            try:
                wait_until(lambda: "not saved: " in caplog.text, "a save that fails", 60.0)
                trainer.await_more(50, "steps while HDFS is away")
            finally:
                hdfs.thaw_namenode()
            seen = latest(storage)
            assert seen is not None
            wait_until(lambda: (latest(storage) or 0) > seen, "a save afterwards", 60.0)
        finally:
            trainer.close()
            saver.close()
        verify(storage, read_manifest(storage))
    told = [line for line in caplog.messages if "not saved: " in line]
    assert all("training goes on, the last save is step" in line for line in told)
    assert any(f" {directory}/" in line and f"NameNode {hdfs.url}" in line for line in told)
    assert [name for name in storage.names() if not name.startswith((".tmp-", "step-"))] == []


@pytest.mark.long
@pytest.mark.timeout(2 * FOR_MINUTES_S)
@pytest.mark.fault("F40")
def test_a_namenode_that_is_away_for_a_minute_delays_a_save(hdfs: LocalHdfs, directory: str):
    with cluster(num_servers=2, num_workers=2, open_storage=FOR_MINUTES) as bed:
        client = bed.client()
        client.seed(MANIFEST, filled(MANIFEST))
        client.save(directory, 1)
        trainer = Trainer(bed)
        hdfs.kill_namenode()
        away_s = time.monotonic()
        saving = threading.Thread(target=client.save, args=(directory, 2))
        saving.start()
        try:
            trainer.await_more(1000, "steps while HDFS is away")
            threading.Event().wait(60 - (time.monotonic() - away_s))
            assert saving.is_alive()
        finally:
            hdfs.start_namenode()
            trainer.close()
        saving.join(FOR_MINUTES_S)
        assert time.monotonic() - away_s > 60
    storage = PATIENT(directory)
    assert latest(storage) == 2
    verify(storage, read_manifest(storage, 2))


@pytest.mark.fault("F40")
def test_a_refusal_names_the_user_and_the_whole_path(hdfs: LocalHdfs, directory, monkeypatch):
    with cluster(open_storage=PATIENT) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        client.save(directory, 1)
        client.close()
        monkeypatch.setenv("HADOOP_USER_NAME", "alice")
        other = bed.client(0, 1)
        other.attach()
        with pytest.raises(CheckpointError, match=f"{directory}.*user 'alice'") as refused:
            other.save(directory, 2)
        assert "\tat " not in str(refused.value)
    with cluster(open_storage=PATIENT) as bed:
        none = f"{directory}/none"
        with pytest.raises(CheckpointError, match=f"no complete checkpoint in {none}; steps on"):
            bed.client().restore(none)
    assert steps_on_disk(PATIENT(directory)) == [1]


@pytest.mark.fault("F08")
def test_a_killed_server_of_a_cluster_goes_on_from_hdfs(
    hdfs: LocalHdfs, directory: str, bed: NodeBed, tmp_path: Path
):
    plan = Checkpoints(directory=directory, every_s=3600.0)
    args = {"root": str(tmp_path), "consistency": "async"}
    server = bed.start(bed.bundle("ps:0", checkpoints=plan))
    worker = bed.start(bed.bundle("worker:0", push_until_told, args, checkpoints=plan))
    bed.release("ps:0", "worker:0")
    storage = PATIENT(directory)
    wait_until(lambda: latest(storage) is not None, "the first checkpoint", 60.0)
    os.kill(bed.child_pid("ps:0"), signal.SIGKILL)
    assert bed.event("ps:0", messages.Restarted).count == 1
    bed.event("ps:0", messages.UpdatesLost)
    beat = bed.heartbeat("worker:0", lambda beat: beat.progress.get("steps", 0) > 0)
    more = int(beat.progress["steps"]) + 5
    bed.heartbeat("worker:0", lambda beat: beat.progress.get("steps", 0) >= more)
    (tmp_path / "end").touch()
    bed.event("worker:0", messages.Done)
    saved = read_manifest(storage)
    verify(storage, saved)
    assert saved.step > 0  # the last save, after main_fun
    assert [name for name in storage.names() if not name.startswith("step-")] == []
    for name, run in (("worker:0", worker), ("ps:0", server)):
        bed.order(name, messages.Stop("over"))
        run.wait()
    bed.assert_nothing_left()


@pytest.mark.fault("F41")
def test_a_shard_that_was_cut_short_is_refused_and_the_one_before_is_taken(
    hdfs: LocalHdfs, directory: str, caplog
):
    caplog.set_level(logging.WARNING)
    with cluster(open_storage=PATIENT) as bed:
        (client,) = bed.workers(MANIFEST, filled(MANIFEST))
        for step in (1, 2):
            pushed(client, 1)
            client.save(directory, step)
    storage = PATIENT(directory)
    with storage.open("step-2/ps-0.data") as file:
        whole = file.read()
    with storage.create("step-2/ps-0.data") as file:
        file.write(whole[:-1])
        storage.sync(file)
    with cluster(open_storage=PATIENT) as bed:
        assert bed.client().restore(directory) == 1
    assert f"{directory}/step-2/ps-0.data has {len(whole) - 1} bytes, the manifest" in caplog.text
