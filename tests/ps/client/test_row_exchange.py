"""Rows in a push: gradients of rows go with the groups', and the next batch's rows come back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.errors import (
    ManifestMismatch,
    NonFiniteGradient,
    NonFiniteUpdate,
    PSSettingsError,
    ShapeError,
    TableFull,
)
from ps.manifest.initializer_spec import Constant, RandomNormal
from ps.manifest.manifest import SGD, Adagrad, Adam, Hyper, Manifest
from ps.manifest.table_spec import Admission
from ps.protocol.messages import Ack
from tests.support.ps_cluster import (
    ADD,
    Cluster,
    cluster,
    filled,
    random_arrays,
    run_all,
    succeeded,
)
from tests.support.tables import ones, table, table_kernels_loaded, with_tables
from tests.support.waiting import wait_until

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
IDS = np.arange(40)
MODES: dict[str, dict[str, Any]] = {
    "async": {"consistency": "async"},
    "ssp": {"consistency": "ssp", "staleness_bound": 1},
    "sync": {"consistency": "sync"},
    "hybrid": {"consistency": "hybrid", "staleness_bound": 2},
}
Array = np.ndarray[Any, Any]


def started(bed: Cluster, manifest: Manifest) -> list[PSClient]:
    return bed.workers(manifest, filled(manifest))


class Rows:
    """Arrays for the rows of some ids, and gradients for them."""

    def __init__(self, client: PSClient, **ids: Any) -> None:
        self.specs = {spec.name: spec for spec in client.manifest.tables}
        self.ids = client.tables.route(ids)
        self.values = {
            name: np.full(
                (routed.unique.size, self.specs[name].dim), np.nan, self.specs[name].dtype
            )
            for name, routed in self.ids.items()
        }

    @property
    def into(self) -> dict[str, Any]:
        return {name: (self.ids[name], self.values[name]) for name in self.ids}

    def grads(self, value: float = 1.0) -> dict[str, Any]:
        """The same number for all elements."""
        return {
            name: (self.ids[name], np.full_like(values, value))
            for name, values in self.values.items()
        }

    def looked_up(self, client: PSClient, *, training: bool = True) -> Rows:
        client.tables.lookup_into(self.into, training=training)
        return self

    def __getitem__(self, name: str) -> Array:
        """One row per given id."""
        return np.asarray(self.ids[name].expand(self.values[name]))


def exchange(
    client: PSClient,
    grads: Mapping[str, Any] | None,
    wanted: Rows | None = None,
    *,
    dense: float = 1.0,
    **options: Any,
) -> dict[str, Array]:
    """Push ones to the groups with these rows; return the values of the groups after it."""
    into = filled(client.manifest, np.nan)
    client.push_pull(
        filled(client.manifest, dense),
        into,
        **{"hyper": HYPER, "rows": 1, **options},
        table_grads=grads,
        next_rows=None if wanted is None else wanted.into,
    )
    return into


@pytest.mark.parametrize("mode", MODES)
def test_one_request_per_server_brings_gradients_and_takes_values_and_rows(mode: str):
    manifest = with_tables(table(), table("item", dim=3), rule=ADD, **MODES[mode])
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        rows = Rows(client, user=[[5, 7], [5, 9]], item=range(30)).looked_up(client)
        assert not rows["user"].any()
        following = Rows(client, user=[5, 7, 100], item=[3, 200])
        calls = [stats.calls for stats in client.stats()]
        values = exchange(client, rows.grads(), following)
        assert [stats.calls for stats in client.stats()] == [number + 2 for number in calls]
        assert set(values["trainable"]) == {1.0}
        assert following["user"][:, 0].tolist() == [1.0, 1.0, 0.0]
        assert following["item"].tolist() == [[1.0] * 3, [0.0] * 3]
        for stats in client.stats():
            (worker,) = stats.workers
            assert (worker.pushes, worker.table_pushes) == (1, 1)


@pytest.mark.parametrize("mode", MODES)
def test_a_push_may_bring_no_rows_or_ask_for_none(mode: str):
    manifest = with_tables(table(), rule=ADD, **MODES[mode])
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        first, second = Rows(client, user=IDS), Rows(client, user=IDS)
        exchange(client, None, first)
        exchange(client, first.grads())
        client.push_null(next_rows=second.into)
        assert set(second["user"].ravel()) == {1.0}
        values = filled(manifest, np.nan)
        client.push_null(into=values, next_rows=Rows(client, user=[]).into)
        assert set(values["trainable"]) == {2.0}
        exchange(client, {}, second)
        assert [stats.workers[0].table_pushes for stats in client.stats()] == [1, 1]


def trained(num_servers: int, manifest: Manifest, *, together: bool) -> dict[str, Array]:
    """What ten steps leave, with one request each or with three; by name, groups too."""
    random = np.random.default_rng(1)
    with cluster(num_servers=num_servers) as bed:
        (client,) = bed.workers(manifest, random_arrays(manifest, 0))
        values = filled(manifest)
        client.pull(values)
        batches = [
            Rows(client, user=random.integers(0, 60, 35), item=random.integers(0, 60, (5, 7)))
            for _ in range(11)
        ]
        batches[0].looked_up(client)
        for step, (batch, following) in enumerate(itertools.pairwise(batches)):
            grads = {
                name: (ids, random.standard_normal(rows.shape).astype(rows.dtype) + rows)
                for name, (ids, rows) in batch.into.items()
            }
            dense = random_arrays(manifest, 100 + step)
            hyper = Hyper(0.1 / (step + 1))
            if together:
                client.push_pull(
                    dense,
                    values,
                    hyper=hyper,
                    rows=3,
                    table_grads=grads,
                    next_rows=following.into,
                )
            else:
                client.push_pull(dense, values, hyper=hyper, rows=3)
                client.tables.push(
                    {name: (ids.unique, summed) for name, (ids, summed) in grads.items()},
                    hyper=hyper,
                )
                following.looked_up(client)
        found = client.tables.lookup({"user": range(60), "item": range(60)})
        return {**found, **values}


@pytest.mark.parametrize("mode", ["async", "ssp", "sync"])
@pytest.mark.parametrize("num_servers", [1, 3])
def test_one_worker_gets_the_bits_of_three_requests(mode: str, num_servers: int):
    manifest = with_tables(
        table("user", Adagrad(), initializer=RandomNormal(), seed=3),
        table("item", Adam(), dim=9, dtype="float64", segments=3),
        rule=SGD(momentum=0.9),
        **MODES[mode],
    )
    together, apart = (trained(num_servers, manifest, together=flag) for flag in (True, False))
    for name, values in apart.items():
        assert np.array_equal(together[name], values)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_sync_workers_equal_one_process_that_reduces_their_rows_in_rank_order(reduction: str):
    """In float32, with ids that one, some or all of the workers push, and batches of all sizes."""
    sizes, steps, rule = (3, 1, 5), 6, Adagrad()
    manifest = with_tables(
        table(rule=rule, initializer=RandomNormal(), segments=3),
        reduction=reduction,
        consistency="sync",
    )
    random = np.random.default_rng(2)
    ids = [[random.choice(50, 20, replace=False) for _ in sizes] for _ in range(steps)]
    grads = [
        [random.standard_normal((20, 4)).astype(np.float32) for _ in sizes] for _ in range(steps)
    ]
    with cluster(num_servers=2, num_workers=3) as bed:
        clients = started(bed, manifest)

        def work(rank: int, client: PSClient) -> None:
            for step in range(steps):
                (routed,) = client.tables.route({"user": ids[step][rank]}).values()
                pushed = {"user": (routed, routed.summed(grads[step][rank]))}
                exchange(client, pushed, rows=sizes[rank])

        succeeded(run_all(*(partial(work, *pair) for pair in enumerate(clients))))
        found = clients[0].tables.lookup({"user": range(50)})["user"]
    with cluster() as bed:
        (alone,) = started(bed, with_tables(manifest.tables[0]))
        for step in range(steps):
            total = np.zeros((50, 4), np.float32)
            for rank, size in enumerate(sizes):
                weight = np.float32(size / sum(sizes) if reduction == "mean" else 1.0)
                total[ids[step][rank]] += grads[step][rank] * weight
            named = np.unique(np.concatenate(ids[step]))
            alone.tables.push({"user": (named, total[named])}, hyper=HYPER)
        assert np.array_equal(found, alone.tables.lookup({"user": range(50)})["user"])


def test_in_sync_rows_change_at_the_clock_and_next_rows_are_those_after_it():
    manifest = with_tables(table(), consistency="sync", reduction="sum", rule=ADD)
    with cluster(num_servers=2, num_workers=3) as bed:
        one, other, null = started(bed, manifest)
        looker = bed.driver()
        looker.attach()
        batches = [Rows(client, user=IDS) for client in (one, other, null)]

        def last() -> None:
            wait_until(
                lambda: all(server.stats().waiting == 2 for server in bed.servers), "two pushes"
            )
            assert not looker.tables.lookup({"user": IDS})["user"].any()
            null.push_null(next_rows=batches[2].into)

        succeeded(
            run_all(
                partial(exchange, one, batches[0].grads(), batches[0]),
                partial(exchange, other, batches[1].grads(2.0), batches[1]),
                last,
            )
        )
        for batch in batches:
            assert set(batch["user"].ravel()) == {3.0}
        for stats in one.stats():
            assert [worker.table_pushes for worker in stats.workers] == [1, 1, 0]


def test_a_table_takes_one_step_per_clock_whoever_names_it():
    """Adam's t counts steps: with two per clock the second one would be smaller."""
    manifest = with_tables(table(rule=Adam()), table("item"), consistency="sync", reduction="sum")
    with cluster(num_workers=2) as bed:
        clients = started(bed, manifest)
        for _ in range(3):
            batches = [Rows(clients[0], user=[1], item=[1]), Rows(clients[1], user=[2])]
            works = [
                partial(exchange, client, batch.grads())
                for client, batch in zip(clients, batches, strict=True)
            ]
            succeeded(run_all(*works))
        segments = bed.servers[0]._service.life.loaded().tables.tables[0].segments
        assert [segment.version for segment in segments] == [3, 3]


