"""What servers tell about themselves, compared with what was done to them."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ps.manifest.manifest import Hyper, WorkerRank
from tests.support.ps_cluster import ADD, cluster, filled, make_manifest, run_all, succeeded
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

HYPER = Hyper(0.5)


def test_every_request_has_its_latency_and_every_push_its_apply_time():
    manifest = make_manifest(1000, rule=ADD)
    with cluster(num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        for _ in range(5):
            client.push(filled(manifest, 1.0), hyper=HYPER, rows=4)
        bed.pulled(client)
        for stats in client.stats():
            assert stats.latency("push").count == stats.apply.count == 5
            assert 0.0 < stats.apply.total_s < stats.latency("push").total_s
            assert stats.latency("pull").count == stats.latency("seed").count == 1
            assert stats.latency("stats").count == 0  # this one is still under way
            assert stats.in_service == 1
            assert stats.calls == 1 + sum(each.count for each in stats.requests.values())
        assert all(stats.latency("stats").count == 1 for stats in client.stats())


def test_a_refused_request_counts_too_and_ends():
    manifest = make_manifest(1000, rule=ADD)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        results = run_all(partial(client.push, filled(manifest, np.nan), hyper=HYPER, rows=1))
        assert isinstance(results[0], Exception)
        (stats,) = client.stats()
        assert (stats.errors, stats.in_service) == (1, 1)
        assert stats.latency("push").count == 1


def test_who_waits_is_seen_while_it_waits_and_afterwards():
    manifest = make_manifest(1000, rule=ADD, consistency="sync")
    with cluster(num_workers=2) as bed:
        first, late = bed.workers(manifest, filled(manifest))
        push = partial(first.push, filled(manifest, 1.0), hyper=HYPER, rows=1)

        def come_late() -> None:
            wait_until(lambda: bed.servers[0].stats().waiting == 1, "worker 0 to wait")
            assert bed.servers[0].stats().in_service == 1
            assert bed.servers[0].stats().missing == (1,)
            late.push(filled(manifest, 1.0), hyper=HYPER, rows=1)

        succeeded(run_all(push, come_late))
        (stats,) = first.stats()
        assert stats.waiting == 0
        waited = {worker.worker: worker.waited_s for worker in stats.workers}
        assert waited[0] > waited.get(1, 0.0)
        assert stats.barrier_wait_s == sum(waited.values())
        assert stats.apply.count == 1


def test_statistics_of_thousands_of_workers_arrive():
    """They are larger than a frame's meta may be."""
    manifest = make_manifest(1000, rule=ADD)
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        counters = bed.servers[0]._service._counters
        for rank in range(3000):
            counters.count_push(WorkerRank(rank), rows=1 << 30, staleness=0)
        (stats,) = client.stats()
        assert len(stats.workers) == 3000
