"""Packed gradients end in as good a model as exact ones, on a convex problem in sync mode."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.benchmarks.packed_learning import (
    KINDS,
    NUM_WORKERS,
    auc,
    generated,
    manifest,
    train,
    zeros,
)
from tests.support.ps_cluster import cluster

pytestmark = pytest.mark.socket
STEPS = 250
ROWS, HELD_OUT = generated(0, 8000), generated(1, 4000)


def trained(kind) -> np.ndarray:
    with cluster("inproc", num_workers=NUM_WORKERS) as bed:
        clients = bed.workers(manifest(kind), zeros())
        return train(clients, ROWS, STEPS, seed=0)


@pytest.fixture(scope="module")
def exact() -> np.ndarray:
    return trained("none")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_packed_gradients_end_within_a_thousandth_of_the_exact_auc(exact, kind):
    weights = trained(kind)
    assert 0.75 < auc(exact, HELD_OUT) < 0.95, "there is something to learn, and to get wrong"
    assert not np.array_equal(weights, exact)
    assert abs(auc(weights, HELD_OUT) - auc(exact, HELD_OUT)) < 0.001
