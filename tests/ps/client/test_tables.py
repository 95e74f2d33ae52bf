"""Tables over several servers: values, exactly-once, limits and refusals as promised."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.errors import (
    IdError,
    ManifestMismatch,
    NonFiniteGradient,
    PSSettingsError,
    RoleError,
    ServerPhaseError,
    ShapeError,
    StaleGeneration,
    TableFull,
)
from ps.manifest.initializer_spec import RandomNormal
from ps.manifest.manifest import SGD, Adagrad, Adam, Hyper, Manifest, Nadam, TableSpec
from ps.manifest.table_spec import Admission
from ps.tables.ids import as_bits, from_bits
from tests.support.ps_cluster import (
    ADD,
    Cluster,
    cluster,
    filled,
    make_manifest,
    run_all,
    succeeded,
)
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]  # seconds, cold

HYPER = Hyper(0.1)
USER = with_tables(table())


def started(bed: Cluster, manifest: Manifest = USER):
    return bed.workers(manifest, filled(manifest))


def trained(num_servers: int, manifest: Manifest):
    """What ten pushes to two tables leave, by name of the table."""
    random = np.random.default_rng(0)
    with cluster(num_servers=num_servers) as bed:
        (client,) = started(bed, manifest)
        for step in range(10):
            ids = {spec.name: random.integers(0, 60, (5, 7)) for spec in manifest.tables}
            grads = {
                spec.name: random.standard_normal((5, 7, spec.dim)).astype(spec.dtype)
                for spec in manifest.tables
            }
            push = {name: (ids[name], grads[name]) for name in ids}
            client.tables.push(push, hyper=Hyper(0.1 / (step + 1)))
        return client.tables.lookup({spec.name: range(70) for spec in manifest.tables})


@pytest.mark.parametrize("num_servers", [2, 3])
def test_sharded_equals_unsharded_bit_for_bit(num_servers: int):
    manifest = with_tables(
        table("user", Adagrad(), initializer=RandomNormal(), seed=3),
        table("item", Adam(), dim=9, dtype="float64", segments=3),
    )
    alone, sharded = trained(1, manifest), trained(num_servers, manifest)
    for name in ("user", "item"):
        assert np.array_equal(alone[name], sharded[name])
    assert alone["item"].dtype == np.float64


def test_a_push_is_the_rule_on_the_sum_of_equal_ids():
    manifest = with_tables(table(rule=Adagrad(), initializer=RandomNormal()))
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        ids = np.array([[7, 5], [5, 5]])
        before = client.tables.lookup({"user": ids})["user"]
        assert before.shape == (2, 2, 4)
        client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
        after = client.tables.lookup({"user": ids})["user"]
    step = before - after
    for place, total in (((0, 0), 1.0), ((0, 1), 3.0), ((1, 1), 3.0)):
        expected = 0.1 * total / np.sqrt(0.1 + total**2 + 1e-7)
        assert step[place] == pytest.approx(np.full(4, expected), rel=1e-5)


def test_a_push_is_clipped_after_equal_ids_are_summed():
    """By value, or to the norm of the table's whole gradient in this push."""
    random = np.random.default_rng(4)
    ids = random.integers(0, 3000, 9000)
    grads = random.standard_normal((ids.size, 4)).astype(np.float32)
    summed = np.zeros((3000, 4), np.float32)
    np.add.at(summed, ids, grads)
    norm = np.float32(np.sqrt((summed.astype(np.float64) ** 2).sum()))
    for rule, expected in (
        (SGD(clipvalue=0.5), np.clip(summed, -0.5, 0.5)),
        (SGD(clipnorm=2.0), summed * np.float32(2) / norm),
        (SGD(clipnorm=1e6), summed),
    ):
        found = []
        for num_servers in (1, 3):
            manifest = with_tables(table(rule=rule), table("other", rule))
            with cluster(num_servers=num_servers) as bed:
                (client,) = started(bed, manifest)
                client.tables.push(
                    {"user": (ids, grads), "other": (ids, 100 * grads)}, hyper=Hyper(1.0)
                )
                found.append(-client.tables.lookup({"user": range(3000)})["user"])
        assert found[0].tobytes() == found[1].tobytes()
        np.testing.assert_allclose(found[0], expected, rtol=1e-6)


