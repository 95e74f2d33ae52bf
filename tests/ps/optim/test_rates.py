"""Every rule at every learning rate of a schedule: nothing becomes NaN or infinite unsaid."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.dense.shard import DenseShard
from ps.errors import NonFiniteUpdate
from ps.manifest.limits import MAX_SCALAR
from ps.manifest.manifest import (
    SGD,
    Add,
    Average,
    Ftrl,
    GroupSpec,
    Hyper,
    Manifest,
    ParamSpec,
    TableSpec,
)
from ps.manifest.rule_spec import Adam, RowWiseAdagrad
from ps.optim.row_rules import row_scalars, rule_of_rows
from ps.optim.rules import rule_of
from ps.tables.table import Table
from tests.support.update_rules import RULES, rule_id

pytestmark = pytest.mark.slow  # every rule's kernels
SIZE = 24
RATES = (
    *(0.0, -0.0, 5e-324, 1e-45, 1e-40, 1.17e-38, 1.2e-38, 1e-30),
    *(1e-3, 1.0, 1e12, 1e30, MAX_SCALAR, -MAX_SCALAR),
)
GRADIENTS = (0.0, 1e-40, 1e-20, 1.0, -1.0, 1e18, 1e20, -3e38)
STEPS = st.lists(
    st.tuples(st.sampled_from(RATES) | st.floats(0.0, MAX_SCALAR), st.integers(0, 2**32 - 1)),
    min_size=1,
    max_size=3,
)
ENDED = (0.0, -0.0, 5e-324, 1e-45, 1e-40)
"""Rates at the end of a schedule: 0, or 0 in float32 as kernels count."""
ROW_RULES = (*RULES, RowWiseAdagrad(), Adam(), Adam())
"""The last one counts the steps of each row."""


def shard(rule, dtype="float32"):
    group = GroupSpec("g", dtype, rule, (ParamSpec("w", (SIZE,)),))
    made = DenseShard(Manifest(groups=(group,)), rank=0, num_servers=1, num_workers=2)
    made.set_values(0, np.linspace(-2.0, 2.0, SIZE).astype(dtype))
    return made


def state(made):
    return np.array([made.values(0), *made.slots(0).values()])


def spec_of(at):
    rule, row_steps = ROW_RULES[at], at == len(ROW_RULES) - 1
    return TableSpec(name="t", dim=4, rule=rule, row_steps=row_steps, segments=1)


def table(at):
    return Table(spec_of(at), rank=0, num_servers=1)


def rows_of(made):
    return made.dump_some(0, SIZE, 1 << 20)[0].rows


def gradient_of(seed):
    return np.random.default_rng(seed).choice(np.array(GRADIENTS, np.float32), SIZE)


def left_out(update):
    """Return how many elements an update says that it has left out."""
    try:
        error = update()
    except NonFiniteUpdate as raised:
        error = raised
    return 0 if error is None else int(error.details["count"])


@pytest.mark.fault("F48")
@pytest.mark.parametrize("rule", [*RULES, Add(), Average()], ids=rule_id)
@settings(max_examples=10)
@given(steps=STEPS)
def test_no_rate_makes_a_parameter_or_slot_nonfinite(rule, steps):
    made = shard(rule)
    for rate, seed in steps:
        before = state(made)
        left = left_out(lambda r=rate, s=seed: made.apply(0, gradient_of(s), Hyper(r)))
        assert (state(made) == before).all(axis=0).sum() >= left
        assert np.isfinite(state(made)).all()


@pytest.mark.fault("F48")
@pytest.mark.parametrize("at", range(len(ROW_RULES)), ids=[rule_id(rule) for rule in ROW_RULES])
@settings(max_examples=10)
@given(steps=STEPS)
def test_no_rate_makes_a_row_nonfinite(at, steps):
    made = table(at)
    ids = np.arange(SIZE // 4)
    for rate, seed in steps:
        grads = gradient_of(seed).reshape(-1, 4)
        left = left_out(lambda r=rate, g=grads: made.push(0, ids, g, Hyper(r)))
        assert left <= SIZE
        assert np.isfinite(rows_of(made)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("rule", [SGD(momentum=0.9), Ftrl()], ids=rule_id)
def test_elements_whose_update_overflows_keep_their_numbers_and_the_others_change(rule, dtype):
    made, largest = shard(rule, dtype), float(np.finfo(dtype).max)
    gradient = np.ones(SIZE, dtype)
    gradient[[3, 9]] = largest
    before = state(made)
    with pytest.raises(NonFiniteUpdate, match=r"2 of 24 values of bucket 0 .*'w'.*keep"):
        made.apply(0, gradient, Hyper(4.0))
    kept = (state(made) == before).all(axis=0)
    assert np.flatnonzero(kept).tolist() == [3, 9]
    assert (made.step(0), made.version(0)) == (1, 2)


def test_rows_whose_own_number_overflows_keep_all_their_numbers():
    made = table(ROW_RULES.index(RowWiseAdagrad()))
    ids, grads = np.arange(3), np.ones((3, 4), np.float32)
    made.push(0, ids, grads, Hyper(0.1))
    before = rows_of(made)
    grads[1] = 1e30
    overflow = made.push(0, ids, grads, Hyper(0.1))
    assert overflow is not None
    assert re.match(r"4 of 12 values .*table 't'", overflow.message)
    changed = (rows_of(made) != before).any(axis=1)
    assert changed.tolist() == [True, False, True]


@pytest.mark.parametrize("rate", ENDED)
@pytest.mark.parametrize("rule", RULES, ids=rule_id)
def test_a_schedule_that_ends_at_zero_does_not_end_the_training(rule, rate):
    made = shard(rule)
    gradient = np.linspace(-1.0, 1.0, SIZE).astype(np.float32)
    made.apply(0, gradient, Hyper(0.01))
    before = state(made)
    made.apply(0, gradient, Hyper(rate))
    assert made.step(0) == 2
    if not rule_of(rule).name.endswith("momentum") and rule_of(rule).name != "nesterov":
        assert (made.values(0) == before[0]).all()
    if isinstance(rule, Ftrl):
        assert (state(made) == before).all()


@pytest.mark.parametrize("rate", ENDED)
@pytest.mark.parametrize("power", [-0.5, -0.8])
def test_rows_of_ftrl_stay_at_a_rate_of_zero(rate, power):
    spec = TableSpec(name="t", dim=4, rule=Ftrl(learning_rate_power=power), segments=1)
    made = Table(spec, rank=0, num_servers=1)
    ids, grads = np.arange(3), np.ones((3, 4), np.float32)
    made.check_hyper(Hyper(rate))
    made.push(0, ids, grads, Hyper(rate))
    before = rows_of(made)
    made.push(0, ids, grads, Hyper(rate))
    assert (rows_of(made) == before).all()
    made.push(0, ids, grads, Hyper(0.1))
    assert (rows_of(made) != before).all()


def test_row_scalars_of_every_rule_are_given_for_every_rate():
    for spec in map(spec_of, range(len(ROW_RULES))):
        for rate in RATES:
            assert row_scalars(spec, Hyper(rate), 1).size >= len(rule_of_rows(spec).scalar_names)
