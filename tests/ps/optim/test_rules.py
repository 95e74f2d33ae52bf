"""Rules: each formula against double precision, and the scalars of a step."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.errors import PSSettingsError
from ps.manifest.manifest import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Add,
    AMSGrad,
    Average,
    Ftrl,
    Hyper,
    Lion,
    Nadam,
    RMSprop,
)
from ps.optim import formulas
from ps.optim.rules import adam_alpha, decays, every_rule, rule_of, scalars, step_scalars
from tests.support.update_rules import RULES, rule_id

F32 = np.dtype(np.float32)
F64 = np.dtype(np.float64)


def textbook(config, g, v, slots, learning_rate, step):
    """One step in double precision, written from the papers and not from ps.optim.formulas."""
    if config.weight_decay:
        v = v * (1 - config.weight_decay * learning_rate)
    change, slots = PAPERS[type(config)](config, g, v, slots, learning_rate, step)
    return v + change, slots


def paper_sgd(config, g, v, slots, learning_rate, step):
    if not config.momentum:
        return -learning_rate * g, []
    m = config.momentum * slots[0] - learning_rate * g
    return (config.momentum * m - learning_rate * g if config.nesterov else m), [m]


def paper_adagrad(config, g, v, slots, learning_rate, step):
    a = slots[0] + g**2
    return -learning_rate * g / np.sqrt(a + config.epsilon), [a]


def paper_rmsprop(config, g, v, slots, learning_rate, step):
    n, *rest = slots
    n = config.rho * n + (1 - config.rho) * g**2
    mean = config.rho * rest.pop() + (1 - config.rho) * g if config.centered else 0 * g
    change = learning_rate * g / np.sqrt(n - mean**2 + config.epsilon)
    if config.momentum:
        change = config.momentum * rest.pop() + change
    return -change, [n, *([change] * bool(config.momentum)), *([mean] * config.centered)]


def paper_adadelta(config, g, v, slots, learning_rate, step):
    a = config.rho * slots[0] + (1 - config.rho) * g**2
    change = -np.sqrt(slots[1] + config.epsilon) / np.sqrt(a + config.epsilon) * g
    return learning_rate * change, [a, config.rho * slots[1] + (1 - config.rho) * change**2]


def paper_adam(config, g, v, slots, learning_rate, step):
    m = config.beta_1 * slots[0] + (1 - config.beta_1) * g
    u = config.beta_2 * slots[1] + (1 - config.beta_2) * g**2
    correction = math.sqrt(1 - config.beta_2**step) / (1 - config.beta_1**step)
    after = [m, u]
    if isinstance(config, AMSGrad):
        u = np.maximum(slots[2], u)
        after.append(u)
    return -learning_rate * correction * m / (np.sqrt(u) + config.epsilon), after


def paper_adamax(config, g, v, slots, learning_rate, step):
    m = config.beta_1 * slots[0] + (1 - config.beta_1) * g
    u = np.maximum(config.beta_2 * slots[1], np.abs(g))
    return -learning_rate / (1 - config.beta_1**step) * m / (u + config.epsilon), [m, u]


def paper_nadam(config, g, v, slots, learning_rate, step):
    def mu(t):
        return config.beta_1 * (1 - 0.5 * 0.96**t)

    m = config.beta_1 * slots[0] + (1 - config.beta_1) * g
    n = config.beta_2 * slots[1] + (1 - config.beta_2) * g**2
    product = math.prod(mu(t) for t in range(1, step + 1))
    m_hat = mu(step + 1) * m / (1 - product * mu(step + 1)) + (1 - mu(step)) * g / (1 - product)
    n_hat = n / (1 - config.beta_2**step)
    return -learning_rate * m_hat / (np.sqrt(n_hat) + config.epsilon), [m, n]


def paper_ftrl(config, g, v, slots, learning_rate, step):
    n, z = slots
    power = -config.learning_rate_power
    sigma = ((n + g**2) ** power - n**power) / learning_rate
    z = z + g + 2 * config.l2_shrinkage_regularization_strength * v - sigma * v
    n = n + g**2
    l1, l2 = config.l1_regularization_strength, config.l2_regularization_strength
    weight = (config.beta + n**power) / learning_rate + 2 * l2  # Keras: beta as for power 1/2
    new = np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / weight)
    return new - v, [n, z]


def paper_lion(config, g, v, slots, learning_rate, step):
    direction = np.sign(config.beta_1 * slots[0] + (1 - config.beta_1) * g)
    return -learning_rate * direction, [config.beta_2 * slots[0] + (1 - config.beta_2) * g]


PAPERS: dict[type, Any] = {
    SGD: paper_sgd,
    Adagrad: paper_adagrad,
    RMSprop: paper_rmsprop,
    Adadelta: paper_adadelta,
    Adam: paper_adam,
    AdamW: paper_adam,
    AMSGrad: paper_adam,
    Adamax: paper_adamax,
    Nadam: paper_nadam,
    Ftrl: paper_ftrl,
    Lion: paper_lion,
}


def follows_the_paper(config, dtype, *, tolerance, steps, seed=7):
    rng = np.random.default_rng(seed)
    rule = rule_of(config)
    v = rng.standard_normal(50).astype(dtype)
    slots = [np.full(50, start, dtype) for start in rule.slot_starts]
    exact_v, exact_slots = v.astype(F64), [slot.astype(F64) for slot in slots]
    for step in range(1, steps + 1):
        g = rng.standard_normal(50).astype(dtype)
        s = scalars(config, 0.01, step, dtype)
        if decays(config):
            v, s = formulas.decay(v, *s[-2:]), s[:-2]
        out = rule.formula(g, v, *slots, *s)
        v, slots = (out[0], list(out[1:])) if rule.slots else (out, [])
        exact_v, exact_slots = textbook(config, g.astype(F64), exact_v, exact_slots, 0.01, step)
        assert v.dtype == dtype
        np.testing.assert_allclose(v, exact_v, rtol=tolerance, atol=tolerance)
    for slot, exact in zip(slots, exact_slots, strict=True):
        np.testing.assert_allclose(slot, exact, rtol=50 * tolerance, atol=tolerance)


SINGLE = 2e-6
"""Keras passes momentum, decay and betas through float32, for float64 too, and so do we."""


@pytest.mark.parametrize("config", RULES, ids=rule_id)
def test_formula_follows_the_paper(config):
    follows_the_paper(config, F32, tolerance=100 * np.finfo(F32).eps, steps=20)
    follows_the_paper(config, F64, tolerance=SINGLE, steps=20)


shares = st.floats(0, 1 - 2**-10, width=32)
small = st.floats(2**-13, 2**-7, width=32)
SETTINGS = st.one_of(
    st.builds(SGD, momentum=shares, nesterov=st.booleans(), weight_decay=st.none() | small),
    st.builds(Adagrad, epsilon=small, initial_accumulator_value=shares),
    st.builds(RMSprop, rho=shares, momentum=shares, epsilon=small, centered=st.booleans()),
    st.builds(Adadelta, rho=shares, epsilon=small),
    st.builds(Adam, beta_1=shares, beta_2=shares, epsilon=small),
    st.builds(AMSGrad, beta_1=shares, beta_2=shares, epsilon=small, weight_decay=small),
    st.builds(Adamax, beta_1=shares, beta_2=shares, epsilon=small),
    st.builds(Nadam, beta_1=shares, beta_2=shares, epsilon=small),
    st.builds(
        Ftrl,
        initial_accumulator_value=small,
        l1_regularization_strength=shares,
        l2_regularization_strength=shares,
        l2_shrinkage_regularization_strength=small,
        beta=shares,
    ),
    st.builds(Lion, beta_1=shares, beta_2=shares),
)


@given(config=SETTINGS, seed=st.integers(0, 99))
def test_formula_follows_the_paper_with_any_settings(config, seed):
    """In double precision, where a wrong term shows and rounding does not."""
    follows_the_paper(config, F64, tolerance=SINGLE, steps=3, seed=seed)


def test_average_moves_a_share_of_the_way():
    assert formulas.average(np.float32(4), np.float32(1), np.float32(3)) == 2
    assert formulas.add(np.float32(4), np.float32(1)) == 5


@pytest.mark.parametrize("config", [Average(), Add()])
def test_groups_without_descent_take_no_scalars(config):
    assert step_scalars(config, "g", Hyper(0.1), 1, F32).size == 0
    assert not decays(config)


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
    with pytest.raises(PSSettingsError, match="takes the step scalars"):
        step_scalars(config, "g", Hyper(0.1, {"g": given}), 1, F32)


@pytest.mark.parametrize("rule", every_rule(), ids=lambda rule: rule.name)
def test_every_formula_documents_source_and_slots(rule):
    text = rule.formula.__doc__
    assert "Source" in text
    assert "Slots" in text
    assert len(rule.slots) == len(rule.slot_starts)


def test_a_rule_has_as_many_scalars_as_its_formula_takes():
    for config in RULES:
        extra = 2 * decays(config)
        assert len(scalars(config, 0.1, 1, F32)) == len(rule_of(config).scalar_names) + extra


@pytest.mark.parametrize("step", [1, 2, 30, 5000])
def test_nadams_scalars_are_near_the_exact_ones(step):
    config = Nadam(beta_1=0.95)
    got = scalars(config, 0.1, step, F64)
    base, beta = float(np.float32(0.96)), float(np.float32(0.95))
    now, ahead = (beta * (1 - 0.5 * base**t) for t in (step, step + 1))
    product = math.prod(0.95 * (1 - 0.5 * 0.96**t) for t in range(1, step + 1))
    exact = [ahead, 1 - product * ahead, 1 - now, 1 - product]
    assert got[1:5] == pytest.approx(exact, rel=1e-12)
