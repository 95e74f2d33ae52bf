"""Staleness of rows: updates of their table between a lookup and the push for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.manifest.manifest import Hyper, WorkerRank
from ps.stats.server_stats import NUM_STALENESS_BINS
from ps.tables import deliveries
from ps.tables.deliveries import RowStaleness
from tests.support.ps_cluster import ADD, cluster, filled
from tests.support.tables import table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]

HYPER = Hyper(0.1)
IDS = np.arange(40)
A, B = WorkerRank(0), WorkerRank(1)


def found(staleness: RowStaleness) -> dict[int, int]:
    """The bins that have something."""
    assert len(staleness.bins) == NUM_STALENESS_BINS
    return {place: count for place, count in enumerate(staleness.bins) if count}


def test_updates_between_a_lookup_and_its_push_are_counted():
    made = RowStaleness()
    made.delivered(A, IDS)
    for _ in range(5):
        made.delivered(B, IDS)
        made.pushed(B, IDS)
        made.updated()
    made.pushed(A, IDS)
    assert found(made) == {0: 5, 3: 1}, "five pushes of fresh rows, one that 5 updates precede"


def test_a_push_that_no_lookup_precedes_is_not_counted():
    made = RowStaleness()
    made.pushed(A, IDS)
    made.delivered(A, IDS)
    made.pushed(B, IDS)
    made.pushed(A, IDS[:-1])
    made.delivered(A, IDS[:0])
    made.pushed(A, IDS[:0])
    assert found(made) == {}
    made.pushed(A, IDS)
    made.pushed(A, IDS)
    assert found(made) == {0: 1}, "once: a push that is sent again does not count again"


def test_batches_that_nobody_pushes_for_are_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deliveries, "MAX_OPEN", 3)
    made = RowStaleness()
    for start in range(4):
        made.delivered(A, IDS + start)
    for start in range(4):
        made.pushed(A, IDS + start)
    assert found(made) == {0: 3}
    assert made.forgotten == 1


def test_a_batch_that_is_delivered_again_is_the_newest_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deliveries, "MAX_OPEN", 3)
    made = RowStaleness()
    for start in (0, 1, 2, 0, 3):
        made.delivered(A, IDS + start)
    made.pushed(A, IDS + 1)
    assert found(made) == {}
    made.pushed(A, IDS)
    assert found(made) == {0: 1}


def test_many_workers_deliveries_are_all_known_until_their_pushes():
    made = RowStaleness()
    workers = [WorkerRank(rank) for rank in range(600)]
    for start in range(2):
        for worker in workers:
            made.delivered(worker, IDS + start)
    for start in range(2):
        for worker in workers:
            made.pushed(worker, IDS + start)
    assert found(made) == {0: 1200}
    assert made.forgotten == 0


def stale(client: PSClient) -> dict[int, int]:
    """The bins of the table of all servers."""
    (stats,) = client.stats()
    (told,) = stats.tables
    return {place: count for place, count in enumerate(told.staleness) if count}


def batch(client: PSClient, ids: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays for the rows of these ids, and gradients of ones."""
    routed = client.tables.route({"user": ids})["user"]
    rows = np.zeros((routed.unique.size, 4), np.float32)
    return {"user": (routed, rows)}, {"user": (routed, np.ones_like(rows))}


def exchange(client: PSClient, grads: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Push ones to the groups with these rows, and take the rows of the next batch."""
    ones, values = filled(client.manifest, 1.0), filled(client.manifest)
    client.push_pull(ones, values, hyper=HYPER, rows=1, table_grads=grads, next_rows=wanted)


@pytest.mark.socket
@pytest.mark.usefixtures("table_kernels_loaded")
def test_a_server_tells_how_stale_the_rows_of_its_workers_were():
    manifest = with_tables(table("user"), rule=ADD, consistency="async")
    with cluster(num_workers=2) as bed:
        slow, fast = bed.workers(manifest, filled(manifest))
        rows, grads = batch(slow, IDS)
        slow.tables.lookup_into(rows, training=True)
        slow.tables.lookup_into(batch(slow, IDS[:7])[0], training=False)
        own_rows, own_grads = batch(fast, IDS[:9])
        fast.tables.lookup_into(own_rows, training=True)
        for _ in range(3):  # each brings the rows of the next one back
            exchange(fast, own_grads, own_rows)
        assert stale(fast) == {0: 3}
        slow.tables.push(grads, hyper=HYPER)
        assert stale(fast) == {0: 3, 2: 1}, "3 updates by the other worker"
        _, evaluated = batch(slow, IDS[:7])
        slow.tables.push(evaluated, hyper=HYPER)
        assert stale(fast) == {0: 3, 2: 1}, "rows that were not looked up to train on"


@pytest.mark.socket
@pytest.mark.usefixtures("table_kernels_loaded")
def test_in_sync_rows_are_never_stale():
    manifest = with_tables(table("user"), rule=ADD, consistency="sync")
    with cluster() as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        rows, grads = batch(client, IDS)
        client.tables.lookup_into(rows, training=True)
        for _ in range(3):
            exchange(client, grads, rows)
        assert stale(client) == {0: 3}
