"""Loading rows: given values and fresh slots, never over a row that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.client import tables
from ps.client.saving.saver import SaveOptions
from ps.errors import IdError, NonFiniteGradient, RoleError, ShapeError, TableFull
from ps.manifest.manifest import Adagrad, Adam, Hyper
from ps.manifest.table_spec import Admission
from rpc.auth.handshake import Role
from tests.support.ps_cluster import cluster, filled
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.5)
IDS = np.arange(300)
VALUES = np.random.default_rng(0).normal(size=(300, 4)).astype("float32")
STRICT = Admission(min_count=3)


def started(bed, manifest):
    (client,) = bed.workers(manifest, filled(manifest))
    return client


def user(**settings):
    return with_tables(table("user", **settings))


def rows_of(client):
    """Every row with its slots, by id."""
    return {
        int(number): row.tobytes()
        for ids, rows in client.tables.scan("user", with_slots=True)
        for number, row in zip(ids, rows, strict=True)
    }


@pytest.mark.parametrize("mode", ["async", "sync", "hybrid"])
def test_loaded_rows_have_their_values_and_fresh_slots_at_every_server(monkeypatch, mode):
    monkeypatch.setattr(tables, "LOAD_BYTES", 1000)  # many requests
    spec = table("user", Adagrad(initial_accumulator_value=0.25), admission=STRICT)
    bound = {"staleness_bound": 1} if mode == "hybrid" else {}
    manifest = with_tables(spec, consistency=mode, **bound)
    with cluster(num_servers=3) as bed:
        client = started(bed, manifest)
        assert client.tables.load_rows("user", IDS, VALUES) == IDS.size
        np.testing.assert_array_equal(client.tables.lookup({"user": IDS})["user"], VALUES)
        for _, rows in client.tables.scan("user", with_slots=True):
            assert (rows[:, 4:] == np.float32(0.25)).all()


def test_a_row_that_is_there_keeps_its_values_and_slots():
    with cluster(num_servers=2) as bed:
        client = started(bed, user(rule=Adagrad()))
        client.tables.push({"user": (IDS[:9], ones(IDS[:9]))}, hyper=HYPER)
        before = rows_of(client)
        assert client.tables.load_rows("user", IDS, VALUES) == IDS.size - 9
        after = rows_of(client)
        assert after.items() >= before.items()
        assert client.tables.load_rows("user", IDS, -VALUES) == 0
        assert rows_of(client) == after


def test_loading_is_no_step_of_a_rule_that_counts_steps():
    pushed = {}
    for num_loads in (0, 5):
        with cluster() as bed:
            client = started(bed, user(rule=Adam()))
            for at in range(num_loads):
                client.tables.load_rows("user", IDS[at : at + 1] + 1000, VALUES[:1])
            client.tables.push({"user": (IDS[:5], ones(IDS[:5]))}, hyper=HYPER)
            pushed[num_loads] = client.tables.lookup({"user": IDS[:5]})["user"]
    np.testing.assert_array_equal(pushed[0], pushed[5])


def test_the_next_checkpoint_has_the_loaded_rows_full_or_delta(tmp_path):
    manifest = user(rule=Adagrad())
    deltas = SaveOptions(full_every=9)
    with cluster(num_servers=2) as bed:
        client = started(bed, manifest)
        client.tables.push({"user": (IDS[:9], ones(IDS[:9]))}, hyper=HYPER)
        client.save(tmp_path, 1, options=deltas)
        client.tables.load_rows("user", IDS, VALUES)
        assert client.save(tmp_path, None, options=deltas).endswith("2")  # something has changed
        expected = rows_of(client)
    with cluster(num_servers=3) as bed:
        client = bed.client()
        assert client.restore(tmp_path) == 2
        client.seed(manifest, filled(manifest))
        assert rows_of(client) == expected


def test_a_full_table_refuses_rows_with_both_numbers_or_drops_the_oldest():
    with cluster() as bed:
        client = started(bed, user(max_rows=100))
        with pytest.raises(TableFull, match=r"of at most 100 rows .*; raise the limit"):
            client.tables.load_rows("user", IDS, VALUES)
    with cluster() as bed:
        client = started(bed, user(max_rows=100, when_full="lru"))
        for at in range(0, 300, 50):
            client.tables.load_rows("user", IDS[at : at + 50], VALUES[at : at + 50])
        kept = rows_of(client)
        assert 50 <= len(kept) <= 100
        newest = client.tables.lookup({"user": IDS[250:]})["user"]
        np.testing.assert_array_equal(newest, VALUES[250:])
    with cluster(num_servers=2) as bed:  # one request with more rows than the table takes
        client = started(bed, user(max_rows=100, when_full="lru", segments=8))
        client.tables.load_rows("user", IDS, VALUES)
        assert 50 <= len(rows_of(client)) <= 100


def test_rows_that_do_not_fit_are_refused_before_anything_is_sent(monkeypatch):
    monkeypatch.setattr(tables, "LOAD_BYTES", 1000)  # 41 rows
    wrong: dict[type[Exception], list[Any]] = {
        ShapeError: [
            (IDS[:2], VALUES[:2].astype("float64"), r"float32\[2, 4\] .*got float64\[2, 4\]"),
            (IDS[:2], VALUES[:2, :3], r"float32\[2, 4\] .*got float32\[2, 3\]"),
            (IDS[:2], VALUES[:3], r"got float32\[3, 4\]; pass one row per id"),
            (IDS[:2], VALUES[:2].tolist(), "got list"),
        ],
        IdError: [
            ([7, 8, 7], VALUES[:3], "id 7 occurs twice in the rows to load"),
            ([*range(1, 101), 7], VALUES[:101], "id 7 occurs twice in the rows to load"),
            ([-1], VALUES[:1], r"takes int64 ids 0\..*, got -1"),
            (["a"], VALUES[:1], "takes int64 ids, got"),
        ],
        NonFiniteGradient: [
            (
                [3, 5],
                np.array([[0] * 4, [np.nan] * 4], np.float32),
                "4 of .* values loaded into .* id 5",
            ),
        ],
    }
    with cluster() as bed:
        client = started(bed, user())
        for kind, cases in wrong.items():
            for ids, rows, message in cases:
                with pytest.raises(kind, match=message):
                    client.tables.load_rows("user", ids, rows)
        with pytest.raises(IdError, match="id 'b' occurs twice in the rows to load"):
            client.tables.load_rows("user", [7, 8, 8], VALUES[:3], named=["a", "b", "b"])
        assert not set(rows_of(client)) - {3}


def test_rows_of_more_ids_than_one_request_has_are_loaded_in_several(monkeypatch):
    monkeypatch.setattr(tables, "LOAD_BYTES", 1000)  # 41 rows
    monkeypatch.setattr("ps.tables.ids.MAX_IDS", 41)
    with cluster() as bed:
        client = started(bed, user())
        assert client.tables.load_rows("user", IDS, VALUES) == IDS.size
        assert len(rows_of(client)) == IDS.size
        with pytest.raises(IdError, match=r"300 ids in one call, the limit is 41.*smaller batches"):
            client.tables.lookup({"user": IDS})


def test_of_the_workers_only_the_chief_loads_and_a_spark_task_may():
    with cluster(num_workers=2) as bed:
        chief, other = bed.workers(user(), filled(user()))
        with pytest.raises(RoleError, match="only the chief"):
            other.tables.load_rows("user", IDS, VALUES)
        task = bed.client(role=Role.FEEDER)
        task.attach()
        assert task.tables.load_rows("user", IDS, VALUES) == IDS.size
        assert chief.tables.load_rows("user", IDS, VALUES) == 0


def test_servers_whose_rows_were_loaded_are_known_as_saved(tmp_path: Path):
    """Else an idle job writes the same checkpoint again and again, and drops the older ones."""
    with cluster(num_servers=2) as bed:
        client = started(bed, user())
        client.tables.load_rows("user", IDS, VALUES)
        client.save(tmp_path, 1)
        assert all(server.saved_as for server in client.describe())
        client.tables.load_rows("user", IDS[:1] + 5000, VALUES[:1])
        assert not all(server.saved_as for server in client.describe()), "one has another row"


@pytest.mark.parametrize("num_pushes", [0, 1])
def test_a_delta_after_a_save_to_another_directory_has_the_loaded_rows(tmp_path, num_pushes):
    """Loading makes no version: the other save took what said that the next one is whole."""
    manifest = user(rule=Adagrad())
    deltas = SaveOptions(full_every=10)
    with cluster(num_servers=2) as bed:
        client = started(bed, manifest)
        client.save(tmp_path / "a", 1, options=deltas)
        client.tables.load_rows("user", IDS, VALUES)
        client.save(tmp_path / "b", 1)
        for _ in range(num_pushes):
            client.tables.push({"user": (IDS[:1], ones(IDS[:1]))}, hyper=HYPER)
        client.save(tmp_path / "a", 2, options=deltas)
        expected = rows_of(client)
    with cluster(num_servers=2) as bed:
        client = bed.client()
        assert client.restore(tmp_path / "a") == 2
        assert rows_of(client) == expected