def test_ssp_applies_rows_at_once_and_answers_within_the_bound():
    manifest = with_tables(table(), rule=ADD, consistency="ssp", staleness_bound=0)
    with cluster(num_servers=2, num_workers=2) as bed:
        fast, slow = started(bed, manifest)
        own, others = Rows(fast, user=IDS), Rows(slow, user=IDS)

        def later() -> None:
            wait_until(lambda: all(server.stats().waiting for server in bed.servers), "a push")
            assert set(others.looked_up(slow)["user"].ravel()) == {1.0}
            exchange(slow, others.grads(2.0))

        succeeded(run_all(partial(exchange, fast, own.grads(), own), later))
        assert set(own["user"].ravel()) == {3.0}, "read when it was released"


def test_a_stale_push_slows_its_rows_as_its_groups():
    manifest = with_tables(table(rule=SGD()), consistency="async", staleness_aware=True, rule=SGD())
    with cluster(num_workers=2) as bed:
        one, other = started(bed, manifest)
        batch, values = Rows(one, user=[1]), filled(manifest)
        one.pull(values)
        other.pull(values)
        exchange(other, None)
        got = exchange(one, batch.grads(), batch)
        assert got["trainable"][0] == pytest.approx(-0.1 - 0.05)
        assert batch["user"][0, 0] == pytest.approx(-0.05)


