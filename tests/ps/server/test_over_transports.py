"""Values cross every transport whole: the rest of ps is tested over memory alone.

What a transport owes its users is in tests/contracts/test_transport.py. Here servers and clients
use it as they do in a cluster: answers in many parts, rows, a barrier, and refusals.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ps.errors import ManifestMismatch, RoleError
from ps.manifest.manifest import Hyper
from tests.support.ps_cluster import (
    ADD,
    cluster,
    filled,
    make_manifest,
    random_arrays,
    run_all,
    succeeded,
)
from tests.support.tables import ones, table, table_kernels_loaded, with_tables

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.socket, pytest.mark.usefixtures("table_kernels_loaded")]

HYPER = Hyper(0.1)
WAYS: dict[str, dict[str, Any]] = {
    "tcp": {"transport": "tcp"},
    "tcp with a code for every byte": {"transport": "tcp", "integrity": "payload"},
    "shared memory": {"transport": "shm"},
    "tls": {"transport": "tls"},
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    return WAYS[request.param]


def test_parts_of_a_large_answer_arrive_whole_and_in_place(way: dict[str, Any]):
    """12 MB are several reads, and several parts of each server's reply."""
    manifest = make_manifest(3_000_000, rule=ADD, bucket_bytes=262_144)
    with cluster(**way, num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        grads, into = random_arrays(manifest, 1), filled(manifest)
        client.push_pull(grads, into, hyper=HYPER, rows=1)
        assert np.array_equal(into["trainable"], grads["trainable"])
        assert np.array_equal(bed.pulled(client)["trainable"], grads["trainable"])


def test_rows_arrive_under_their_ids(way: dict[str, Any]):
    manifest = with_tables(table(rule=ADD))
    with cluster(**way, num_servers=2) as bed:
        (client,) = bed.workers(manifest, filled(manifest))
        ids = np.arange(500)
        before = client.tables.lookup({"user": ids})["user"]
        client.tables.push({"user": (ids, ones(ids))}, hyper=HYPER)
        assert np.array_equal(client.tables.lookup({"user": ids})["user"], before + 1)


def test_a_barrier_of_two_workers_equals_numpy_bit_for_bit(way: dict[str, Any]):
    manifest = make_manifest(consistency="sync", reduction="sum")
    with cluster(**way, num_servers=2, num_workers=2) as bed:
        clients = bed.workers(manifest, filled(manifest))
        expected = filled(manifest)["trainable"]
        into = [filled(manifest) for _ in clients]
        for step in range(3):
            grads = [random_arrays(manifest, 10 * step + rank) for rank in range(2)]
            works = [
                partial(client.push_pull, grads[rank], into[rank], hyper=HYPER, rows=1)
                for rank, client in enumerate(clients)
            ]
            succeeded(run_all(*works))
            expected -= (grads[0]["trainable"] + grads[1]["trainable"]) * np.float32(0.1)
        assert all(np.array_equal(pulled["trainable"], expected) for pulled in into)


@pytest.mark.attack("A15")
def test_roles_and_the_size_of_the_cluster_are_checked(way: dict[str, Any]):
    manifest = make_manifest()
    with cluster(**way, num_servers=2, num_workers=2) as bed:
        _, other = bed.workers(manifest, filled(manifest))
        with pytest.raises(RoleError, match="may not call"):
            other.assign(filled(manifest))
        with pytest.raises(ManifestMismatch, match="2 servers and 2 workers"):
            bed.client(endpoints=bed.endpoints[:1]).attach()
