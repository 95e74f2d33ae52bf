"""What users do with saves: keep some, save deltas, restore for another optimizer, share a disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ps.checkpoint import choice
from ps.checkpoint import reader as reading
from ps.checkpoint.choice import RestoreOptions
from ps.checkpoint.format import Checkpoint
from ps.checkpoint.lease import Silence
from ps.checkpoint.restore import verify
from ps.checkpoint.score import Score
from ps.checkpoint.storage import LocalStorage, Storage, storage_at
from ps.checkpoint.writer import Base, Origin, Portion, abort, commit, write_shard
from ps.client.client import PSClient
from ps.client.saving import saver
from ps.client.saving.saver import SaveOptions
from ps.dense.shard import DenseShard
from ps.errors import (
    CheckpointError,
    ClosedError,
    ManifestMismatch,
    RequestTimeout,
)
from ps.manifest.manifest import SGD, Adam, Average, GroupSpec, Hyper, Manifest, ParamSpec
from ps.protocol import messages
from ps.server.save_restore import restore_into
from ps.server.server import PSServer
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import connect
from rpc.errors import DeadlineExceeded
from tests.support.ps_cluster import (
    ADD,
    WAIT_S,
    Cluster,
    cluster,
    filled,
    make_manifest,
    random_arrays,
)

pytestmark = pytest.mark.socket

HYPER = Hyper(0.1)


@contextlib.contextmanager
def seeded(manifest: Manifest, num_servers: int = 2) -> Iterator[tuple[Cluster, PSClient]]:
    with cluster("inproc", num_servers=num_servers) as bed:
        (client,) = bed.workers(manifest, random_arrays(manifest, 0))
        yield bed, client


def steps_in(root: Path) -> list[int]:
    return choice.steps_on_disk(storage_at(root))


def test_a_name_that_is_no_path_goes_to_the_servers_as_it_is(tmp_path: Path):
    opened = {"a": storage_at(tmp_path)}
    with cluster("inproc", open_storage=lambda name: opened[str(name)]) as bed:
        (client,) = bed.workers(make_manifest(), random_arrays(make_manifest(), 0))
        client.save("a", 1)
    assert steps_in(tmp_path) == [1]


def test_a_save_from_a_signal_handler_leaves_the_one_under_way_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As before a preemption: it runs in the thread of the save that it interrupts."""

    def interrupted(*arguments: Any, **settings: Any) -> str:
        with pytest.raises(RequestTimeout, match="save by this client was under way for 0"):
            client.save(tmp_path, 2, timeout_s=0.01)
        return commit(*arguments, **settings)

    with seeded(make_manifest(), num_servers=1) as (_, client):
        monkeypatch.setattr(saver, "commit", interrupted)
        client.save(tmp_path, 1)
    assert steps_in(tmp_path) == [1]


# ---- retention ----


def test_only_the_newest_are_kept(tmp_path: Path):
    manifest = make_manifest()
    with seeded(manifest) as (_, client):
        for step in range(6):
            client.save(tmp_path, step, options=SaveOptions(keep=3))
        assert steps_in(tmp_path) == [5, 4, 3]
        client.save(tmp_path, 6)
    assert steps_in(tmp_path) == [6, 5, 4, 3]


def test_retention_counts_complete_steps_only_and_removes_older_rests(tmp_path: Path):
    manifest = make_manifest()
    with seeded(manifest) as (_, client):
        for step in range(5):
            client.save(tmp_path, step, options=SaveOptions(keep=5))  # all of them were whole
        (tmp_path / "step-3" / "manifest.json").unlink()
        (tmp_path / "step-4" / "ps-1.data").write_bytes(b"cut")
        client.save(tmp_path, 5, options=SaveOptions(keep=2))
    assert steps_in(tmp_path) == [5, 2]


