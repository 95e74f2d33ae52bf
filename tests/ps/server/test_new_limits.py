"""A run that resumes brings its program's limits of tables: servers take them and save them."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from ps.checkpoint.choice import read_manifest, steps_on_disk
from ps.checkpoint.storage import storage_at
from ps.client.saving.saver import SaveOptions
from ps.errors import CheckpointError, ManifestMismatch, StaleGeneration, TableFull
from ps.manifest.manifest import Adagrad, Hyper
from ps.manifest.table_spec import Admission
from ps.tables.eviction import MARKS, TtlClock
from ps.tables.table import Table
from rpc.auth.handshake import Role
from tests.support.ps_cluster import cluster, filled, frozen_arrays, with_frozen
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.5)
IDS = np.arange(400)


def user(**limits: Any):
    return with_tables(table(rule=Adagrad(), segments=1, **limits))


def push(client, ids):
    client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)


def num_rows(client) -> int:
    return client.stats()[0].tables[0].rows


def seed(client, manifest):
    client.seed(manifest, filled(manifest))


def test_a_resumed_run_takes_and_saves_the_limits_of_its_program(tmp_path):
    before, now = user(max_rows=100), user(max_rows=300)
    with cluster() as bed:
        (client,) = bed.workers(before, filled(before))
        push(client, IDS[:100])
        with pytest.raises(TableFull, match=r"of at most 100 rows .* takes the limits"):
            push(client, IDS[100:101])
        client.save(tmp_path, 1)
    with cluster(num_workers=2) as bed:
        chief, other = bed.client(), bed.client(1)
        assert chief.restore(tmp_path) == 1
        saver = bed.client(role=Role.DRIVER)
        assert saver.attach() == other.attach() == before
        seed(chief, now)
        assert bed.client(1, generation=1).attach() == now
        push(other, IDS[100:300])  # whose manifest has the limits of before
        assert chief.stats()[0].tables[0].max_rows == 300
        with pytest.raises(TableFull, match="of at most 300 rows"):
            push(other, IDS[300:301])
        saver.save(tmp_path, None)
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path)
        assert client.attach() == now
        assert num_rows(client) == 300


def test_new_limits_alone_are_a_change_that_a_save_holds(tmp_path):
    with cluster() as bed:
        (client,) = bed.workers(user(), filled(user()))
        push(client, IDS)
        saved = client.save(tmp_path, None)
        assert client.save(tmp_path, None) == saved
        seed(client, user(max_rows=500))
        assert client.save(tmp_path, None) != saved
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path)
        assert client.attach() == user(max_rows=500)


def test_rows_above_a_lowered_limit_stay_or_go_with_the_next_push():
    for when_full in ("refuse", "lru"):
        with cluster() as bed:
            (client,) = bed.workers(user(), filled(user()))
            push(client, IDS[:200])
            push(client, IDS[200:300])
            seed(client, user(max_rows=150, when_full=when_full))
            assert num_rows(client) == 300
            push(client, IDS[200:300])
            if when_full == "refuse":
                with pytest.raises(TableFull, match="holds 300 of at most 150 rows"):
                    push(client, IDS[300:301])
                assert num_rows(client) == 300
            else:
                push(client, IDS[300:301])
                assert num_rows(client) <= 150
                assert (client.tables.lookup({"user": IDS[200:301]})["user"] != 0).all()


@pytest.mark.parametrize("num_frozen", [0, 400])
def test_a_delta_adds_to_a_save_of_other_limits(tmp_path, num_frozen):
    before, now = user(max_rows=100), user(max_rows=300)
    if num_frozen:
        before, now = with_frozen(before, num_frozen), with_frozen(now, num_frozen)
    options = SaveOptions(full_every=10)
    with cluster() as bed:
        (chief,) = bed.workers(before, filled(before) | frozen_arrays(before, 1))
        push(chief, IDS[:100])
        saver = bed.client(role=Role.DRIVER)
        assert saver.attach() == before
        saver.save(tmp_path, None, options=options)
        chief.seed(now, filled(now) | frozen_arrays(now, 1))
        saver.save(tmp_path, None, options=options)
        push(chief, IDS[100:300])
        with contextlib.suppress(CheckpointError):  # then its step is missing
            saver.save(tmp_path, None, options=options)
    steps = sorted(steps_on_disk(storage_at(tmp_path)))
    assert len(steps) == 3
    assert [read_manifest(tmp_path, step).is_delta for step in steps] == [False, True, True]
    with cluster() as bed:
        client = bed.client()
        client.restore(tmp_path)
        assert client.attach() == now
        assert num_rows(client) == 300


def test_of_all_segments_the_oldest_rows_above_a_lowered_limit_go():
    manifest = with_tables(table(rule=Adagrad(), segments=4))
    lower = with_tables(table(rule=Adagrad(), segments=4, max_rows=350, when_full="lru"))
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for ids in np.split(IDS, 2):
            push(client, ids)
        seed(client, lower)
        push(client, IDS[-1:] + 1)
        assert 320 < num_rows(client) <= 350
        assert (client.tables.lookup({"user": IDS[200:]})["user"] != 0).all()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_table_that_was_saved_above_its_lowered_limit_is_restored(tmp_path, num_servers):
    with cluster() as bed:
        (client,) = bed.workers(user(), filled(user()))
        push(client, IDS[:300])
        seed(client, user(max_rows=150))
        client.save(tmp_path, None)
    with cluster(num_servers=num_servers) as bed:
        client = bed.client()
        client.restore(tmp_path)
        client.attach()
        assert sum(server.tables[0].rows for server in client.stats()) == 300
        with pytest.raises(TableFull):
            push(client, IDS[300:310])
        seed(client, user(max_rows=400))
        push(client, IDS[300:310])


def test_frozen_weights_that_come_with_new_limits_are_both_taken_and_saved(tmp_path):
    before, now = user(max_rows=100), with_frozen(user(max_rows=300), 400)
    with cluster() as bed:
        (client,) = bed.workers(before, filled(before))
        seed(client, user(max_rows=200))
        client.save(tmp_path, None)
        client.seed(now, filled(now) | frozen_arrays(now, 1))
        assert client.stats()[0].tables[0].max_rows == 300
        push(client, IDS[:300])


def test_frozen_weights_after_new_limits_are_a_change(tmp_path):
    with cluster() as bed:
        (client,) = bed.workers(user(), filled(user()))
        seed(client, user(max_rows=200))
        saved = client.save(tmp_path, None)
        now = with_frozen(user(max_rows=200), 400)
        client.seed(now, filled(now) | frozen_arrays(now, 1))
        assert client.save(tmp_path, None) != saved


def test_a_longer_time_to_live_has_as_few_marks_as_a_save_has_room_for():
    now_s, version, ttl_s = [0.0], 0, 64.0
    clock = TtlClock(ttl_s, lambda: now_s[0])
    born_s: list[float] = []
    for later in (1.0, 1.5, 2.0, 100.0):
        ttl_s *= later
        clock.set_ttl(ttl_s)
        for _ in range(200):
            now_s[0] += ttl_s / 128
            expired = clock.expired(version)
            assert len(clock.ages()) <= MARKS + 2
            if expired:
                assert now_s[0] - born_s[expired - 1] >= ttl_s
            version += 1
            born_s.append(now_s[0])


def test_a_time_to_live_begins_ends_and_changes_without_forgetting_ages():
    now_s = [0.0]
    clock = TtlClock(None, lambda: now_s[0])
    assert clock.expired(1) is None
    now_s[0] = 50.0
    clock.set_ttl(64.0)
    now_s[0] = 100.0
    assert clock.expired(2) is None  # their time has begun with the limit
    clock.set_ttl(640.0)
    now_s[0] = 200.0
    assert clock.expired(3) is None
    clock.set_ttl(120.0)
    assert clock.expired(4) == 2  # of 50 s; those of 100 s stay
    clock.set_ttl(None)
    now_s[0] = 10_000.0
    assert clock.expired(5) is None


def test_each_segment_of_a_table_has_the_new_limits():
    now_s = [0.0]
    spec = table(segments=4)
    share = Table(spec, rank=0, num_servers=1, clock=lambda: now_s[0])
    share.set_limits(table(segments=4, ttl_s=64.0, max_rows=10))
    assert share.stats().max_rows == 10
    now_s[0] = 100.0
    assert [segment.ttl.expired(7) for segment in share.segments] == [7] * 4


def test_what_rows_are_and_who_gets_one_does_not_change():
    with cluster() as bed:
        (client,) = bed.workers(user(max_rows=9), filled(user()))
        other = user(max_rows=20, admission=Admission(min_count=2))
        with pytest.raises(ManifestMismatch, match="admission") as caught:
            seed(client, other)
        assert "max_rows" not in str(caught.value)
        assert client.attach() == user(max_rows=9)


@pytest.mark.fault("F12")
def test_a_chief_that_was_replaced_changes_no_limits():
    with cluster() as bed:
        (old,) = bed.workers(user(max_rows=9), filled(user()))
        new = bed.client(0, generation=1)
        seed(new, user(max_rows=20))
        with pytest.raises(StaleGeneration):
            seed(old, user(max_rows=5))
        assert new.attach() == user(max_rows=20)
