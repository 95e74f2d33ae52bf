"""Pushes that take rows along: cut anywhere, saved in the middle, met by a restarted server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.errors import NonFiniteUpdate
from ps.manifest.manifest import SGD, Hyper, Manifest
from tests.ps.client.test_row_exchange import MODES, Rows, exchange
from tests.support.channel_proxy import Direction
from tests.support.proxied_cluster import ProxiedCluster, proxied
from tests.support.ps_cluster import ADD, WAIT_S, Cluster, cluster, filled, run_all, succeeded
from tests.support.tables import table, table_kernels_loaded, with_tables

__all__ = ["proxied", "table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
IDS = np.arange(60)
Array = np.ndarray[Any, Any]


def manifest_of(mode: str, **settings: Any) -> Manifest:
    two = table("user", segments=3), table("item", dim=2)
    return with_tables(*two, rule=ADD, reduction="sum", **{**MODES[mode], **settings})


def found(bed: Cluster) -> set[float]:
    """All numbers of groups and tables, as somebody on a good network sees them."""
    client = bed.client()
    client.attach()
    rows = client.tables.lookup({"user": IDS, "item": IDS})
    return set(bed.pulled(client)["trainable"]) | set(rows["user"].flat) | set(rows["item"].flat)


@pytest.mark.fault("F24")
@pytest.mark.fault("F28")
@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("mode", MODES)
def test_a_push_cut_at_any_offset_is_applied_once_and_answered_with_its_rows(
    proxied: Callable[..., ProxiedCluster], mode: str, direction: Direction
):
    made = proxied()
    (client,) = made.workers(manifest_of(mode))
    batch = Rows(client, user=IDS, item=IDS).looked_up(client)
    # Head, ids, the groups' gradient and rows; then values and rows.
    cuts = [0, 1, 48, 49, *range(60, 3700, 173)] if direction == "up" else range(0, 1650, 97)
    for number, offset in enumerate(cuts, 1):
        (cut,) = made.proxies[0].plan((direction, offset))
        values = exchange(client, batch.grads(), batch)
        assert cut.fired.is_set(), f"no cut after {offset} bytes"
        for name, array in (*values.items(), ("user", batch["user"]), ("item", batch["item"])):
            assert set(array.flat) == {number}, f"{name}, cut after {offset} bytes"
    assert found(made.bed) == {len(cuts)}
    (worker,) = client.stats()[0].workers
    assert (worker.pushes, worker.table_pushes) == (len(cuts), len(cuts))


@pytest.mark.fault("F28")
@pytest.mark.fault("F48")
@pytest.mark.parametrize("mode", MODES)
def test_an_overflow_of_rows_before_a_cut_is_told_by_the_copy_of_the_push(
    proxied: Callable[..., ProxiedCluster], mode: str
):
    """The copy does not change the segment again whose elements were left out."""
    made = proxied()
    (client,) = made.workers(with_tables(table(rule=SGD()), rule=ADD, **MODES[mode]))
    ids = np.arange(2000)
    batch = Rows(client, user=ids).looked_up(client)
    grads = batch.grads()
    first = client.tables._router("user").route(ids).inverse.argmin()
    grads["user"][1][first, 2] = 3e38
    (cut,) = made.proxy.plan(("up", 60_000))  # the second segment's gradients come last
    with pytest.raises(NonFiniteUpdate, match=r"1 of .* table 'user'"):
        exchange(client, grads, batch, hyper=Hyper(2.0))
    assert cut.fired.is_set()
    expected = np.full((ids.size, 4), -2.0, np.float32)
    expected[first, 2] = 0.0
    bystander = made.bed.client()
    bystander.attach()
    np.testing.assert_array_equal(bystander.tables.lookup({"user": ids})["user"], expected)


@pytest.mark.fault("F27")
@pytest.mark.parametrize("mode", MODES)
def test_workers_over_a_bad_network_count_exactly(
    proxied: Callable[..., ProxiedCluster], mode: str
):
    made = proxied(num_servers=2, num_workers=3)
    clients = made.workers(manifest_of(mode))
    armed = [
        cut
        for at, proxy in enumerate(made.proxies)
        for cut in proxy.plan(*[("up" if n % 3 else "down", 7 + 911 * n + at) for n in range(12)])
    ]

    def work(client: PSClient) -> None:
        batch = Rows(client, user=IDS, item=IDS).looked_up(client)
        for _ in range(12):
            exchange(client, batch.grads(), batch)
        client.tables.give_up(batch.ids)

    succeeded(run_all(*(partial(work, client) for client in clients)))
    assert sum(cut.fired.is_set() for cut in armed) >= 10
    assert found(made.bed) == {36.0}


@pytest.mark.fault("F08")
@pytest.mark.fault("F30")
@pytest.mark.parametrize("mode", MODES)
def test_a_restarted_server_lacks_exactly_the_pushes_that_it_tells(tmp_path: Path, mode: str):
    manifest = manifest_of(mode, bucket_bytes=64)
    with cluster("tcp", num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        batch = Rows(client, user=IDS, item=IDS).looked_up(client)
        for _ in range(3):
            exchange(client, batch.grads(), batch)
        client.save(tmp_path, 1)
        for _ in range(4):
            exchange(client, batch.grads(), batch)
        bed.restart(1, tmp_path)
        values = exchange(client, batch.grads(), batch)
        assert [stats.lost_updates for stats in client.stats()] == [0, 4]
        first = slice(0, client._dense.pieces[0][0].stop)
        assert set(values["trainable"][first]) == {8.0}
        assert set(values["trainable"][first.stop :]) == {4.0}
        for name, ids in batch.ids.items():
            kept, set_back = (batch.values[name][ids.own(server)] for server in (0, 1))
            assert set(kept.flat) == {8.0}
            assert set(set_back.flat) == {4.0}
        assert len({description.clock for description in client.describe()}) == 1 + (
            not manifest.has_barrier
        )


@pytest.mark.fault("F10")
@pytest.mark.parametrize("mode", MODES)
def test_a_save_holds_rows_groups_and_the_record_of_the_same_pushes(tmp_path: Path, mode: str):
    """In sync and hybrid groups are those of a clock; in sync so are rows."""
    manifest = manifest_of(mode, bucket_bytes=64)
    with cluster(num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        saver = bed.driver()
        saver.attach()
        training = threading.Barrier(3)  # a save before the first push would find no rows
        ended = threading.Event()

        def train(client: PSClient) -> None:
            batch = Rows(client, user=IDS, item=IDS).looked_up(client)
            exchange(client, batch.grads(), batch)
            training.wait(WAIT_S)
            while not ended.is_set():
                exchange(client, batch.grads(), batch)
            client.leave()

        def save() -> None:
            try:
                training.wait(WAIT_S)
                for step in range(4):
                    saver.save(tmp_path, step)
            finally:
                ended.set()

        succeeded(run_all(save, *(partial(train, client) for client in clients)))
    with cluster(num_workers=2, job=bed.credentials.cluster_id) as bed:
        client = bed.client()
        client.restore(tmp_path)
        shard = bed.servers[0]._service.life.loaded()
        dense = {float(value) for bucket in shard.dense.owned for value in bucket.values}
        rows = client.tables.lookup({"user": IDS, "item": IDS})
        of_rows = set(rows["user"].flat) | set(rows["item"].flat)
        if manifest.has_barrier:
            assert dense == {2.0 * shard.gate.clock}
        if mode == "sync":
            assert of_rows == dense
        applied = applied_by_unit(shard)
        for at, bucket in enumerate(() if manifest.has_barrier else shard.dense.owned):
            assert set(bucket.values.tolist()) == {float(applied[at])}
        for at, segment in enumerate(() if mode == "sync" else shard.tables.tables[0].segments):
            batch, _ = segment.dump(1000, 1000)
            assert set(batch.rows[:, 0].tolist()) == {float(applied[len(shard.dense.owned) + at])}


def applied_by_unit(shard: Any) -> list[int]:
    """How many pushes the record has of each bucket, then of each segment."""
    units = range(shard._log._num_units)
    cut = shard._log.snapshot()
    for unit in units:
        cut.note(unit)
    pushing = [record for record in cut.sessions() if record.updates]  # others look up
    return [
        sum(record.applied[unit] if record.applied else record.completed for record in pushing)
        for unit in units
    ]