def test_a_damaged_newer_step_neither_counts_nor_goes(tmp_path: Path):
    """Somebody may still look at it; and the newest complete one is never removed."""
    manifest = make_manifest()
    with seeded(manifest) as (_, client):
        client.save(tmp_path, 1)
        client.save(tmp_path, 9)
        (tmp_path / "step-9" / "manifest.json").unlink()
        client.save(tmp_path, 2, options=SaveOptions(keep=1))
    assert steps_in(tmp_path) == [9, 2]


def test_a_save_is_one_also_if_older_ones_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("ps.client.saving.saver.keep_newest", fails)
    with seeded(make_manifest()) as (_, client):
        assert client.save(tmp_path, 1, options=SaveOptions(keep=1)) == str(tmp_path / "step-1")
    assert "older checkpoints in" in caplog.text


# ---- the best ----

LOSSES = {1: 0.9, 2: 0.3, 3: 0.5, 4: 0.3, 5: 0.7, 6: 0.8}


def scored(value: float, metric: str = "val_loss", *, is_higher: bool = False, **how: Any) -> Any:
    return SaveOptions(score=Score(metric, value, is_higher), **how)


def best_step(
    root: Path, metric: str = "val_loss", *, is_higher: bool = False, up_to: int | None = None
) -> int | None:
    found = choice.best(root, metric, higher_is_better=is_higher, up_to=up_to)
    return None if found is None else found.step


