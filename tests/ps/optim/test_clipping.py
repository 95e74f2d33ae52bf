"""Clipping on flat buffers, compared with the definition in double precision."""

import itertools

import numpy as np
import pytest

from ps.errors import PSSettingsError
from ps.manifest.manifest import SGD, Adam, Average, GroupSpec, Manifest, ParamSpec
from ps.optim.clipping import Clipper, Norms, clip_of, scale_to_norm, sum_of_squares

PARAMS = (ParamSpec("a", (300, 500)), ParamSpec("none", (0,)), ParamSpec("b", (7,)))
NUM = 150_007


def manifest(rule, consistency="async", dtype="float32"):
    groups = (
        GroupSpec("trainable", dtype, rule, PARAMS),
        GroupSpec("statistics", "float32", Average(), (ParamSpec("m", (3,)),)),
    )
    return Manifest(groups=groups, consistency=consistency)


def gradients(dtype="float32", scale=1.0):
    rng = np.random.default_rng(0)
    return {
        "trainable": (rng.standard_normal(NUM) * scale).astype(dtype),
        "statistics": np.full(3, 100, np.float32),
    }


def clip(rule, consistency="async", *, num_workers=1, dtype="float32", scale=1.0):
    pushed = gradients(dtype, scale)
    out = Clipper(manifest(rule, consistency, dtype), num_workers=num_workers).clip(pushed)
    assert out["statistics"] is pushed["statistics"]
    assert pushed["trainable"].tobytes() == gradients(dtype, scale)["trainable"].tobytes()
    return pushed["trainable"], out["trainable"]


def test_of_several_settings_one_acts_in_keras_order():
    assert clip_of(SGD(clipnorm=1.0, global_clipnorm=2.0, clipvalue=3.0)) == ("clipnorm", 1.0)
    assert clip_of(SGD(global_clipnorm=2.0, clipvalue=3.0)) == ("global_clipnorm", 2.0)
    assert clip_of(SGD(clipnorm=0.0, clipvalue=3.0)) == ("clipvalue", 3.0)
    assert clip_of(Adam()) is None
    assert clip_of(Average()) is None


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_by_value(dtype):
    given, out = clip(SGD(clipvalue=0.5), dtype=dtype)
    assert out.tobytes() == np.clip(given, -0.5, 0.5).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_by_each_parameters_norm(dtype, scale):
    given, out = clip(Adam(clipnorm=1.0), dtype=dtype, scale=scale)
    exact = given.astype(np.float64)
    for part in (slice(0, 150_000), slice(150_000, None)):
        exact[part] /= max(float(np.linalg.norm(exact[part])), 1.0)
    np.testing.assert_allclose(out, exact, rtol=4 * np.finfo(dtype).eps)


@pytest.mark.parametrize("scale", [1.0, 1e-6, 0.0])
def test_by_the_global_norm(scale):
    given, out = clip(Adam(global_clipnorm=0.7), scale=scale)
    exact = given.astype(np.float64)
    exact *= 0.7 / max(float(np.linalg.norm(exact)), 0.7)
    np.testing.assert_allclose(out, exact, rtol=5e-7)


def test_without_clipping_nothing_is_copied():
    given, out = clip(Adam())
    assert out is given


def test_in_sync_mode_values_are_left_to_the_server():
    given, out = clip(SGD(clipvalue=0.5), "sync", num_workers=3)
    assert out is given


def test_norms_of_a_mean_are_left_to_the_servers():
    for rule in (SGD(clipnorm=1.0), SGD(global_clipnorm=1.0)):
        given, out = clip(rule, "sync", num_workers=2)
        assert out is given
        given, out = clip(rule, "sync", num_workers=1)
        assert np.linalg.norm(out) < np.linalg.norm(given)


@pytest.mark.parametrize("rule", [SGD(clipnorm=1.0), SGD(global_clipnorm=2.0)])
@pytest.mark.parametrize("cuts", [(1,), (150_000,), (150_001, 150_006), (7, 8, 65_536, 149_999)])
def test_pieces_on_several_servers_are_clipped_as_the_whole(rule, cuts):
    whole, expected = clip(rule)
    norms = Norms(manifest(rule, "sync"))
    borders = [0, *cuts, NUM]
    squares = norms.zeros()
    for start, stop in itertools.pairwise(borders):
        of_one_server = norms.zeros()
        norms.add(of_one_server, "trainable", start, whole[start:stop])
        squares += of_one_server
    norms.add(squares, "statistics", 0, np.ones(3, np.float32))
    np.testing.assert_allclose(squares.sum(), np.sum(whole.astype(float) ** 2))
    out = whole.copy()
    for start, stop in itertools.pairwise(borders):
        norms.scale(squares, "trainable", start, out[start:stop], out[start:stop])
    np.testing.assert_array_max_ulp(out, expected, 2)


def test_squares_that_no_gradient_has_are_refused():
    norms = Norms(manifest(SGD(clipnorm=1.0), "sync"))
    norms.check(np.array([0.0, 1.0, np.inf]))
    for wrong in (np.zeros(2), np.array([0.0, -1.0, 0.0]), np.array([0.0, np.nan, 0.0])):
        with pytest.raises(PSSettingsError, match="expected 3 sums of squares"):
            norms.check(wrong)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_nonfinite_gradient_stays_visible(value: float):
    pushed = gradients()
    pushed["trainable"][5] = value
    for rule in (SGD(clipnorm=1.0), SGD(global_clipnorm=1.0), SGD(clipvalue=1.0)):
        if rule.clipvalue and value == np.inf:
            continue  # becomes the limit, as in Keras
        out = Clipper(manifest(rule), num_workers=1).clip(pushed)["trainable"]
        assert not np.isfinite(out).all()


@pytest.mark.parametrize(("limit", "most"), [(10.0, 2e38), (10.0, 3.4e38), (1e30, 1e10)])
def test_a_huge_finite_gradient_is_clipped_and_does_not_overflow(limit: float, most: float):
    gradient = np.array([most, -most, 0.0], np.float32)
    squares = sum_of_squares(gradient)
    out = np.empty_like(gradient)
    scale_to_norm(gradient, out, squares, limit)
    expected = gradient.astype(np.float64) * (limit / max(np.sqrt(squares), limit))
    np.testing.assert_allclose(out, expected, rtol=1e-6)
