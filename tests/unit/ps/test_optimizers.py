"""Rules: each formula against double precision, and the scalars of a step."""

import math

import numpy as np
import pytest

from ps import optimizers
from ps.errors import SettingsError
from ps.optimizers import adam_alpha, decay_scalars, rule_of, step_scalars
from ps.params import SGD, Adagrad, Adam, AdamW, Add, Average, Hyper

F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)


def textbook(config, g, v, slots, learning_rate, step):
    """One step in double precision, written from the papers and not from ps.optimizers."""
    if config.weight_decay:
        v = v * (1 - config.weight_decay * learning_rate)
    if isinstance(config, Adam):
        m = config.beta_1 * slots[0] + (1 - config.beta_1) * g
        u = config.beta_2 * slots[1] + (1 - config.beta_2) * g**2
        correction = math.sqrt(1 - config.beta_2**step) / (1 - config.beta_1**step)
        return v - learning_rate * correction * m / (np.sqrt(u) + config.epsilon), [m, u]
    if isinstance(config, Adagrad):
        a = slots[0] + g**2
        return v - learning_rate * g / np.sqrt(a + config.epsilon), [a]
    if not config.momentum:
        return v - learning_rate * g, []
    m = config.momentum * slots[0] - learning_rate * g
    ahead = config.momentum * m - learning_rate * g if config.nesterov else m
    return v + ahead, [m]


DESCENTS = [
    SGD(),
    SGD(weight_decay=0.1),
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True),
    Adagrad(),
    Adam(),
    AdamW(weight_decay=0.05),
]


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("config", DESCENTS, ids=str)
def test_formula_follows_the_paper(config, dtype):
    rng = np.random.default_rng(7)
    hyper = Hyper(0.01)
    rule = rule_of(config)
    formula = getattr(optimizers, rule.name)
    v = rng.standard_normal(50).astype(dtype)
    slots = [np.full(50, rule.slot_init, dtype) for _ in rule.slots]
    exact_v, exact_slots = v.astype(F64), [slot.astype(F64) for slot in slots]
    tolerance = 30 * np.finfo(dtype).eps
    if dtype == F64:
        tolerance = 2e-6  # Keras passes momentum, decay and betas through float32, and so do we
    for step in range(1, 21):
        g = rng.standard_normal(50).astype(dtype)
        decay = decay_scalars(config, hyper, dtype)
        if decay is not None:
            v = optimizers.decay(v, *decay)
        out = formula(g, v, *slots, *step_scalars(config, "g", hyper, step, dtype))
        v, slots = (out[0], list(out[1:])) if rule.slots else (out, [])
        exact_v, exact_slots = textbook(
            config, g.astype(F64), exact_v, exact_slots, hyper.learning_rate, step
        )
        assert v.dtype == dtype
        np.testing.assert_allclose(v, exact_v, rtol=tolerance, atol=tolerance)
    for slot, exact in zip(slots, exact_slots, strict=True):
        np.testing.assert_allclose(slot, exact, rtol=50 * tolerance, atol=tolerance)


def test_average_moves_a_share_of_the_way():
    assert optimizers.average(np.float32(4), np.float32(1), np.float32(3)) == 2
    assert optimizers.add(np.float32(4), np.float32(1)) == 5


@pytest.mark.parametrize("config", [Average(), Add()])
def test_groups_without_descent_take_no_scalars(config):
    assert step_scalars(config, "g", Hyper(0.1), 1, F32).size == 0
    assert decay_scalars(config, Hyper(0.1), F32) is None


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 100_000])
def test_alpha_is_near_the_exact_one(step):
    config = Adam()
    exact = (
        0.001
        * math.sqrt(1 - float(np.float32(0.999)) ** step)
        / (1 - float(np.float32(0.9)) ** step)
    )
    assert adam_alpha(config, 0.001, step, F32) == pytest.approx(exact, rel=3e-5)
    assert adam_alpha(config, 0.001, step, F64) == pytest.approx(exact, rel=1e-12)


def test_scalars_that_came_with_the_push_replace_the_computed_ones():
    scalars = step_scalars(Adam(), "g", Hyper(0.001, {"g": (0.125,)}), 1, F32)
    assert scalars[0] == 0.125
    assert scalars[1] == np.float32(1 - 0.9)
    other = step_scalars(Adam(), "h", Hyper(0.001, {"g": (0.125,)}), 1, F32)
    assert other[0] != 0.125


@pytest.mark.parametrize(("config", "given"), [(Adam(), (1.0, 2.0)), (SGD(), (1.0,))])
def test_a_wrong_number_of_scalars_is_refused(config, given):
    with pytest.raises(SettingsError, match="takes the step scalars"):
        step_scalars(config, "g", Hyper(0.1, {"g": given}), 1, F32)


def test_every_formula_documents_source_and_slots():
    for name in ("sgd", "momentum", "nesterov", "adagrad", "adam", "average", "add"):
        text = getattr(optimizers, name).__doc__
        assert "Source:" in text
        assert "Slots:" in text