@pytest.mark.fault("F48")
def test_a_norm_that_is_not_finite_hides_no_bad_id():
    manifest = with_tables(table(rule=SGD(clipnorm=1.0)))
    with cluster() as bed:
        (client,) = started(bed, manifest)
        bad = ones([3, 9])
        bad[1, 0] = np.inf
        with pytest.raises(NonFiniteGradient, match="for id 9"):
            client.tables.push({"user": ([3, 9], bad)}, hyper=HYPER)


def test_routed_ids_serve_the_lookup_and_the_push():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed)
        routed = client.tables.route({"user": [[3, 4], [3, 9]]})
        client.tables.push({"user": (routed["user"], ones([[3, 4], [3, 9]]))}, hyper=HYPER)
        found = client.tables.lookup(routed)["user"]
    assert found[..., 0].tolist() == [[2.0, 1.0], [2.0, 1.0]]


@pytest.mark.fault("F50")
def test_no_ids_and_no_tables_are_requests_like_others():
    with cluster(num_servers=2) as bed:
        (client,) = started(bed)
        assert client.tables.lookup({"user": []})["user"].shape == (0, 4)
        assert client.tables.lookup({"user": np.empty((0, 3), np.int32)})["user"].shape == (0, 3, 4)
        assert client.tables.lookup({}) == {}
        assert client.tables.push({"user": ([], np.empty((0, 4), np.float32))}, hyper=HYPER).applied
        assert client.tables.push({}, hyper=HYPER).applied
        assert client.tables.lookup({"user": 5})["user"].tolist() == [0.0] * 4


def test_eight_clients_on_one_row_lose_no_update():
    with cluster(num_servers=2, num_workers=8) as bed:
        clients = started(bed)

        def work(client) -> None:
            for _ in range(30):
                client.tables.push({"user": ([7, 7, 1], ones([7, 7, 1]))}, hyper=HYPER)

        succeeded(run_all(*(partial(work, client) for client in clients)))
        found = clients[0].tables.lookup({"user": [7, 1]})["user"]
        pushes = [
            sum(worker.table_pushes for worker in stats.workers) for stats in clients[0].stats()
        ]
    assert found[:, 0].tolist() == [480.0, 240.0]
    assert pushes == [240, 240]


BAD_IDS = {
    "negative": ([4, -1], r"int64 ids 0\.\.9223372036854775807, got -1 at position 1"),
    "bits of uint64": ([2**63 + 5 - 2**64], "such as 9223372036854775813 whose bits .*'uint64'"),
    "beyond 63 bits": ([2**63], r"got 9223372036854775808 at position 0; .*id_kind='uint64'"),
    "beyond 64 bits": ([1, 2**70], "got 1180591620717411303424 at position 1"),
    "uint64 array": (np.array([3, 2**63 + 5], np.uint64), "got 9223372036854775813 at position 1"),
    "float": ([1.0, 2.0], r"got 1\.0 at position 0"),
    "float array": (np.array([1.0, 2.0]), r"got .*1\.0.* at position 0 in float64\[2\]"),
    "NaN": ([3, float("nan")], "got nan at position 1"),
    "bool": (np.array([True]), "bool"),
    "text": (["7"], "got .*'7'.* at position 0"),
    "nothing": ([7, None], "got None at position 1"),
    "ragged": ([[1], [2, 3]], "need one shape"),
}


@pytest.mark.fault("F49")
@pytest.mark.parametrize("name", BAD_IDS)
def test_bad_ids_are_refused_before_anything_is_sent(name: str):
    ids, sentence = BAD_IDS[name]
    with cluster() as bed:
        (client,) = started(bed)
        calls = client.stats()[0].calls
        with pytest.raises(IdError, match=f"table 'user'.*({sentence})"):
            client.tables.lookup({"user": ids})
        with pytest.raises(IdError, match=sentence):
            client.tables.push({"user": (ids, ones([1]))}, hyper=HYPER)
        assert client.stats()[0].calls == calls + 1


@pytest.mark.fault("F49")
@settings(max_examples=150)
@given(
    st.lists(st.integers(-(2**65), 2**65), min_size=1, max_size=6),
    st.sampled_from([("int64", None), ("uint64", None), ("int64", 100), ("uint64", 2**63 + 7)]),
)
def test_every_integer_arrives_as_it_is_or_is_refused(ids: list[int], kind):
    id_kind, max_id = kind
    spec = table(id_kind=id_kind, max_id=max_id)
    largest = max_id if max_id is not None else 2 ** (63 if id_kind == "int64" else 64) - 1
    if all(0 <= number <= largest for number in ids):
        assert [int(number) for number in from_bits(spec, as_bits(spec, ids))] == ids
        return
    with pytest.raises(IdError) as caught:
        as_bits(spec, ids)
    place = int(caught.value.details["position"])
    assert caught.value.details["id"] == str(ids[place])
    assert not 0 <= ids[place] <= largest