def test_a_lookup_does_not_wait_for_a_push_of_another_thread():
    manifest = with_tables(table(), consistency="sync", rule=ADD)
    with cluster(num_servers=2, num_workers=2) as bed:
        client, other = started(bed, manifest)

        def look() -> None:
            wait_until(lambda: all(server.stats().waiting for server in bed.servers), "a push")
            assert not Rows(client, user=IDS).looked_up(client)["user"].any()
            assert all(server.stats().waiting for server in bed.servers)
            exchange(other, None)

        succeeded(run_all(partial(exchange, client, None), look))


def test_evaluation_reads_one_stated_vector_for_ids_without_a_row():
    unseen = (1.0, -2.0, 0.0, 0.5)
    manifest = with_tables(
        table("user", initializer=Constant(9.0), unseen=unseen),
        table("item", initializer=Constant(9.0)),
        table("rare", admission=Admission(min_count=2, unknown="initial"), unseen=unseen),
        rule=ADD,
    )
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        exchange(client, Rows(client, user=[1], item=[1], rare=[1]).grads())
        rows = Rows(client, user=[1, 2], item=[1, 2], rare=[1]).looked_up(client, training=False)
        assert rows["user"].tolist() == [[10.0] * 4, list(unseen)]
        assert rows["item"].tolist() == [[10.0] * 4, [0.0] * 4]
        assert rows["rare"].tolist() == [list(unseen)], "pushed, and not admitted yet"
        assert set(rows.looked_up(client)["user"][1]) == {9.0}, "as it would start"
        assert sum(stats.tables[0].rows for stats in client.stats()) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_table_may_learn_at_a_rate_of_its_own(mode: str):
    tables = [
        table(f"x{number}", SGD(), learning_rate_multiplier=number) for number in (0.0, 0.5, 1.0)
    ]
    with cluster() as bed:
        (client,) = started(bed, with_tables(*tables, rule=SGD(), **MODES[mode]))
        batch = Rows(client, **{spec.name: [1] for spec in tables}).looked_up(client)
        values = exchange(client, batch.grads(), batch)
        assert [float(batch[spec.name][0, 0]) for spec in tables] == pytest.approx(
            [0.0, -0.05, -0.1]
        )
        assert values["trainable"][0] == pytest.approx(-0.1)


