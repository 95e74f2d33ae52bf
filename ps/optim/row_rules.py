"""Rules of table rows: the layout of a row, values, slots and numbers of the row.

Covers: from a table's settings to its rule, the width and the initial slots of a row, and the
scalars of a push. Does not: hold rows (ps.tables.segment), compile (ps.optim.kernels).
Pure; no numba, so that checkpoints can be read without it. Threads: none.

    row = | values: dim | slot: dim | slot: dim | number of the row | …
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ps.errors import PSSettingsError
from ps.manifest.manifest import Hyper
from ps.manifest.rule_spec import Adam, Moments, RowWiseAdagrad
from ps.manifest.table_spec import TableSpec
from ps.optim import formulas
from ps.optim.rules import RowPart, Rule, decay_scalars, rule_of, single, step_scalars

Array = np.ndarray[Any, Any]

_STEPS = ("steps",)
_ADAM = RowPart(formulas.adam_step, _STEPS, (0.0,), ("alpha",), "_row_steps")
_ADAMAX = RowPart(formulas.adamax_step, _STEPS, (0.0,), ("correction",), "_row_steps")


def rule_of_rows(spec: TableSpec) -> Rule:
    """Return the rule of a table's rows."""
    rule = rule_of(spec.rule)
    return counting(rule) if spec.row_steps else rule


def counting(rule: Rule) -> Rule:
    """Return the variant of a rule with moments in which each row counts its own updates.

    `t` of the rule's formula is then the number of pushes that contained the row, this one
    included.
    Slots: steps, one number per row, starts at 0; in float32 it stops at 2^24, where every power of
    a beta has vanished.
    Source: the bias correction of Kingma and Ba, Adam, ICLR 2015, per row: its moments began with
        its first push. Departure: Keras counts the optimizer's steps.
    """
    return replace(rule, row=_ADAM if rule.step_scalars == ("alpha",) else _ADAMAX, step_scalars=())


def row_width(spec: TableSpec) -> int:
    """Return the numbers of a row."""
    rule = rule_of_rows(spec)
    return spec.dim * (1 + len(rule.slots)) + len(rule.row_slots)


def row_parts(spec: TableSpec) -> dict[str, slice]:
    """Return where in a row the values ("") and each slot are, in order."""
    rule = rule_of_rows(spec)
    widths = dict.fromkeys(("", *rule.slots), spec.dim) | dict.fromkeys(rule.row_slots, 1)
    ends = np.cumsum(list(widths.values())).tolist()
    return {
        name: slice(end - width, end)
        for (name, width), end in zip(widths.items(), ends, strict=True)
    }


def row_starts(spec: TableSpec) -> Array:
    """Return the initial slots of a row: [width - dim] of the table's dtype."""
    rule = rule_of_rows(spec)
    slots = np.repeat(np.array(rule.slot_starts, spec.dtype), spec.dim)
    return np.concatenate([slots, np.array(rule.row_starts, spec.dtype)])


def row_hyper(spec: TableSpec, hyper: Hyper) -> Hyper:
    """Return the push's hyper-parameters at the table's own rate.

    Args:
        spec: the table.
        hyper: learning rate and scalars of the push.
    """
    factor = spec.learning_rate_multiplier
    if factor == 1.0:
        return hyper
    own = (hyper.scalars or {}).get(spec.name, ())
    if isinstance(spec.rule, Adam):  # whose alpha contains the rate
        own = tuple(alpha * factor for alpha in own)
    return Hyper(hyper.learning_rate * factor, {spec.name: own})


def row_scalars(spec: TableSpec, hyper: Hyper, step: int) -> Array:
    """Return the scalars of a push for the rule's kernel over rows: [num_scalars].

    Args:
        spec: the table.
        hyper: what `row_hyper` returns.
        step: pushes to the segment, this one included; the t of rules whose rows do not count.

    Raises:
        PSSettingsError: `hyper.scalars` does not fit the rule.
    """
    dtype = np.dtype(spec.dtype)
    rule, config = rule_of_rows(spec), spec.rule
    if rule.row is None:
        return step_scalars(config, spec.name, hyper, step, dtype)
    if (hyper.scalars or {}).get(spec.name):
        raise PSSettingsError(
            f"table {spec.name!r}: {rule.name} takes no step scalars: its rows have their own"
        )
    names = rule.scalar_names
    values: dict[str, float] = {"num_elements": spec.dim, "one": 1.0}
    if isinstance(config, RowWiseAdagrad):
        values["epsilon"] = config.epsilon
    if isinstance(config, Moments):
        values |= {"beta_1": single(config.beta_1), "beta_2": single(config.beta_2)}
    values |= zip(names[len(names) - len(rule.constants) :], rule.constants, strict=True)
    values["learning_rate"] = hyper.learning_rate
    return np.array(
        [*(values[name] for name in names), *decay_scalars(config, hyper.learning_rate)], dtype
    )