def test_hashes_of_64_bits_are_ids_where_the_table_says_so():
    with cluster(num_servers=3) as bed:
        (client,) = started(bed, with_tables(table(id_kind="uint64")))
        ids = np.array([2**64 - 1, 2**63, 5], np.uint64)
        client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
        assert client.tables.lookup({"user": ids})["user"][:, 0].tolist() == [1.0] * 3
        found = np.concatenate([batch for batch, _ in client.tables.scan("user")])
        assert sorted(found.tolist()) == sorted(ids.tolist())
        with pytest.raises(IdError, match="got -5"):
            client.tables.lookup({"user": [-5]})


@pytest.mark.attack("A34")
def test_a_worker_that_brings_ever_new_ids_meets_the_limit():
    manifest = with_tables(table(max_rows=100))
    with cluster(num_servers=2, num_workers=2) as bed:
        greedy, other = started(bed, manifest)

        def push_new_ids() -> None:
            for start in range(0, 10_000, 10):
                ids = np.arange(start, start + 10)
                greedy.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)

        with pytest.raises(TableFull, match=r"ps:\d holds .* at most 50 rows .*max_rows=100"):
            push_new_ids()
        rows = sum(stats.tables[0].rows for stats in other.stats())
        assert 80 <= rows <= 100
        before = other.tables.lookup({"user": [0]})["user"][0, 0]
        other.tables.push({"user": ([0], ones([0]))}, hyper=HYPER)
        greedy.tables.push({"user": ([0], ones([0]))}, hyper=HYPER)
        assert other.tables.lookup({"user": [0]})["user"][0, 0] == before + 2.0


@pytest.mark.fault("F48")
def test_a_gradient_that_is_not_finite_names_table_and_id():
    with cluster() as bed:
        (client,) = started(bed)
        grads = ones([5, 9, 7])
        grads[1, 2] = np.nan
        with pytest.raises(NonFiniteGradient, match=r"1 of \d+ values .*'user'.* id 9; .*worker:0"):
            client.tables.push({"user": ([5, 9, 7], grads)}, hyper=HYPER)
        assert client.tables.lookup({"user": 9})["user"][0] == 0.0
        assert client.tables.push({"user": ([9], ones([9]))}, hyper=HYPER).applied
        assert client.tables.lookup({"user": 9})["user"][0] == 1.0
        assert client.stats()[0].workers[0].refused == 1


@pytest.mark.fault("F47")
@pytest.mark.parametrize(
    "grads", [np.ones((2, 5), np.float32), np.ones((3, 4), np.float32), np.ones((2, 4)), [[1.0]]]
)
def test_gradients_of_another_shape_are_refused(grads):
    with cluster() as bed:
        (client,) = started(bed)
        with pytest.raises(ShapeError, match=r"'user' takes gradients float32\[2, 4\]"):
            client.tables.push({"user": ([1, 2], grads)}, hyper=HYPER)


@pytest.mark.fault("F06")
def test_a_fenced_worker_changes_no_row():
    with cluster() as bed:
        (client,) = started(bed)
        bed.driver().fence(0, 1)
        with pytest.raises(StaleGeneration):
            client.tables.push({"user": ([1], ones([1]))}, hyper=HYPER)
        newer = bed.client(0, generation=1)
        newer.attach()
        assert newer.tables.lookup({"user": 1})["user"][0] == 0.0


def test_tables_do_not_wait_for_a_barrier():
    manifest = with_tables(table(), rule=ADD, consistency="sync")
    with cluster(num_workers=2) as bed:
        one, other = started(bed, manifest)
        waiting = threading.Thread(
            target=partial(one.push, filled(manifest, 1.0), hyper=HYPER, rows=1)
        )
        waiting.start()
        other.tables.push({"user": ([7], ones([7]))}, hyper=HYPER)
        assert other.tables.lookup({"user": 7})["user"][0] == 1.0
        other.push(filled(manifest, 1.0), hyper=HYPER, rows=1)
        waiting.join(15)
        assert not waiting.is_alive()
        one.finish()
        with pytest.raises(ServerPhaseError, match="finish"):
            one.tables.push({"user": ([7], ones([7]))}, hyper=HYPER)