def test_rows_travel_with_packed_gradients_and_with_clipping_in_two_rounds():
    packed = with_tables(table(), rule=ADD)
    groups = tuple(
        type(group)(group.name, group.dtype, group.rule, group.params, "fp16")
        for group in packed.groups
    )
    packed = type(packed)(groups=groups, tables=packed.tables, bucket_bytes=packed.bucket_bytes)
    clipped = with_tables(table(), rule=SGD(global_clipnorm=1e6), consistency="sync", size=300)
    for manifest, num_workers in ((packed, 1), (clipped, 2)):
        with cluster(num_servers=2, num_workers=num_workers) as bed:
            clients = started(bed, manifest)
            batches = [Rows(client, user=IDS) for client in clients]
            works = [
                partial(exchange, client, batch.grads(), batch)
                for client, batch in zip(clients, batches, strict=True)
            ]
            first = succeeded(run_all(*works))[0]
            assert first["trainable"].any()
            for batch in batches:
                assert set(batch["user"].ravel()) == {1.0}


# -- what is refused


def wrong_arrays(client: PSClient) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Arguments of push_pull, what they end in, and a part of its text."""
    rows = Rows(client, user=[1, 2])
    ids, values = rows.into["user"]
    read_only = values.copy()
    read_only.flags.writeable = False
    return {
        "another table": (
            {"table_grads": {"movie": (ids, values)}},
            ManifestMismatch,
            "no table 'movie'",
        ),
        "plain ids": (
            {"table_grads": {"user": ([1, 2], values)}},
            PSSettingsError,
            r"table_grads\['user'\] takes what client.tables.route returned .*, got list",
        ),
        "per id": (
            {"table_grads": {"user": (ids, ones([1, 2, 2]))}},
            ShapeError,
            r"must be float32\[2, 4\] in C order, one row per distinct id, got float32\[3, 4\]",
        ),
        "doubles": (
            {"table_grads": {"user": (ids, values.astype("f8"))}},
            ShapeError,
            r"got float64\[2, 4\]",
        ),
        "columns": (
            {"table_grads": {"user": (ids, np.asfortranarray(values))}},
            ShapeError,
            "not in C order",
        ),
        "read-only": ({"next_rows": {"user": (ids, read_only)}}, ShapeError, "and writable"),
        "no array": ({"next_rows": {"user": (ids, None)}}, ShapeError, "got NoneType"),
    }


@pytest.mark.fault("F47")
def test_wrong_arguments_are_refused_before_anything_is_sent():
    manifest = with_tables(table(), rule=ADD, consistency="sync")
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        calls = [stats.calls for stats in client.stats()]
        for arguments, error, text in wrong_arrays(client).values():
            with pytest.raises(error, match=text):
                client.push_pull(
                    filled(manifest), filled(manifest), hyper=HYPER, rows=1, **arguments
                )
            if "next_rows" in arguments:
                with pytest.raises(error, match=text):
                    client.push_null(**arguments)
                with pytest.raises(error, match=text.replace("next_rows", "into")):
                    client.tables.lookup_into(arguments["next_rows"], training=True)
        assert [stats.calls for stats in client.stats()] == [number + 1 for number in calls]
        exchange(client, None)


@pytest.mark.attack("A10")
def test_in_sync_a_push_stages_rows_within_a_limit(monkeypatch: pytest.MonkeyPatch):
    manifest = with_tables(table(), rule=ADD, consistency="sync")
    with cluster() as bed:
        (client,) = started(bed, manifest)
        batch = Rows(client, user=IDS)
        with monkeypatch.context() as patch:
            patch.setattr("ps.client.row_exchange.MAX_STAGED_BYTES", 100)
            with pytest.raises(ShapeError, match=r"ps:0 take 640 bytes.*limit is 100: push few"):
                exchange(client, batch.grads())
        with monkeypatch.context() as patch:
            patch.setattr("ps.server.row_updates.MAX_STAGED_BYTES", 100)
            with pytest.raises(ShapeError, match=r"brings 640 bytes .* the limit is 100"):
                exchange(client, batch.grads())
        exchange(client, batch.grads(), batch)
        assert set(batch["user"].ravel()) == {1.0}


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_clipped_by_their_worker_and_dense_groups_where_the_mode_says(mode: str):
    """Two workers push 4 and 0.1 twice for one id: sums of 8 and 0.2, clipped at 1."""
    rule = SGD(clipvalue=1.0)
    manifest = with_tables(table(rule=rule), rule=rule, **MODES[mode])
    with cluster(num_workers=2) as bed:

        def work(rank: int, client: PSClient) -> None:
            rows = Rows(client, user=[5, 5]).looked_up(client)
            value = (4.0, 0.1)[rank]
            sums = {"user": (rows.ids["user"], np.full((1, 4), 2 * value, np.float32))}
            exchange(client, sums, dense=value, hyper=Hyper(1.0))

        clients = started(bed, manifest)
        run = [partial(work, rank, client) for rank, client in enumerate(clients)]
        succeeded(run_all(*run))
        row = clients[0].tables.lookup({"user": [5]})["user"][0]
        dense = bed.pulled(clients[0])["trainable"]
        share = 0.5 if mode == "sync" else 1.0
        assert row.tolist() == pytest.approx([-share * (1.0 + 0.2)] * 4)
        has_barrier = mode in ("sync", "hybrid")
        assert dense.tolist() == pytest.approx([-1.0 if has_barrier else -1.1] * dense.size)


def nan_row(rows: Rows) -> dict[str, Any]:
    grads = rows.grads()
    grads["user"][1][3, 0] = np.nan
    return grads


REFUSED: dict[str, tuple[Any, Callable[[Rows], Any], type[Exception]]] = {
    "a NaN row": (table(), nan_row, NonFiniteGradient),
    "a full table": (table(max_rows=10), lambda rows: rows.grads(), TableFull),
    "an overflow": (table(rule=SGD()), lambda rows: rows.grads(3e38), NonFiniteUpdate),
}


@pytest.mark.fault("F48")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("what", REFUSED)
def test_refused_rows_leave_clocks_whole_and_the_worker_goes_on(what: str, mode: str):
    spec, grads_of, error = REFUSED[what]
    manifest = with_tables(spec, rule=ADD, **MODES[mode])
    rate = Hyper(10.0) if what == "an overflow" else HYPER
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        for _ in range(3):
            batch = Rows(client, user=IDS).looked_up(client)
            with pytest.raises(error, match="table 'user'"):
                exchange(client, grads_of(batch), batch, hyper=rate)
        for _ in range(3):
            batch = Rows(client, user=IDS[:2]).looked_up(client)
            exchange(client, batch.grads(), batch)
            assert np.isfinite(batch["user"]).all()
        if manifest.has_barrier:
            assert {description.clock for description in client.describe()} == {6}


@pytest.mark.fault("F48")
@pytest.mark.parametrize(
    ("what", "mode", "is_applied"),
    [
        ("a full table", "sync", True),
        ("an overflow", "sync", True),
        ("an overflow", "hybrid", True),
        ("a full table", "hybrid", False),  # the groups of a push that is refused on its way in
        ("a NaN row", "sync", False),
    ],
)
def test_rows_refused_before_the_norm_is_known_hold_back_no_clipped_gradient(
    what: str, mode: str, is_applied: bool, caplog: pytest.LogCaptureFixture
):
    spec, grads_of, error = REFUSED[what]
    rule = SGD(clipnorm=1.0)
    manifest = with_tables(spec, rule=rule, size=300, bucket_bytes=64, **MODES[mode])
    with cluster(num_servers=2, num_workers=2 + is_applied) as bed:
        workers = started(bed, manifest)
        clients, nulls = workers[:2], [worker.push_null for worker in workers[2:]]
        routed = clients[0].tables.route({"user": IDS})["user"]
        ids = routed.unique[
            routed.own(0)
        ]  # one server refuses, the other one has nothing to refuse
        batches = [Rows(client, user=ids).looked_up(client) for client in clients]
        following = [Rows(client, user=ids[:2]) for client in clients]
        results = run_all(
            *(
                partial(exchange, client, grads_of(batch), wanted, hyper=Hyper(10.0))
                for client, batch, wanted in zip(clients, batches, following, strict=True)
            ),
            *nulls,
        )
        assert [type(result) for result in results] == [error, error, *[Ack] * len(nulls)]
        assert all(server._service.life.loaded().reduction.is_settled for server in bed.servers)
        for client in clients:
            assert client._dense._clipped_push is not None
            assert client._dense._clipped_push.num_applied() == [int(is_applied)] * 2
        clipped = [np.full(count, -10.0 / count**0.5) for count in (100, 200)]
        found = bed.pulled(clients[0])["trainable"]
        expected = np.concatenate(clipped) if is_applied else np.zeros(300)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        pushes = [partial(exchange, client, None) for client in clients]
        values = succeeded(run_all(*pushes, *nulls))
        assert (values[0]["trainable"] < found).all(), "the next push finds the clocks whole"
    assert "is dropped" not in caplog.text


@pytest.mark.fault("F48")
def test_in_sync_a_refused_worker_counts_as_null_and_the_others_rows_are_applied():
    manifest = with_tables(table(), rule=ADD, consistency="sync", reduction="sum")
    with cluster(num_servers=2, num_workers=2) as bed:
        bad, good = started(bed, manifest)
        batches = [Rows(client, user=IDS) for client in (bad, good)]
        refused, values = run_all(
            partial(exchange, bad, nan_row(batches[0])),
            partial(exchange, good, batches[1].grads(), batches[1]),
        )
        assert isinstance(refused, NonFiniteGradient)
        found = good.tables.lookup({"user": IDS})["user"]
        is_ps0 = np.zeros(IDS.size, bool)
        routed = batches[0].ids["user"]
        is_ps0[routed.unique[routed.own(0)]] = True
        # A server whose part was whole has taken it, as it does of groups.
        assert set(found.ravel()) <= {1.0, 2.0}
        assert set(values["trainable"]) <= {1.0, 2.0}
        assert 1.0 in found


# -- hybrid


def test_the_push_that_ends_a_batch_hands_its_permit_on():
    """With one permit, whoever waits in line meanwhile."""
    manifest = with_tables(table(), rule=ADD, consistency="hybrid", staleness_bound=1)
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        batch = Rows(client, user=IDS).looked_up(client)

        def train() -> None:
            wait_until(
                lambda: all(server.stats().waiting_lookups for server in bed.servers), "a lookup"
            )
            current = batch
            for step in range(1, 4):
                following = Rows(client, user=IDS)
                exchange(client, current.grads(), following)
                assert set(following["user"].ravel()) == {step}
                current = following
            exchange(client, current.grads())

        late = Rows(client, user=IDS)
        succeeded(run_all(partial(late.looked_up, client), train))
        assert set(late["user"].ravel()) == {4.0}
        exchange(client, late.grads())


def test_batches_that_nobody_holds_any_more_give_their_permits_back():
    manifest = with_tables(table(), rule=ADD, consistency="hybrid", staleness_bound=1)
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        for _ in range(3):
            Rows(client, user=IDS).looked_up(client)
        batch = Rows(client, user=IDS).looked_up(client)
        exchange(client, batch.grads(), Rows(client, user=IDS))  # which nobody trains on
        del batch
        exchange(client, Rows(client, user=IDS).looked_up(client).grads())
        batch = Rows(client, user=IDS).looked_up(client)
        exchange(client, batch.grads())


def test_a_batch_that_is_given_up_gives_its_permit_back():
    manifest = with_tables(table(), rule=ADD, consistency="hybrid", staleness_bound=1)
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        held = [Rows(client, user=IDS) for _ in range(4)]
        for batch in held[:2]:
            batch.looked_up(client)
            client.tables.give_up(batch.ids)
            client.tables.give_up(batch.ids)
        exchange(client, None, held[2])
        client.tables.give_up(held[2].ids)
        exchange(client, held[3].looked_up(client).grads())


def test_hybrid_takes_rows_of_a_batch_only():
    manifest = with_tables(table(), rule=ADD, **MODES["hybrid"])
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        batch = Rows(client, user=IDS)
        for looked_up in (batch, batch.looked_up(client, training=False)):
            with pytest.raises(PSSettingsError, match=r"rows \(user\) only for a batch .*none is"):
                exchange(client, looked_up.grads())
        batch.looked_up(client)
        exchange(client, batch.grads())
        with pytest.raises(PSSettingsError, match="none is in progress"):
            exchange(client, batch.grads())


def test_gradients_of_several_batches_end_the_oldest_and_the_others_go_with_their_ids():
    manifest = with_tables(table(), rule=ADD, **MODES["hybrid"])
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        for step in range(3):
            held = [Rows(client, user=IDS[:20]), Rows(client, user=IDS[10:])]
            for batch in held:
                batch.looked_up(client)
            exchange(client, Rows(client, user=IDS).grads())
            assert set(
                Rows(client, user=IDS).looked_up(client, training=False)["user"].ravel()
            ) == {step + 1}
            held.clear()
            del batch


def test_the_same_ids_may_be_in_several_batches_at_once():
    """A program that trains on one batch again and again, two steps ahead."""
    manifest = with_tables(table(), rule=ADD, **MODES["hybrid"])
    with cluster(num_servers=2) as bed:
        (client,) = started(bed, manifest)
        batch = Rows(client, user=IDS).looked_up(client).looked_up(client)
        for _ in range(4):
            exchange(client, batch.grads(), batch)
        for _ in range(2):
            exchange(client, batch.grads())
        assert set(batch.looked_up(client)["user"].ravel()) == {6.0}


def test_in_hybrid_rows_change_before_the_barrier_and_groups_at_it():
    manifest = with_tables(table(), rule=ADD, reduction="sum", **MODES["hybrid"])
    with cluster(num_servers=2, num_workers=2) as bed:
        one, other = started(bed, manifest)
        batches = [Rows(client, user=IDS).looked_up(client) for client in (one, other)]
        looker = bed.driver()
        looker.attach()

        def later() -> dict[str, Array]:
            wait_until(lambda: all(server.stats().waiting for server in bed.servers), "a push")
            assert set(looker.tables.lookup({"user": IDS})["user"].ravel()) == {1.0}
            assert not bed.pulled(looker)["trainable"].any()
            return exchange(other, batches[1].grads(), batches[1])

        _, values = succeeded(
            run_all(partial(exchange, one, batches[0].grads(), batches[0]), later)
        )
        assert set(values["trainable"]) == {2.0}
        assert set(batches[1]["user"].ravel()) == {2.0}


def test_step_scalars_of_many_tables_with_long_names_fit_a_push():
    """Their names alone are more than the meta of other frames takes."""
    adam = Adam()
    specs = [table(f"{number:0512d}", adam, segments=1) for number in range(140)]
    with cluster() as bed:
        (client,) = started(bed, with_tables(*specs, rule=adam, consistency="sync"))
        last = specs[-1].name
        rows = Rows(client, **{last: [7]})
        scalars: dict[str, tuple[float, ...]] = {spec.name: (0.5,) for spec in specs}
        exchange(client, rows.grads(), hyper=Hyper(0.5, scalars))
        moved = float(rows.looked_up(client)[last][0, 0])
        assert moved == pytest.approx(-0.5 * 0.1 / (0.001**0.5), rel=1e-3), "alpha * m / sqrt(v)"
