"""Does it learn? A convex problem whose optimum is known, in every mode, over real servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from ps.client.client import PSClient
from ps.manifest.initializer_spec import Constant
from ps.manifest.manifest import SGD, Add, GroupSpec, Hyper, Manifest, ParamSpec, TableSpec
from tests.support.ps_cluster import cluster, make_manifest, run_all, succeeded
from tests.support.tables import table_kernels_loaded

pytestmark = pytest.mark.socket

__all__ = ["table_kernels_loaded"]

Array = np.ndarray[Any, Any]
NUM_WORKERS = 3
NUM_FEATURES = 12
DECAY = 0.05
"""Of the penalty DECAY/2 * |w|^2, which makes the problem strongly convex."""


def problem() -> tuple[Array, Array]:
    random = np.random.default_rng(3)
    features = random.standard_normal((900, NUM_FEATURES)) * np.linspace(0.5, 1.5, NUM_FEATURES)
    odds = features @ random.standard_normal(NUM_FEATURES)
    return features, np.where(random.random(900) < 1 / (1 + np.exp(-odds)), 1.0, -1.0)


FEATURES, LABELS = problem()


def objective(weights: Array, features: Array = FEATURES) -> float:
    margins = LABELS * (features @ weights)
    return float(np.logaddexp(0, -margins).mean() + DECAY / 2 * weights @ weights)


def gradient(weights: Array, features: Array, labels: Array) -> Array:
    pulls = -labels / (1 + np.exp(labels * (features @ weights)))
    return features.T @ pulls / len(labels) + DECAY * weights


def optimum(features: Array) -> Array:
    """Newton's method: quadratic convergence, so a few steps end at the last bits."""
    weights = np.zeros(features.shape[1])
    for _ in range(20):
        chances = 1 / (1 + np.exp(features @ weights))
        curvature = (features.T * (chances * (1 - chances))) @ features / len(LABELS)
        curvature += DECAY * np.eye(len(weights))
        weights -= np.linalg.solve(curvature, gradient(weights, features, LABELS))
    assert np.abs(gradient(weights, features, LABELS)).max() < 1e-14
    return weights


BEST = optimum(FEATURES)


def trained(rate_at: Callable[[int], float], num_steps: int, **mode: Any) -> Array:
    """Descend with a worker per third of the rows; returns the weights."""
    params = (ParamSpec("w", (NUM_FEATURES,)),)
    manifest = Manifest(groups=(GroupSpec("g", "float64", SGD(), params),), bucket_bytes=64, **mode)
    zeros = {"g": np.zeros(NUM_FEATURES)}

    def work(rank: int, client: PSClient) -> None:
        rows = slice(rank, None, NUM_WORKERS)
        weights = {"g": np.zeros(NUM_FEATURES)}
        client.pull(weights)
        for step in range(num_steps):
            if step % 10 == 0:  # so that no worker does all of its steps while others start
                client.rendezvous(f"step {step}", b"", timeout_s=30.0)
            found = {"g": gradient(weights["g"], FEATURES[rows], LABELS[rows])}
            client.push_pull(found, weights, hyper=Hyper(rate_at(step)), rows=300)
        client.finish()

    with cluster(num_servers=2, num_workers=NUM_WORKERS) as bed:
        clients = bed.workers(manifest, zeros)
        succeeded(
            run_all(
                *(partial(work, rank, client) for rank, client in enumerate(clients)),
                timeout_s=60.0,
            )
        )
        final = {"g": np.empty(NUM_FEATURES)}
        clients[0].pull(final)
    return final["g"]


