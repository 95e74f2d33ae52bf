"""First values: Keras's distributions, from seed and id alone."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from ps.manifest.initializer_spec import Constant, RandomNormal, RandomUniform, TruncatedNormal
from ps.tables import kernels
from ps.tables.initializers import initialize, key_of, normal_quantile, recipe_of


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    kernels.warm_server(["float32"])


def made(initializer, ids, *, seed=0, dim=8):
    out = np.full((len(ids), dim), np.nan, np.float32)
    at = np.arange(len(ids))
    initialize(out, at, np.array(ids, np.int64), recipe_of(initializer, dim), key_of(seed))
    return out


@pytest.mark.parametrize(
    ("initializer", "mean", "deviation", "low", "high"),
    [
        (RandomUniform(-1.0, 3.0), 1.0, 4 / np.sqrt(12), -1.0, 3.0),
        (RandomNormal(2.0, 0.5), 2.0, 0.5, -1.0, 5.0),
        (TruncatedNormal(1.0, 2.0), 1.0, 2 * 0.87962566, -3.0, 5.0),
        (Constant(0.25), 0.25, 0.0, 0.25, 0.25),
    ],
)
def test_the_numbers_have_their_distribution(initializer, mean, deviation, low, high):
    numbers = made(initializer, range(20_000), dim=8)
    assert numbers.mean() == pytest.approx(mean, abs=0.01 + 1e-6)
    assert numbers.std() == pytest.approx(deviation, abs=0.02)
    assert low <= numbers.min() <= numbers.max() <= high
    columns = np.corrcoef(numbers[:, 0], numbers[:, 1])[0, 1] if deviation else 0.0
    rows = np.corrcoef(numbers[:-1, 0], numbers[1:, 0])[0, 1] if deviation else 0.0
    assert abs(columns) < 0.03
    assert abs(rows) < 0.03


def test_uniform_and_normal_fill_their_range_evenly():
    uniform = made(RandomUniform(0.0, 1.0), range(20_000)).ravel()
    counts = np.histogram(uniform, 20, (0, 1))[0] / uniform.size
    assert np.abs(counts - 0.05).max() < 0.004
    cdf = NormalDist().cdf
    normal = np.array([cdf(x) for x in made(RandomNormal(0.0, 1.0), range(2_000)).ravel()])
    counts = np.histogram(normal, 20, (0, 1))[0] / normal.size
    assert np.abs(counts - 0.05).max() < 0.01


def test_order_neighbours_and_width_do_not_matter():
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 100)
    at_once = made(RandomNormal(), ids)
    backwards = np.concatenate([made(RandomNormal(), [number]) for number in ids[::-1]])[::-1]
    assert np.array_equal(at_once, backwards)
    assert np.array_equal(at_once[:, :3], made(RandomNormal(), ids, dim=3))


def test_seed_and_id_both_choose():
    one = made(RandomUniform(), [1, 2, 2], seed=1)
    assert np.array_equal(one[1], one[2])
    assert not np.intersect1d(one[0], one[1]).size
    assert not np.intersect1d(one, made(RandomUniform(), [1, 2], seed=2)).size


def test_the_numbers_of_seed_5_and_id_7_never_change():
    expected = [0.031093932688236237, -0.006814733613282442, -0.04134761542081833]
    assert made(RandomUniform(), [7], seed=5, dim=3)[0].tolist() == expected


@pytest.mark.parametrize("probability", [1e-300, 1e-20, 1e-5, 0.07, 0.3, 0.5, 0.93, 1 - 1e-9])
def test_the_quantile_is_that_of_the_normal_distribution(probability: float):
    expected = NormalDist().inv_cdf(probability)
    assert normal_quantile(probability) == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_a_row_outside_is_never_written():
    out = np.zeros((2, 4), np.float32)
    at = np.array([-1, 2, 2**40, 1])
    initialize(out, at, np.arange(4), recipe_of(Constant(1.0), 9), key_of(0))
    assert out.tolist() == [[0.0] * 4, [1.0] * 4]
