"""Rules of tables that keep numbers of a row: against a small model in numpy, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ps.errors import PSSettingsError
from ps.manifest.manifest import (
    SGD,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AMSGrad,
    GroupSpec,
    Hyper,
    Nadam,
    ParamSpec,
    RowWiseAdagrad,
    RuleConfig,
)
from ps.optim import formulas
from ps.optim.row_rules import row_hyper, row_parts, row_scalars, row_width, rule_of_rows
from ps.optim.rules import rule_of, scalars
from ps.tables.quota import BESIDE_ROW_NBYTES, Quota
from ps.tables.routing import Router
from ps.tables.table import Table
from tests.support.tables import table, table_kernels_loaded

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("table_kernels_loaded")]  # compiles

F32 = np.float32
DIM = 4


class Model:
    """Rows in a dict, updated one by one in the dtype of the table; all start with values of 0."""

    def __init__(self, spec):
        self.spec = spec
        self.number = np.dtype(spec.dtype).type
        self.rows: dict[int, dict[str, Any]] = {}

    def row(self, number):
        if number not in self.rows:
            rule = rule_of_rows(self.spec)
            start = {"": np.zeros(self.spec.dim, self.spec.dtype)}
            for name, at in zip(rule.slots, rule.slot_starts, strict=True):
                start[name] = np.full(self.spec.dim, at, self.spec.dtype)
            for name, at in zip(rule.row_slots, rule.row_starts, strict=True):
                start[name] = self.number(at)
            self.rows[number] = start
        return self.rows[number]

    def push(self, ids, grads, rate):
        config, number = self.spec.rule, self.number
        for one, g in zip(ids, grads, strict=True):
            row = self.row(one)
            if config.weight_decay:
                row[""] = formulas.decay(row[""], number(F32(config.weight_decay)), number(rate))
            if isinstance(config, RowWiseAdagrad):
                self.rowwise(row, g, number(rate))
            else:
                self.counted(row, g, rate)

    def rowwise(self, row, g, rate):
        squares = np.add.accumulate(g * g)[-1] / self.number(self.spec.dim)
        row["accumulator"] += squares
        root = np.sqrt(row["accumulator"] + self.number(self.spec.rule.epsilon))
        row[""] = row[""] - rate * g / root

    def counted(self, row, g, rate):
        """The rule's own formula, with the scalars of the row's own step."""
        rule = rule_of(self.spec.rule)
        row["steps"] += 1
        given = scalars(self.spec.rule, rate, int(row["steps"]), np.dtype(self.spec.dtype))
        given = given[: len(rule.scalar_names)]
        kept = [row[name] for name in rule.slots]
        row[""], *kept = rule.formula(g, row[""], *kept, *given)
        row.update(zip(rule.slots, kept, strict=True))


def shares(spec, num_servers=1):
    return [Table(spec, rank=rank, num_servers=num_servers) for rank in range(num_servers)]


def push(tables, ids, grads, rate):
    routed = Router(tables[0].spec, len(tables)).route(ids)
    summed = routed.summed(grads)
    for rank, share in enumerate(tables):
        own = routed.own(rank)
        for at, part in enumerate(share.split(routed.unique[own])):
            with share.segments[at].lock:
                share.push(at, routed.unique[own][part], summed[own][part], Hyper(rate))


def rows_of(tables):
    found: dict[int, np.ndarray] = {}
    for share in tables:
        for at in range(len(share.segments)):
            batch, _ = share.dump_some(at, 1 << 40, 1 << 30)
            found.update(zip(batch.ids.tolist(), batch.rows, strict=True))
    return found


def pushes(spec, steps=8):
    """Gradients for a changing part of 12 ids, at changing rates."""
    random = np.random.default_rng(1)
    for step in range(steps):
        ids = random.permutation(12)[: 5 + step % 3]
        yield ids, random.standard_normal((ids.size, spec.dim)).astype(spec.dtype), 0.1 / (1 + step)


def train(spec, num_servers, steps=8):
    """A table after those pushes, and the model after the same."""
    tables, model = shares(spec, num_servers), Model(spec)
    for ids, grads, rate in pushes(spec, steps):
        push(tables, ids, grads, rate)
        model.push(ids.tolist(), grads, rate)
    return tables, model


COUNTED: dict[str, RuleConfig] = {
    "adam": Adam(),
    "adamw": AdamW(weight_decay=0.1),
    "amsgrad": AMSGrad(beta_1=0.8),
    "adamax": Adamax(),
}


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 7), ("float64", 3)])
def test_rowwise_adagrad_is_the_models_bit_for_bit(dtype, dim):
    spec = table(rule=RowWiseAdagrad(initial_accumulator_value=0.2), dim=dim, dtype=dtype)
    results = []
    for num_servers in (1, 3):
        tables, model = train(spec, num_servers)
        found = rows_of(tables)
        assert found.keys() == model.rows.keys()
        for one, row in found.items():
            expected = np.append(model.rows[one][""], model.rows[one]["accumulator"])
            assert row.tobytes() == expected.tobytes()
        results.append({one: row.tobytes() for one, row in found.items()})
    assert results[0] == results[1]


def test_rowwise_adagrad_of_one_number_is_adagrad():
    found = []
    for rule in (RowWiseAdagrad(), Adagrad()):
        tables = shares(table(rule=rule, dim=1))
        for each in pushes(tables[0].spec):
            push(tables, *each)
        found.append({one: row.tobytes() for one, row in rows_of(tables).items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("name", COUNTED)
def test_rows_that_count_their_own_updates_follow_the_model(name):
    """Slots bit for bit; values within the last bits of the powers, which numpy takes itself."""
    spec = table(rule=COUNTED[name], row_steps=True)
    tables, model = train(spec, 2, steps=20)
    found = rows_of(tables)
    assert found.keys() == model.rows.keys()
    assert len({row["steps"] for row in model.rows.values()}) > 3, "rows are of different ages"
    for one, row in found.items():
        for slot, place in row_parts(spec).items():
            expected = np.atleast_1d(model.rows[one][slot])
            near = 1e-6 if slot == "" else 0.0
            np.testing.assert_allclose(row[place], expected, rtol=near, atol=near, err_msg=slot)


def test_a_row_that_every_push_brings_is_as_without_counting():
    both = [table(rule=Adam(), row_steps=counts, segments=1) for counts in (True, False)]
    random = np.random.default_rng(2)
    tables = [shares(spec) for spec in both]
    for _ in range(30):
        grads = random.standard_normal((1, DIM)).astype(F32)
        for made in tables:
            push(made, [5], grads, 0.01)
    (counted,), (plain,) = (rows_of(made).values() for made in tables)
    np.testing.assert_allclose(counted[:DIM], plain[:DIM], rtol=0, atol=30 * 2e-8)
    assert counted[DIM:-1].tobytes() == plain[DIM:].tobytes()
    assert counted[-1] == 30


def test_a_late_row_moves_by_the_rate_at_its_first_push():
    """What counting is for: Adam's first step is as long as the rate, whenever it comes."""
    lengths = {}
    for counts in (True, False):
        made = shares(table(rule=Adam(), row_steps=counts, segments=1))
        for _ in range(100):
            push(made, [1], np.ones((1, DIM), F32), 0.01)
        push(made, [2], np.ones((1, DIM), F32), 0.01)
        lengths[counts] = float(-rows_of(made)[2][0])
    assert lengths[True] == pytest.approx(0.01, rel=1e-4)
    assert lengths[False] == pytest.approx(0.01 * 0.1 / 0.001**0.5 * 0.0952**0.5, rel=1e-2)


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [
        (table(rule=Adagrad(), dim=16), 32),
        (table(rule=RowWiseAdagrad(), dim=16), 17),
        (table(rule=Adam(), dim=16), 48),
        (table(rule=Adam(), dim=16, row_steps=True), 49),
    ],
    ids=lambda value: value.rule.__class__.__name__ if hasattr(value, "rule") else str(value),
)
def test_bytes_of_a_row_are_those_of_its_numbers(spec, numbers):
    assert row_width(spec) == numbers
    assert sum(part.stop - part.start for part in row_parts(spec).values()) == numbers
    (share,) = shares(spec)
    push([share], np.arange(100), np.ones((100, 16), F32), 0.1)
    segment = share.segments[0]
    assert segment.row_nbytes == 4 * numbers + 8, "and the id"
    limited = Quota(table(max_bytes=10**6), 4 * numbers, 1.0, "ps:0")
    assert limited.limit == 10**6 // (4 * numbers + BESIDE_ROW_NBYTES)


