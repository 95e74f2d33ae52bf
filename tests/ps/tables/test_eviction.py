"""A full table makes room wherever its oldest rows are: only what the push itself brings stays."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.checkpoint.snapshot import ShardSnapshot
from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.errors import PSError, TableFull
from ps.manifest.manifest import Hyper
from ps.manifest.table_spec import Admission
from ps.tables.rows import RowBatch
from ps.tables.segment import EVICTED_SHARE
from tests.support.ps_cluster import WAIT_S, cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)


def push(client: PSClient, ids: Any) -> None:
    numbers = np.array(sorted(ids), np.int64)
    client.tables.push({"user": (numbers, ones(numbers))}, hyper=HYPER)


def values(client: PSClient) -> dict[int, float]:
    """The first number of every row."""
    return {
        int(number): float(row[0])
        for ids, rows in client.tables.scan("user")
        for number, row in zip(ids, rows, strict=True)
    }


@pytest.mark.attack("A34")
@pytest.mark.parametrize("segments", [1, 4])
def test_only_a_push_that_is_larger_than_the_table_is_refused(segments: int):
    """Every row counts the pushes that brought it since it was made."""
    limit = 6
    pushes = st.lists(st.sets(st.integers(0, 30), max_size=8), max_size=20)

    @settings(max_examples=10, deadline=None)
    @given(pushes)
    def check(batches: list[set[int]]) -> None:
        manifest = with_tables(table(max_rows=limit, when_full="lru", segments=segments))
        with cluster("inproc") as bed:
            (client,) = bed.workers(manifest, filled(manifest))
            rows: dict[int, float] = {}
            for ids in batches:
                if len(ids) > limit:
                    with pytest.raises(
                        TableFull, match=r"holds \d of at most 6 rows .* push fewer"
                    ):
                        push(client, ids)
                    rows = values(client)  # segments before the one that refuses have taken theirs
                    continue
                push(client, ids)
                found = values(client)
                assert {number: found[number] for number in ids} == {
                    number: rows.get(number, 0.0) + 1.0 for number in ids
                }
                others = {number: value for number, value in found.items() if number not in ids}
                assert others.items() <= rows.items()
                assert len(found) <= limit
                rows = found

    check()


def test_the_oldest_of_all_segments_make_room():
    manifest = with_tables(table(max_rows=8, when_full="lru", segments=16))
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        share = bed.servers[0]._service.life.loaded().tables.tables[0]
        parts = share.parts_of(np.arange(1000))
        (filling,) = np.nonzero(parts == 1)
        for number in filling[:8].tolist():
            push(client, [number])
        (alone,) = np.nonzero(parts == 2)
        push(client, [filling[0], *alone[:3]])
        assert values(client).keys() == {filling[0], *filling[4:8], *alone[:3]}
        push(client, [filling[5], *alone[3:9]])  # its own segment has three to give
        assert values(client).keys() >= {filling[5], *alone[3:9]}
        assert client.stats()[0].tables[0].evicted == 3 + 6


def test_room_in_other_segments_is_made_for_later_pushes_too():
    """Finding the oldest takes a pass over all rows, so a 16th of them goes at once."""
    manifest = with_tables(table(max_rows=64, when_full="lru", segments=16))
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        share = bed.servers[0]._service.life.loaded().tables.tables[0]
        parts = share.parts_of(np.arange(5000))
        (filling,), (alone,) = np.nonzero(parts == 1), np.nonzero(parts == 2)
        push(client, filling[:32])
        push(client, filling[32:64])
        push(client, alone[:1])
        assert client.stats()[0].tables[0].evicted == 64 // EVICTED_SHARE == 4


def test_an_id_is_counted_once_however_often_its_push_makes_room():
    spec = table(max_rows=4, when_full="lru", segments=4, admission=Admission(min_count=2))
    manifest = with_tables(spec)
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        share = bed.servers[0]._service.life.loaded().tables.tables[0]
        parts = share.parts_of(np.arange(1000))
        (first,), (second,) = np.nonzero(parts == 0), np.nonzero(parts == 1)
        for _ in range(2):
            push(client, first[:4])
        push(client, second[:1])
        push(client, second[:2])  # the one is admitted, and finds no room; the other is not
        assert values(client).keys() & set(second.tolist()) == {int(second[0])}
        push(client, second[1:2])
        assert int(second[1]) in values(client)


@pytest.mark.fault("F10")
def test_a_save_has_the_rows_that_went_from_other_segments_after_its_cut():
    manifest = with_tables(table(max_rows=8, when_full="lru", segments=4))
    with cluster("inproc") as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        serving = bed.servers[0]._service.life.loaded().tables
        parts = serving.tables[0].parts_of(np.arange(1000))
        (first,), (last,) = np.nonzero(parts == 0), np.nonzero(parts == 3)
        for at in (0, 3):
            push(client, [*last[at : at + 3], first[at]])
        before = values(client)
        cut = ShardSnapshot(serving.updates._guard, 0, "cut")
        serving.updates._guard.open(cut)
        push(client, first[10:17])  # before its turn comes, the last segment gives up its rows
        assert len(before.keys() & values(client).keys()) == 1
        found = {
            int(number): float(row[0])
            for segment in cut.segments
            for batch in segment.batches()
            if isinstance(batch, RowBatch)
            for number, row in zip(batch.ids, batch.rows, strict=True)
        }
        serving.updates._guard.close()
    assert found == before


@pytest.mark.fault("F42")
def test_workers_that_make_room_at_the_same_time_and_saves_go_on(tmp_path: Path):
    manifest = with_tables(table(max_rows=24, when_full="lru", segments=8))
    options = SaveOptions(full_every=9)
    failures: list[PSError] = []
    with cluster("inproc", num_workers=3) as bed:
        clients = bed.workers(manifest, filled(manifest))
        saver = bed.driver()
        saver.attach()

        def train(client: PSClient, seed: int) -> None:
            random = np.random.default_rng(seed)
            try:
                for _ in range(60):
                    push(client, random.choice(500, 7, replace=False))
            except PSError as error:
                failures.append(error)

        threads = [
            threading.Thread(target=train, args=(client, seed))
            for seed, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for step in range(4):
            saver.save(tmp_path, step, options=options)
        for thread in threads:
            thread.join(4 * WAIT_S)
        assert not any(thread.is_alive() for thread in threads)
        assert not failures
        saver.save(tmp_path, 9, options=options)
        saved = values(clients[0])
        assert len(saved) <= 24
    with cluster("inproc") as bed:
        client = bed.client()
        client.restore(tmp_path)
        client.seed(manifest, filled(manifest))
        assert values(client) == saved
