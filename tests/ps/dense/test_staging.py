"""Staging buffers of gradients: kept for the next push, freed once no push needs so many."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest

from ps.dense.staging import PERIOD, StagedGradient, StagingPool
from ps.manifest.manifest import Layout
from tests.support.ps_cluster import make_manifest

LAYOUT = Layout.of(make_manifest())


@pytest.fixture
def pool() -> StagingPool:
    return StagingPool(LAYOUT.buckets, lambda _: np.dtype(np.float32))


def clock(pool: StagingPool, num_workers: int) -> set[int]:
    """All workers' gradients are staged, then reduced; returns which buffers they had."""
    staged = [pool.take() for _ in range(num_workers)]
    for each in staged:
        pool.give(each)
    return set(map(id, staged))


def staged() -> set[int]:
    gc.collect()
    return {id(each) for each in gc.get_objects() if isinstance(each, StagedGradient)}


@pytest.fixture
def num_alive() -> Callable[[], int]:
    """Counts the buffers made since; other tests' errors may hold some."""
    others = staged()
    return lambda: len(staged() - others)


@pytest.mark.parametrize("num_workers", [1, 3, 40])
def test_a_steady_number_of_pushes_uses_the_same_buffers(pool: StagingPool, num_workers: int):
    first = clock(pool, num_workers)
    for _ in range(5 * PERIOD):
        assert clock(pool, num_workers) == first


def test_buffers_that_a_bad_moment_took_are_freed(pool: StagingPool, num_alive: Callable[[], int]):
    clock(pool, 12)
    assert num_alive() == 12
    for _ in range(12 * 2 * PERIOD):
        clock(pool, 2)
    assert num_alive() == 2


def test_buffers_of_pushes_that_failed_do_not_count(
    pool: StagingPool, num_alive: Callable[[], int]
):
    for _ in range(8):
        pool.take()  # its socket was cut
    clock(pool, 4)
    for _ in range(4 * 2 * PERIOD):
        clock(pool, 1)
    assert num_alive() == 1