def test_a_scan_gives_every_row_once_and_the_slots_if_asked():
    manifest = with_tables(table(rule=Adagrad()), table("item", dim=2))
    with cluster(num_servers=3) as bed:
        (client,) = started(bed, manifest)
        ids = np.random.default_rng(0).choice(10**12, 500, replace=False)
        client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
        driver = bed.driver()
        driver.attach()
        batches = list(driver.tables.scan("user", with_slots=True))
        found = {
            number: row for ids_, rows in batches for number, row in zip(ids_, rows, strict=True)
        }
        assert sorted(found) == sorted(ids.tolist())
        assert sum(ids_.size for ids_, _ in batches) == 500
        assert {row.shape for row in found.values()} == {(8,)}
        values = driver.tables.lookup({"user": ids})["user"]
        assert all(np.array_equal(found[i][:4], row) for i, row in zip(ids, values, strict=True))
        assert not list(driver.tables.scan("item"))
        with pytest.raises(RoleError):
            driver.tables.push({"user": ([1], ones([1]))}, hyper=HYPER)


def test_statistics_tell_misses_repeats_and_memory():
    manifest = with_tables(table(admission=Admission(min_count=2)))
    with cluster() as bed:
        (client,) = started(bed, manifest)
        ids = np.array([1, 1, 2, 3])
        for _ in range(2):
            client.tables.lookup({"user": ids})
            client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
        client.tables.lookup({"user": ids})
        (stats,) = client.stats()[0].tables
    assert (stats.name, stats.rows, stats.added, stats.dropped) == ("user", 3, 3, 3)
    assert (stats.given, stats.looked_up, stats.missed, stats.pushed) == (20, 9, 6, 6)
    assert stats.memory_bytes > 3 * 2 * 4 * 4


def test_tables_are_part_of_what_all_must_agree_on():
    with cluster() as bed:
        started(bed)
        other = bed.client()
        with pytest.raises(ManifestMismatch, match=r"table 'user': expected dim 4, found 5"):
            other.seed(with_tables(table(dim=5)), filled(USER))
        with pytest.raises(ManifestMismatch, match="table 'user' is missing"):
            other.seed(make_manifest(30), filled(USER))
        assert other.attach().tables == USER.tables
        with pytest.raises(ManifestMismatch, match="no table 'item'; the manifest has 'user'"):
            other.tables.lookup({"item": [1]})


def test_a_manifest_may_have_tables_alone():
    manifest = Manifest(groups=(), tables=(table(),))
    with cluster(num_servers=2) as bed:
        client = bed.client()
        client.seed(manifest, {})
        client.tables.push({"user": ([1], ones([1]))}, hyper=HYPER)
        client.pull({})
        assert client.tables.lookup({"user": 1})["user"][0] == 1.0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"rule": Adam(global_clipnorm=0.1)},
            r"global_clipnorm=0.1\) is not offered .*set clipnorm",
        ),
        ({"rule": Adam(ema_momentum=0.9)}, r"averages of rows outside a push"),
        ({"rule": Nadam(), "row_steps": True}, r"row_steps=True is for Adam, .* got Nadam"),
        ({"name": ""}, "characters"),
        ({"unseen": (1.0,)}, r"unseen has 1 numbers, a row has 4; give one vector"),
        ({"unseen": (0.0, 0.0, 0.0, 1e39)}, r"unseen must be finite in float32, got 1e\+39"),
        ({"unseen": (float("nan"),) * 4}, "unseen must be finite in float32, got nan"),
        (
            {"learning_rate_multiplier": -0.1},
            r"multiplier must be in 0\.\..*, got -0\.1; 1\.0 uses",
        ),
        ({"learning_rate_multiplier": float("nan")}, "learning_rate_multiplier .* got nan"),
    ],
)
def test_impossible_tables_are_refused_with_the_setting(changes, sentence):
    with pytest.raises(PSSettingsError, match=sentence):
        TableSpec(**{"name": "user", "dim": 4, "rule": ADD, **changes})


def test_names_are_unique_through_groups_and_tables():
    with pytest.raises(PSSettingsError, match="'trainable' occurs twice"):
        with_tables(table("trainable"))
