"""Saves while training goes on, over real servers: one clock, one moment, exact counts."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ps.checkpoint.choice import latest, read_manifest, steps_on_disk
from ps.checkpoint.storage import LocalStorage, storage_at
from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError, ServerPhaseError
from ps.manifest.manifest import Adam, Hyper
from ps.metadata import pushed
from ps.protocol import messages
from ps.server.save_restore import ShardExtra
from tests.support.ps_cluster import (
    ADD,
    cluster,
    filled,
    make_manifest,
    random_arrays,
    run_all,
    succeeded,
)
from tests.support.snapshot_skew import records_of
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

__all__ = ["table_kernels_loaded"]

HYPER = Hyper(0.01)
SYNC = make_manifest(40_000, rule=Adam(), consistency="sync", bucket_bytes=4096)
NUM_SAVES = 4


def gradients(worker: int, step: int):
    return random_arrays(SYNC, 1000 * worker + step)


def train(
    client: PSClient, worker: int, steps: Iterable[int], each: Callable[[int], object]
) -> None:
    values = filled(SYNC)
    for step in steps:
        metadata = pushed(f"steps/{worker}", step + 1)
        client.push_pull(gradients(worker, step), values, hyper=HYPER, rows=4, metadata=metadata)
        each(step + 1)


@pytest.mark.slow
@pytest.mark.fault("F10")
def test_a_sync_save_is_bit_for_bit_of_one_clock_on_all_servers(tmp_path: Path):
    """Saved while two workers push without a pause, then trained on: as if never interrupted."""
    ended = threading.Event()
    with cluster("tcp", num_servers=3, num_workers=2) as bed:
        clients = bed.workers(SYNC, random_arrays(SYNC, 0))
        saver = bed.driver()
        saver.attach()

        def clock() -> int:
            return saver.describe()[0].clock

        def save() -> None:
            try:
                for _ in range(NUM_SAVES):
                    wait_until(lambda: clock() > (latest(tmp_path) or 0), "a step")
                    saver.save(tmp_path, None, options=SaveOptions(full_every=3))
            finally:
                ended.set()

        def work(rank: int) -> None:
            steps = itertools.takewhile(lambda _: not ended.is_set(), itertools.count())
            train(clients[rank], rank, steps, abs)
            clients[rank].finish()

        succeeded(run_all(save, partial(work, 0), partial(work, 1), timeout_s=60))
    steps = steps_on_disk(storage_at(tmp_path))
    assert len(steps) == NUM_SAVES
    after = uninterrupted(steps[0] + 3)
    for step in steps:
        assert {extra(tmp_path, step, rank).clock for rank in range(3)} == {step}
        with cluster("inproc", num_servers=2, num_workers=2) as bed:
            clients = [bed.client(rank) for rank in range(2)]
            clients[0].restore(tmp_path, step=step)
            clients[1].attach()
            assert np.array_equal(bed_values(clients[0]), after[step])
            assert clients[1].metadata() == {"steps/0": step, "steps/1": step}
            further = range(step, step + 3)
            works = [partial(train, c, rank, further, abs) for rank, c in enumerate(clients)]
            succeeded(run_all(*works))
            assert np.array_equal(bed_values(clients[0]), after[further.stop])


def uninterrupted(num_steps: int) -> list[np.ndarray]:
    """The parameters after each step of a run that is never saved."""
    with cluster("inproc", num_workers=2) as bed:
        clients = bed.workers(SYNC, random_arrays(SYNC, 0))
        after = [bed_values(clients[0])]

        def note(_: int) -> None:
            after.append(bed_values(clients[0]))

        steps = range(num_steps)
        first = partial(train, clients[0], 0, steps, note)
        succeeded(run_all(first, partial(train, clients[1], 1, steps, abs)))
    return after


def bed_values(client: PSClient) -> np.ndarray:
    into = filled(SYNC)
    client.pull(into)
    return into["trainable"]


def extra(root: Path, step: int, rank: int) -> ShardExtra:
    records = records_of(root, read_manifest(root, step), rank)
    return msgspec.msgpack.decode(records, type=ShardExtra)


@pytest.mark.slow
@pytest.mark.fault("F10")
@pytest.mark.usefixtures("table_kernels_loaded")
def test_dense_parameters_and_tables_are_of_one_moment(tmp_path: Path):
    """One worker changes all buckets, then all rows: a cut has at most one of the two more."""
    manifest = with_tables(table("user", segments=2), rule=ADD, size=30_000)
    ids = np.arange(3000)
    ended = threading.Event()
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        saver = bed.driver()
        saver.attach()

        def push() -> None:
            while not ended.is_set():
                client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
                client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)

        def save() -> None:
            try:
                for step in range(8):
                    saver.save(tmp_path, step, options=SaveOptions(full_every=4))
            finally:
                ended.set()

        succeeded(run_all(push, save, timeout_s=60))
    for step in range(8):
        with cluster("inproc") as bed:
            restored = bed.client()
            restored.restore(tmp_path, step=step)
            dense = bed.pulled(restored)["trainable"]
            rows = restored.tables.lookup({"user": ids})["user"]
            (session,) = extra(tmp_path, step, 0).sessions or ()
            assert dense.max() - dense.min() <= 1
            assert rows.max() - rows.min() <= 1
            assert -1 <= dense.min() - rows.max() <= dense.max() - rows.min() <= 1
            assert max(session.applied, default=0) - min(session.applied, default=0) <= 1


@pytest.mark.fault("F39")
@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_save_that_is_given_up_holds_nothing_and_the_next_one_is_whole(
    tmp_path: Path, monkeypatch, consistency: str
):
    manifest = make_manifest(3000, rule=ADD, consistency=consistency)
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        saver = bed.driver()
        saver.attach()
        shards = [server._service.life.loaded() for server in bed.servers]
        saver.save(tmp_path, 1, options=SaveOptions(full_every=9))
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        create, held = LocalStorage.create, []

        def full(self, name):
            create(self, name).close()
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)  # between cut and writing
            cuts = [shard._guard.snapshot for shard in shards]
            held.append(any(cut._aside for cut in cuts if cut))
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(LocalStorage, "create", full)
            with pytest.raises(CheckpointError, match="No space left"):
                saver.save(tmp_path, 2, options=SaveOptions(full_every=9))
        assert len(held) == 2
        assert all(held)
        assert [shard._guard.snapshot for shard in shards] == [None, None]
        client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        saver.save(tmp_path, 3, options=SaveOptions(full_every=9))
        values = bed.pulled(client)["trainable"]
    assert not read_manifest(tmp_path).is_delta
    with cluster("inproc") as bed:
        restored = bed.client()
        assert restored.restore(tmp_path) == 3
        assert np.array_equal(bed.pulled(restored)["trainable"], values)


@pytest.mark.fault("F26")
def test_a_cut_whose_client_is_gone_does_not_take_another_saves_away(tmp_path: Path):
    with cluster("inproc") as bed:
        bed.workers(make_manifest(rule=ADD), filled(make_manifest(rule=ADD)))
        service = bed.servers[0]._service
        saving, shard = service._saving, service.life.loaded()
        assert saving.take_snapshot(shard, messages.TakeSnapshot("mine"), lambda: False).is_made
        with pytest.raises(ServerPhaseError, match="client of this save is gone"):
            saving.take_snapshot(shard, messages.TakeSnapshot("late"), lambda: True)
        request = messages.Save(str(tmp_path), "mine")
        assert saving.save(shard, request, lambda: False).clock == 0


def save_often(root: Path, saver: PSClient, first: int) -> int:
    """Save every other step; returns how many saves were not refused."""
    done = 0
    for step in range(first, first + 20, 2):
        try:
            saver.save(root, step, timeout_s=20)
        except CheckpointError as error:
            if not re.search("no snapshot here|still writing", str(error)):
                raise
        else:
            done += 1
    return done


@pytest.mark.fault("F43")
def test_two_saves_of_one_cluster_never_mix(tmp_path: Path):
    """Driver and chief save at the same time; each save is refused or whole, never half of both."""
    manifest = make_manifest(20_000, rule=ADD, consistency="sync")
    with cluster("inproc", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        savers = [bed.driver(), bed.driver()]
        for saver in savers:
            saver.attach()
        stop = threading.Event()

        def push() -> None:
            while not stop.is_set():
                client.push(filled(manifest, 1.0), hyper=HYPER, rows=1)

        def both() -> list[int]:
            try:
                return succeeded(
                    run_all(*(partial(save_often, tmp_path, s, at) for at, s in enumerate(savers)))
                )
            finally:
                stop.set()

        (done, _) = succeeded(run_all(both, push, timeout_s=60))
    assert sum(done) >= 1
    for step in steps_on_disk(storage_at(tmp_path)):
        with cluster("inproc") as bed:
            restored = bed.client()
            restored.restore(tmp_path, step=step)
            values = bed.pulled(restored)["trainable"]
            assert set(values.tolist()) == {float(extra(tmp_path, step, 0).clock)}
    assert latest(tmp_path) is not None