@pytest.mark.slow
def test_sync_reaches_the_optimum_of_a_convex_problem():
    weights = trained(lambda _: 2.4, 60, consistency="sync")
    assert np.linalg.norm(weights - BEST) / np.linalg.norm(BEST) < 1e-6
    assert objective(weights) / objective(BEST) - 1 < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"consistency": "async"}, id="async"),
        pytest.param(
            {"consistency": "async", "staleness_aware": True},
            marks=pytest.mark.long,
            id="async-aware",
        ),
        pytest.param(
            {"consistency": "ssp", "staleness_bound": 0}, marks=pytest.mark.long, id="ssp-0"
        ),
        pytest.param({"consistency": "ssp", "staleness_bound": 4}, id="ssp-4"),
    ],
)
def test_modes_with_stale_gradients_come_near_the_optimum(mode: dict):
    """Each worker has other rows, so a constant rate would end beside the optimum."""
    weights = trained(lambda step: 0.8 / (1 + step / 10), 200, **mode)
    assert 0 <= objective(weights) / objective(BEST) - 1 < 1e-3


NUM_USERS = 20
USERS = np.random.default_rng(5).integers(0, NUM_USERS, len(LABELS))
DESIGN = np.hstack([FEATURES, np.eye(NUM_USERS)[USERS]])
"""The same problem with a weight per user, which stands in a table."""


def trained_with_rows(num_steps: int = 150, **mode: Any) -> Array:
    """Descend in weights and rows, two batches under way; returns both."""
    params = (ParamSpec("w", (NUM_FEATURES,)),)
    group = GroupSpec("g", "float64", SGD(), params)
    users = TableSpec(name="user", dim=1, dtype="float64", rule=SGD(), initializer=Constant(0.0))
    manifest = Manifest(groups=(group,), tables=(users,), **mode)

    def work(rank: int, client: PSClient) -> None:
        rows = np.arange(rank, len(LABELS), NUM_WORKERS)
        weights = {"g": np.zeros(NUM_FEATURES)}
        ahead = client.tables.batch({"user": range(NUM_USERS)})
        for step in range(num_steps):
            batch, hyper = ahead, Hyper(3.0 / (1 + step / 25))
            ahead = client.tables.batch({"user": range(NUM_USERS)})
            known = np.concatenate([weights["g"], batch.rows["user"][:, 0]])
            found = gradient(known, DESIGN[rows], LABELS[rows])
            client.push_pull({"g": found[:NUM_FEATURES].copy()}, weights, hyper=hyper, rows=300)
            mine = found[NUM_FEATURES:, None] / NUM_WORKERS
            batch.push({"user": mine}, hyper=hyper)
        ahead.close()
        client.finish()

    with cluster(num_servers=2, num_workers=NUM_WORKERS) as bed:
        clients = bed.workers(manifest, {"g": np.zeros(NUM_FEATURES)})
        works = (partial(work, rank, client) for rank, client in enumerate(clients))
        succeeded(run_all(*works, timeout_s=60.0))
        final = {"g": np.empty(NUM_FEATURES)}
        clients[0].pull(final)
        users_found = clients[0].tables.lookup({"user": range(NUM_USERS)})["user"][:, 0]
    return np.concatenate([final["g"], users_found])


@pytest.mark.slow
@pytest.mark.usefixtures("table_kernels_loaded")
@pytest.mark.parametrize(
    "mode",
    [{"consistency": "sync"}, {"consistency": "hybrid", "staleness_bound": 2}],
    ids=["sync", "hybrid-2"],
)
def test_rows_that_are_applied_as_they_arrive_end_near_the_optimum_of_all(mode: dict):
    best = objective(optimum(DESIGN), DESIGN)
    assert 0 <= objective(trained_with_rows(**mode), DESIGN) / best - 1 < 1e-3


def test_eight_clients_lose_no_update_of_one_bucket():
    manifest = make_manifest(8, rule=Add(), bucket_bytes=64)
    assert len(manifest.groups) == 1
    with cluster("tcp", num_workers=8) as bed:
        clients = bed.workers(manifest, {"trainable": np.zeros(8, np.float32)})
        (described,) = clients[0].describe()
        assert described.num_buckets == 1

        def work(client: PSClient) -> None:
            into = {"trainable": np.zeros(8, np.float32)}
            ones = {"trainable": np.ones(8, np.float32)}
            for _ in range(40):
                client.push_pull(ones, into, hyper=Hyper(0.1), rows=1)

        succeeded(run_all(*(partial(work, client) for client in clients)))
        assert set(bed.pulled(clients[0])["trainable"]) == {320.0}