def test_nadam_of_a_table_goes_on_with_its_schedule():
    spec = table(rule=Nadam(), segments=1)
    made, rule = shares(spec), rule_of(spec.rule)
    random = np.random.default_rng(3)
    v, m, u = np.zeros((3, DIM), F32)
    for step in range(1, 6):
        g = random.standard_normal(DIM).astype(F32)
        push(made, [5], g[None], 0.01)
        v, m, u = rule.formula(g, v, m, u, *scalars(spec.rule, 0.01, step, np.dtype(F32)))
    (row,) = rows_of(made).values()
    np.testing.assert_allclose(row, np.concatenate([v, m, u]), rtol=1e-6)


def test_decay_acts_on_rows_that_a_push_brings_once_each_time():
    made = shares(table(rule=SGD(weight_decay=0.5), segments=1))
    zeros = np.zeros((1, DIM), F32)
    push(made, [1, 2], np.full((2, DIM), -1, F32), 1.0)
    push(made, [1], zeros, 0.1)
    push(made, [1], zeros, 0.1)
    found = rows_of(made)
    assert found[2].tolist() == [1.0] * DIM, "no push brought it again"
    expected = F32(1) - F32(1) * (F32(0.5) * F32(0.1))
    expected = expected - expected * (F32(0.5) * F32(0.1))
    assert found[1].tolist() == [expected] * DIM