def test_the_best_of_each_metric_is_kept_beside_the_newest_also_by_the_next_run(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        assert best_step(tmp_path) is None
        for step, loss in LOSSES.items():
            client.save(tmp_path, step, options=scored(loss, keep=2))
        client.save(tmp_path, 7, options=scored(0.8, "auc", is_higher=True, keep=2))
        client.save(tmp_path, 8, options=scored(0.7, "auc", is_higher=True, keep=2))
        client.save(tmp_path, 9, options=SaveOptions(keep=2))
    assert steps_in(tmp_path) == [9, 8, 7, 2]
    assert (best_step(tmp_path), best_step(tmp_path, "auc", is_higher=True)) == (2, 7)
    assert best_step(tmp_path, "auc") is None  # a smaller one is better: another kind of score
    assert (best_step(tmp_path, up_to=2), best_step(tmp_path, up_to=1)) == (2, None)
    with cluster("inproc", num_servers=3) as bed:  # other servers, which know no score
        client = bed.client()
        assert client.restore(tmp_path) == 9
        client.save(tmp_path, 10, options=SaveOptions(keep=1))
    assert steps_in(tmp_path) == [10, 7, 2]
    with cluster("inproc") as bed:
        assert bed.client().restore(tmp_path, step=2) == 2


def test_a_step_that_is_saved_again_counts_as_it_is_now(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        client.save(tmp_path, 1, options=scored(0.3, keep=2))
        client.save(tmp_path, 2, options=scored(0.1, keep=2))
        shutil.rmtree(tmp_path / "step-2")  # by a user, who found the score wrong
        for step in (2, 3, 4):
            client.save(tmp_path, step, options=scored(0.9, keep=2))
    assert steps_in(tmp_path) == [4, 3, 1]
    assert best_step(tmp_path) == 1


def test_a_best_delta_keeps_what_it_adds_to(tmp_path: Path):
    manifest = make_manifest(rule=ADD)
    with seeded(manifest) as (_, client):
        client.save(tmp_path, 1, options=SaveOptions(full_every=3, keep=1))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        client.save(tmp_path, 2, options=scored(0.1, full_every=3, keep=1))
        for step in (3, 4, 5):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            client.save(tmp_path, step, options=scored(step, full_every=3, keep=1))
    assert {2, 1} < set(steps_in(tmp_path))
    with cluster("inproc") as bed:
        assert bed.client().restore(tmp_path, step=2) == 2


def test_the_same_parameters_are_saved_again_with_their_score(tmp_path: Path):
    """An epoch may end right after a save by time."""
    with seeded(make_manifest()) as (_, client):
        assert client.save(tmp_path, None) == str(tmp_path / "step-0")
        assert client.save(tmp_path, None) == str(tmp_path / "step-0")
        assert client.save(tmp_path, None, options=scored(0.5)) == str(tmp_path / "step-1")
    assert best_step(tmp_path) == 1


def test_a_damaged_best_step_is_replaced_by_the_next_best(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        for step, loss in LOSSES.items():
            client.save(tmp_path, step, options=scored(loss))
        (tmp_path / "step-2" / "ps-1.data").write_bytes(b"cut")
        client.save(tmp_path, 7, options=SaveOptions(keep=1))
    assert steps_in(tmp_path) == [7, 4, 2], "step 2 may only be away for a moment"
    assert best_step(tmp_path) == 4


def test_a_step_that_a_later_run_went_past_is_not_the_best(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        client.save(tmp_path, 1, options=scored(0.9))
        client.save(tmp_path, 5, options=scored(0.1))
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        assert client.restore(tmp_path, step=1) == 1
        client.save(tmp_path, 6, options=scored(0.8, keep=1))
    assert (best_step(tmp_path), steps_in(tmp_path)) == (6, [6])


@pytest.mark.fault("F40")
def test_nothing_is_removed_while_a_manifest_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It may be the best step's, or name it as its base."""
    with seeded(make_manifest()) as (_, client):
        for step, loss in LOSSES.items():
            client.save(tmp_path, step, options=scored(loss))
        size = LocalStorage.size

        def away(self: LocalStorage, name: str) -> int:
            if name == "step-2/manifest.json":
                raise OSError(errno.EIO, "Input/output error")
            return size(self, name)

        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "size", away)
            client.save(tmp_path, 7, options=SaveOptions(keep=1))
        assert "older checkpoints in" in caplog.text
        assert steps_in(tmp_path) == [7, 6, 5, 4, 3, 2, 1]
        client.save(tmp_path, 8, options=SaveOptions(keep=1))
    assert steps_in(tmp_path) == [8, 2]


@pytest.mark.fault("F40")
def test_nothing_is_removed_while_the_save_just_made_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Only its manifest says that step 9 was given up: to believe step 9 would remove step 1."""
    manifest = make_manifest()
    with seeded(manifest) as (_, client):
        for step in (1, 9):
            client.save(tmp_path, step)
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        assert client.restore(tmp_path, step=1) == 1
        read = reading.read_step

        def away(storage: Storage, step: int) -> Checkpoint:
            if step == 2:
                raise CheckpointError("step 2 has no readable manifest: no answer")
            return read(storage, step)

        monkeypatch.setattr(reading, "read_step", away)
        client.save(tmp_path, 2, options=SaveOptions(keep=1))
        assert "step 2 was saved, the newest that can be read is 9" in caplog.text
        assert steps_in(tmp_path) == [9, 2, 1]
        monkeypatch.undo()
        client.save(tmp_path, 3, options=SaveOptions(keep=1))
    assert steps_in(tmp_path) == [3]


def test_what_a_late_server_wrote_of_a_failed_save_goes_with_the_next(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        client.save(tmp_path, 1)
        with pytest.raises(CheckpointError, match="step 1 exists"):
            client.save(tmp_path, 1)
        late = tmp_path / f".tmp-{client._saver._place(tmp_path).staging.new_save_id()}"
        late.mkdir()
        (late / "ps-1.data").write_bytes(b"late")
        client.save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]


@pytest.mark.fault("F26")
def test_a_save_whose_client_is_gone_writes_nothing(tmp_path: Path):
    """It waits for another one; by now its client may have repeated it, and committed that."""
    with seeded(make_manifest(), num_servers=1) as (bed, client):
        client.save(tmp_path, 1)
        late = messages.Save(str(tmp_path), "late", 10.0)
        chief = Identity(Role.WORKER, 0, 0)
        connection = connect(bed.endpoints[0], chief, bed.credentials)
        turn = bed.servers[0]._service._saving._turn(0.0, lambda: False)
        with turn, connection, pytest.raises(DeadlineExceeded):
            connection.call(messages.encode(late), [], timeout_s=0.3)
        client.save(tmp_path, 2)
        bed.close()  # waits for the handlers
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2"]


@pytest.mark.fault("F08")
def test_a_restore_outlives_the_removal_of_what_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    manifest = make_manifest()
    with seeded(manifest, num_servers=1) as (bed, client):
        client.save(tmp_path, 1)

        def after_another_save(*arguments: Any, **settings: Any) -> Any:
            monkeypatch.undo()
            client.save(tmp_path, 2, options=SaveOptions(keep=1))
            return restore_into(*arguments, **settings)

        monkeypatch.setattr("ps.server.handlers.restore_into", after_another_save)
        with PSServer(bed.servers[0].settings, bed.credentials) as server:
            server.bind_inproc("restored")
            assert server.start_restoring(tmp_path) == 2
        with PSServer(bed.servers[0].settings, bed.credentials) as server:
            server.bind_inproc("removed")
            with pytest.raises(CheckpointError, match="newest complete step is 2"):
                server.start_restoring(tmp_path, step=1)


# ---- deltas ----


def two_groups(consistency: str = "async") -> Manifest:
    """A group that is trained and one that is not, as behind a frozen layer."""
    return Manifest(
        groups=(
            GroupSpec("trainable", "float32", Adam(), (ParamSpec("w", (200,)),)),
            GroupSpec("statistics", "float32", Average(), (ParamSpec("m", (30_000,)),)),
        ),
        bucket_bytes=512,
        consistency=consistency,  # type: ignore[arg-type]
    )


def bytes_of(root: Path, step: int) -> int:
    return sum(path.stat().st_size for path in (root / f"step-{step}").glob("ps-*.data"))


def change_first_bucket(bed: Cluster, value: float) -> None:
    dense = bed.servers[0]._service.life.loaded().dense
    bucket = dense.buckets[0]
    dense.set_values(bucket.id, np.full(bucket.num_elements, value, np.float32))


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_delta_holds_what_has_changed_and_restores_whole(tmp_path: Path, consistency: str):
    manifest = two_groups(consistency)
    options = SaveOptions(full_every=4)
    with seeded(manifest) as (bed, client):
        for step in range(6):
            change_first_bucket(bed, step)
            client.save(tmp_path, step, options=options)
        saved = bed.pulled(client)
    kinds = [choice.read_manifest(tmp_path, step).is_delta for step in range(6)]
    assert kinds == [False, True, True, True, False, True]
    assert bytes_of(tmp_path, 3) < 0.1 * bytes_of(tmp_path, 0)
    for num_servers in (1, 2, 5):
        with cluster("inproc", num_servers=num_servers) as bed:
            client = bed.client()
            assert client.restore(tmp_path) == 5
            restored = bed.pulled(client)
            assert all(np.array_equal(saved[name], restored[name]) for name in saved)
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        assert client.restore(tmp_path, step=2) == 2
        assert bed.pulled(client)["trainable"][0] == 2.0


def test_training_from_a_delta_goes_on_bit_for_bit(tmp_path: Path):
    manifest = make_manifest(rule=Adam(), statistics=5)
    whole, resumed = filled(manifest), filled(manifest)
    with seeded(manifest) as (_, client):
        for step in range(6):
            client.push_pull(random_arrays(manifest, step), whole, hyper=HYPER, rows=4)
            if step < 3:
                client.save(tmp_path, step + 1, options=SaveOptions(full_every=10))
    with cluster("inproc", num_servers=3) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 3
        for step in range(3, 6):
            client.push_pull(random_arrays(manifest, step), resumed, hyper=HYPER, rows=4)
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole)


def test_retention_keeps_what_a_delta_needs(tmp_path: Path):
    with seeded(two_groups()) as (bed, client):
        for step in range(5):
            change_first_bucket(bed, step)
            client.save(tmp_path, step, options=SaveOptions(full_every=3, keep=1))
    assert steps_in(tmp_path) == [4, 3]  # 4 adds to 3, the second full one
    verify(tmp_path, choice.read_manifest(tmp_path))


def test_a_delta_whose_base_another_saver_of_its_job_removes_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As of a save of its own beside the periodic ones."""
    options, publish = SaveOptions(keep=1, full_every=9), LocalStorage.publish
    with seeded(two_groups()) as (bed, client):
        other = bed.client()
        other.attach()
        client.save(tmp_path, 5, options=options)

        def overtaken(storage: LocalStorage, directory: str, target: str) -> None:
            if target == "step-7":
                other.save(tmp_path, 6, options=options)  # behind the look at step 5
            publish(storage, directory, target)

        monkeypatch.setattr(LocalStorage, "publish", overtaken)
        with pytest.raises(CheckpointError, match="step 7 adds to step 5, which another saver"):
            client.save(tmp_path, 7, options=options)
        assert steps_in(tmp_path) == [6]
        client.save(tmp_path, 8, options=options)
    verify(tmp_path, choice.read_manifest(tmp_path, 8))


def test_a_delta_whose_base_is_another_save_behind_its_commit_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options, publish = SaveOptions(full_every=9), LocalStorage.publish
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    with seeded(two_groups()) as (_, client):
        client.save(elsewhere, 5)
        client.save(root, 5, options=options)

        def replaced(storage: LocalStorage, directory: str, target: str) -> None:
            if target == "step-7":
                (root / "step-5").rename(tmp_path / "moved")
                (elsewhere / "step-5").rename(root / "step-5")
            publish(storage, directory, target)

        monkeypatch.setattr(LocalStorage, "publish", replaced)
        with pytest.raises(CheckpointError, match="step 7 adds to step 5, which another saver"):
            client.save(root, 7, options=options)
    assert steps_in(root) == [5]


def test_a_delta_stays_where_its_base_cannot_be_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As while another NameNode takes over: nothing was removed for that."""
    size = LocalStorage.size

    def failing(storage: LocalStorage, name: str) -> int:
        if name == "step-1/manifest.json" and steps_in(tmp_path) == [2, 1]:
            raise OSError(errno.EIO, "away")
        return size(storage, name)

    with seeded(two_groups()) as (_, client):
        client.save(tmp_path, 1)
        with monkeypatch.context() as away:
            away.setattr(LocalStorage, "size", failing)
            with contextlib.suppress(CheckpointError):
                client.save(tmp_path, 2, options=SaveOptions(full_every=9))
        client.save(tmp_path, 3, options=SaveOptions(full_every=9))
    assert choice.read_manifest(tmp_path, 3).base == 2


def test_retention_removes_nothing_once_another_saver_has_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What that step adds to is not among those that retention has decided to keep."""
    options, look = SaveOptions(keep=1, full_every=9), choice.complete_chains
    with seeded(two_groups()) as (bed, client):
        other = bed.client()
        other.attach()
        client.save(tmp_path, 5, options=options)

        def overtaken(*arguments: Any, **settings: Any) -> Iterator[list[Checkpoint]]:
            for chain in look(*arguments, **settings):
                if steps_in(tmp_path) == [6, 5]:
                    client.save(tmp_path, 7, options=SaveOptions(full_every=9))
                yield chain

        monkeypatch.setattr("ps.checkpoint.writer.complete_chains", overtaken)
        other.save(tmp_path, 6, options=options)
        assert steps_in(tmp_path) == [7, 6, 5]
        verify(tmp_path, choice.read_manifest(tmp_path, 7))
        client.save(tmp_path, 8, options=options)
        assert 6 not in steps_in(tmp_path)


@pytest.mark.fault("F41")
def test_a_delta_without_its_base_is_not_complete(tmp_path: Path):
    with seeded(two_groups()) as (bed, client):
        for step in (1, 2, 3):
            change_first_bucket(bed, step)
            client.save(tmp_path, step, options=SaveOptions(full_every=9))
    (tmp_path / "step-1" / "manifest.json").rename(tmp_path / "manifest")
    with pytest.raises(CheckpointError, match="step 2 needs step 1: step 1 has no readable"):
        choice.read_manifest(tmp_path, 2)
    assert choice.latest(tmp_path) is None
    (tmp_path / "manifest").rename(tmp_path / "step-1" / "manifest.json")
    assert choice.latest(tmp_path) == 3
    damaged = tmp_path / "step-2" / "ps-0.data"
    damaged.write_bytes(b"\xff" + damaged.read_bytes()[1:])
    with pytest.raises(CheckpointError, match=r"step-2/ps-0.data is damaged"):
        verify(tmp_path, choice.read_manifest(tmp_path, 3))
    with cluster("inproc", num_servers=2) as bed:
        assert bed.client().restore(tmp_path) == 1


@pytest.mark.attack("A19")
def test_a_base_that_is_another_save_or_not_older_is_refused(tmp_path: Path):
    shard = DenseShard(two_groups(), rank=0, num_servers=1, num_workers=1)

    def save(step: int, save_id: str, base: Base | None = None) -> None:
        record = write_shard(
            tmp_path, save_id, rank=0, shard=shard, portion=Portion(lambda _: base is not None)
        )
        commit(
            tmp_path,
            save_id,
            step=step,
            manifest=shard.manifest,
            shards=[record],
            origin=Origin("job", base),
        )

    save(5, "aa")
    for base in (Base(5, "bb"), Base(7, "aa")):
        with pytest.raises(CheckpointError, match=r"cannot add to|no readable manifest"):
            save(6, "cc", base)
        abort(tmp_path, "cc")
    with pytest.raises(CheckpointError, match="steps must grow"):
        save(4, "dd", Base(5, "aa"))
    abort(tmp_path, "dd")
    save(6, "ee", Base(5, "aa"))
    (tmp_path / "step-5").rename(tmp_path / "away")
    save(5, "ff")
    with pytest.raises(CheckpointError, match="needs save aa of step 5, found is save ff"):
        choice.read_manifest(tmp_path, 6)


def test_a_server_that_was_replaced_saves_everything_again(tmp_path: Path):
    """It does not know what the base holds; the save is whole all the same."""
    manifest = two_groups()
    with seeded(manifest, num_servers=1) as (bed, client):
        client.save(tmp_path, 1, options=SaveOptions(full_every=9))
        bed.servers[0]._service._saving._known.__init__()  # type: ignore[misc]
        client.save(tmp_path, 2, options=SaveOptions(full_every=9))
        saved = bed.pulled(client)
    assert bytes_of(tmp_path, 2) >= 0.9 * bytes_of(tmp_path, 1)
    with cluster("inproc") as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 2
        assert np.array_equal(bed.pulled(client)["statistics"], saved["statistics"])


# ---- another optimizer, a damaged newest ----


@pytest.mark.fault("F42")
def test_another_optimizer_is_refused_unless_it_may_start_anew(tmp_path: Path):
    saved, asked = make_manifest(rule=Adam()), make_manifest(rule=SGD())
    with seeded(saved) as (bed, client):
        client.push(random_arrays(saved, 1), hyper=HYPER, rows=1)
        client.save(tmp_path, 1)
        values = bed.pulled(client)
    with cluster("inproc", num_servers=3) as bed:
        client = bed.client()
        with pytest.raises(CheckpointError, match=r"adam.*sgd.*reset_optimizer=True takes"):
            client.restore(tmp_path, like=RestoreOptions(manifest=asked))
        client.restore(tmp_path, like=RestoreOptions(manifest=asked, reset_optimizer=True))
        assert np.array_equal(bed.pulled(client)["trainable"], values["trainable"])
        client.seed(asked, filled(asked))  # adopts
        client.push(filled(asked, 1.0), hyper=HYPER, rows=1)
        expected = values["trainable"] - np.float32(0.1)
        np.testing.assert_allclose(bed.pulled(client)["trainable"], expected, rtol=1e-6)


@pytest.mark.fault("F42")
def test_a_reset_optimizer_starts_at_its_first_step(tmp_path: Path):
    manifest = make_manifest(rule=Adam())
    gradients = random_arrays(manifest, 1)
    with seeded(manifest) as (bed, client):
        for _ in range(3):
            client.push(gradients, hyper=HYPER, rows=1)
        client.save(tmp_path, 3)
        values = bed.pulled(client)
    with cluster("inproc") as bed, cluster("inproc") as other:
        client, fresh = bed.client(), other.client()
        client.restore(tmp_path, like=RestoreOptions(reset_optimizer=True))
        fresh.seed(manifest, values)
        for each in (client, fresh):
            each.push(gradients, hyper=HYPER, rows=1)
        one, two = bed.pulled(client), other.pulled(fresh)
        assert np.array_equal(one["trainable"], two["trainable"])


@pytest.mark.fault("F42")
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (make_manifest(999, rule=ADD), r"kernel float32\[333\].*kernel float32\[333\]|bias"),
        (make_manifest(rule=ADD, statistics=3), r"Only asked: group statistics"),
        (make_manifest(rule=ADD, bucket_bytes=1024), "saved with bucket_bytes=512, asked 1024"),
    ],
    ids=["shape", "group", "buckets"],
)
def test_another_model_is_refused_before_a_server_is_asked(
    tmp_path: Path, asked: Manifest, message: str
):
    with seeded(make_manifest(rule=ADD)) as (_, client):
        client.save(tmp_path, 1)
    with cluster("inproc") as bed:
        client = bed.client()
        for reset in (False, True):
            with pytest.raises(CheckpointError, match=message if not reset else "saved|asked"):
                client.restore(tmp_path, like=RestoreOptions(manifest=asked, reset_optimizer=reset))
        assert client.describe()[0].phase == "EMPTY"
        client.restore(tmp_path)
        with pytest.raises(ManifestMismatch, match="serves other parameters"):
            client.seed(asked, filled(asked))


@pytest.mark.fault("F41")
def test_strict_refuses_a_damaged_newest_step(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        client.save(tmp_path, 1)
        client.save(tmp_path, 2)
    path = tmp_path / "step-2" / "ps-0.data"
    path.write_bytes(b"\xff" + path.read_bytes()[1:])
    with cluster("inproc", num_servers=2) as bed:
        client = bed.client()
        with pytest.raises(CheckpointError, match=r"step-2/ps-0.data is damaged"):
            client.restore(tmp_path, like=RestoreOptions(strict=True))
        assert client.restore(tmp_path) == 1


# ---- time ----


def foreign_lease(root: Path) -> Path:
    path = root / "lease.json"
    path.write_text(
        '{"owner":"other","host":"far","kernel":"k","pid":1,"started":"1","token":"ab"}'
    )
    return path


@pytest.mark.fault("F43")
def test_a_save_ends_in_its_time_also_before_a_lease_that_may_be_stale(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        foreign_lease(tmp_path)
        began_s = time.monotonic()
        expected = r"job 'other' \(host far, pid 1\).*its lease is over after 60 s"
        with pytest.raises(CheckpointError, match=expected):
            client.save(tmp_path, 1, timeout_s=0.2)
        assert time.monotonic() - began_s < 30.0  # the lease is over after 60 s


@pytest.mark.fault("F43")
def test_no_other_call_waits_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither while it waits for a lease, nor while servers write to a slow disk."""
    manifest = make_manifest(rule=ADD)
    is_looking, is_writing, may_write = (threading.Event() for _ in range(3))
    look = Silence.look

    def looking(self: Silence, seen: bytes, now_s: float) -> float:
        is_looking.set()
        return look(self, seen, now_s)

    def slowly(*arguments: Any, **settings: Any) -> Any:
        is_writing.set()
        assert may_write.wait(WAIT_S)
        return write_shard(*arguments, **settings)

    monkeypatch.setattr(Silence, "look", looking)
    monkeypatch.setattr("ps.server.save_restore.write_shard", slowly)
    with seeded(manifest, num_servers=1) as (bed, client):
        before = bed.pulled(client)["trainable"]
        lease = foreign_lease(tmp_path)
        saving = threading.Thread(target=client.save, args=(tmp_path, 1))
        saving.start()
        assert is_looking.wait(WAIT_S)
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert not is_writing.is_set()
        lease.unlink()
        assert is_writing.wait(WAIT_S)
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        with pytest.raises(RequestTimeout, match=r"another thread's save .* under way for 0.01 s"):
            client.save(tmp_path, 2, timeout_s=0.01)
        assert saving.is_alive()
        may_write.set()
        saving.join(WAIT_S)
        np.testing.assert_allclose(bed.pulled(client)["trainable"] - before, 2.0, rtol=1e-5)
        assert {"save", "push"} <= client.link_stats()[0].latencies.keys()
        client.close()
        with pytest.raises(ClosedError):
            client.save(tmp_path, 2)
    assert steps_in(tmp_path) == [1]


# ---- other processes ----


@pytest.mark.attack("A16")
def test_a_reader_that_locks_what_it_may_read_stops_no_save(tmp_path: Path):
    with seeded(make_manifest()) as (_, client), contextlib.ExitStack() as opened:
        client.save(tmp_path, 1)
        for path in (tmp_path, *tmp_path.rglob("*")):
            descriptor = os.open(path, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        client.save(tmp_path, 2, timeout_s=20.0)
    assert steps_in(tmp_path) == [2, 1]


# ---- two jobs ----


@pytest.mark.fault("F43")
def test_the_second_job_in_a_directory_is_refused_and_follows_the_first(tmp_path: Path):
    manifest = make_manifest()
    with seeded(manifest) as (_, other):
        with seeded(manifest) as (_, client):
            client.save(tmp_path, 1)
            with pytest.raises(CheckpointError, match=r"is used by job 'test-\d+' \(host"):
                other.save(tmp_path, 2)
            assert sorted(p.name for p in tmp_path.glob("[!.]*")) == ["lease.json", "step-1"]
            assert not list(tmp_path.glob(".tmp-*"))
            client.save(tmp_path, 3)
        (tmp_path / ".tmp-dead").mkdir()  # of a save that died with its job
        (tmp_path / ".tmp-dead" / "ps-0.data").write_bytes(b"rest")
        other.save(tmp_path, 4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3", "step-4"]


@pytest.mark.fault("F43")
def test_a_job_that_lost_its_lease_does_not_commit(tmp_path: Path):
    with seeded(make_manifest()) as (_, client):
        client.save(tmp_path, 1)
        lease = client._saver._place(tmp_path).lease
        lease.take = Mock(return_value=False)  # type: ignore[method-assign]  # frozen between them
        (tmp_path / "lease.json").write_text(
            '{"owner":"new","host":"far","kernel":"k","pid":1,"started":"1","token":"ab"}'
        )
        with pytest.raises(CheckpointError, match=r"used by job 'new' \(host far, pid 1\)"):
            client.save(tmp_path, 2)
    assert steps_in(tmp_path) == [1]
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.fault("F43")
def test_a_saver_that_another_one_of_its_job_overtook_does_not_commit(tmp_path: Path):
    """Its snapshot would be the newest step, and a server would be restored from it."""
    manifest = make_manifest(rule=ADD)
    with seeded(manifest) as (bed, frozen):
        newer = bed.client(0, 100)
        newer.attach()
        frozen.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        assert Path(frozen.save(tmp_path, None)).name == "step-1"
        frozen.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        lease = frozen._saver._place(tmp_path).lease
        held = lease.held

        def held_after_a_while() -> Any:  # all servers have written, then the process stands still
            for _ in range(3):
                newer.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
            assert Path(newer.save(tmp_path, None)).name == "step-5"
            return held()

        lease.held = held_after_a_while  # type: ignore[method-assign]
        with pytest.raises(CheckpointError, match=r"saved step 5 into .* save again"):
            frozen.save(tmp_path, None)
        assert steps_in(tmp_path) == [5, 1]
        assert not list(tmp_path.glob(".tmp-*"))
        lease.held = held  # type: ignore[method-assign]
        assert Path(frozen.save(tmp_path, None)).name == "step-5", "as it is"
