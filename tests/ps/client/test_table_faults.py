"""Connections cut anywhere under lookups and pushes of rows: each push is applied once."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import Adagrad, Hyper, Manifest
from tests.support.channel_proxy import Direction
from tests.support.proxied_cluster import ProxiedCluster, proxied
from tests.support.ps_cluster import run_all, succeeded
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["proxied", "table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
MANIFEST = with_tables(table("user", segments=3), table("item", dim=2))
IDS = np.arange(60)


class Attached:
    """A cluster behind cutting proxies, and attached clients that go through them."""

    def __init__(self, cluster: ProxiedCluster, manifest: Manifest) -> None:
        self.bed, self.proxies = cluster.bed, cluster.proxies
        self.clients = cluster.workers(manifest)

    def rows(self, name: str) -> np.ndarray[Any, Any]:
        """The table as somebody on a good network sees it."""
        client = self.bed.client()
        client.attach()
        return client.tables.lookup({name: IDS})[name]


@pytest.fixture
def attached(proxied: Callable[..., ProxiedCluster]) -> Callable[..., Attached]:
    def make(manifest: Manifest = MANIFEST, **settings: Any) -> Attached:
        return Attached(proxied(**settings), manifest)

    return make


def push_both(client: PSClient) -> None:
    client.tables.push({"user": (IDS, ones(IDS)), "item": (IDS, ones(IDS, dim=2))}, hyper=HYPER)


@pytest.mark.fault("F28")
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_push_cut_at_any_offset_is_applied_once(attached, direction: Direction):
    parts = attached()
    (client,) = parts.clients
    cuts = [0, 1, 47, 48, 49, *range(60, 2500, 61)] if direction == "up" else range(0, 60, 4)
    for number, offset in enumerate(cuts, 1):
        (cut,) = parts.proxies[0].plan((direction, offset))
        push_both(client)
        assert cut.fired.is_set(), f"no cut after {offset} bytes"
        assert set(parts.rows("user").ravel()) == {number}, f"cut after {offset} bytes"
        assert set(parts.rows("item").ravel()) == {number}, f"cut after {offset} bytes"
    assert client.stats()[0].workers[0].table_pushes == len(cuts)


@pytest.mark.fault("F24")
@pytest.mark.fault("F27")
@pytest.mark.parametrize("seed", range(3))
def test_many_workers_over_a_bad_network_count_exactly(attached, seed: int):
    parts = attached(num_servers=2, num_workers=4)
    choose = random.Random(seed)
    armed = []
    for proxy in parts.proxies:
        plan = [(choose.choice(("up", "down")), choose.randrange(12_000)) for _ in range(25)]
        armed += proxy.plan(*plan)

    def work(client: PSClient) -> None:
        for _ in range(20):
            client.tables.lookup({"user": IDS, "item": IDS})
            push_both(client)

    succeeded(run_all(*(partial(work, client) for client in parts.clients), timeout_s=60))
    fired = sum(cut.fired.is_set() for cut in armed)
    assert fired >= 10, f"seed {seed}: only {fired} cuts fired"
    assert set(parts.rows("user").ravel()) == set(parts.rows("item").ravel()) == {80.0}
    for stats in parts.clients[0].stats():
        assert [worker.table_pushes for worker in stats.workers] == [20] * 4


@pytest.mark.fault("F28")
def test_a_rule_with_slots_over_a_bad_network_ends_in_the_same_bits(attached):
    manifest = with_tables(table("user", Adagrad(), segments=3))
    random_numbers = np.random.default_rng(0)
    grads = random_numbers.standard_normal((15, IDS.size, 4)).astype(np.float32)

    def train(parts: Attached, cut: Callable[[int], None]) -> np.ndarray[Any, Any]:
        for step in range(15):
            cut(step)
            parts.clients[0].tables.push({"user": (IDS, grads[step])}, hyper=HYPER)
        return parts.rows("user")

    expected = train(attached(manifest), lambda _: None)
    bad = attached(manifest)
    armed = []
    got = train(bad, lambda step: armed.extend(bad.proxies[0].plan(("up", 97 * step))))
    assert all(cut.fired.is_set() for cut in armed)
    assert np.array_equal(got, expected)