@pytest.mark.parametrize("rule", [Adam(), AMSGrad(), Adamax()])
@pytest.mark.parametrize("multiplier", [0.0, 0.25, 1.0])
def test_a_tables_own_rate_is_the_same_with_and_without_step_scalars(rule, multiplier):
    spec = table(rule=rule, learning_rate_multiplier=multiplier)
    (name,) = rule_of(rule).step_scalars
    at = rule_of(rule).element_scalars.index(name)
    own = float(scalars(rule, 0.1, 3, np.dtype(F32))[at])
    expected, *found = (
        row_scalars(spec, row_hyper(spec, hyper), 3)
        for hyper in (Hyper(0.1), Hyper(0.1, {"user": (own,)}), Hyper(0.1, {"other": (7.0,)}))
    )
    for each in found:
        np.testing.assert_array_equal(each, expected)


def test_a_tables_own_rate_leaves_the_scalars_of_others_out():
    """There may be a thousand, and each of a push's segments asks."""
    spec = table(rule=Adam(), learning_rate_multiplier=0.5)
    brought: dict[str, tuple[float, ...]] = {f"t{number}": (7.0,) for number in range(9)}
    brought["user"] = (0.25,)
    assert row_hyper(spec, Hyper(0.5, brought)) == Hyper(0.25, {"user": (0.125,)})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: GroupSpec("g", "float32", RowWiseAdagrad(), (ParamSpec("w", (3,)),)),
            "only tables have rows",
        ),
        (
            lambda: row_scalars(
                table(rule=Adam(), row_steps=True), Hyper(0.1, {"user": (1.0,)}), 1
            ),
            "takes no step scalars",
        ),
        (lambda: SGD(ema_overwrite_frequency=3), "needs ema_momentum"),
    ],
)
def test_what_cannot_be_promised_is_refused(make, sentence):
    with pytest.raises(PSSettingsError, match=sentence):
        make()
