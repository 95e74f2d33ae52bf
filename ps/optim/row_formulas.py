"""Formulas of tables that keep numbers of a row, beside those of its elements.

Covers: what is computed once per row and push, before the elements' formula, and the one formula
that dense groups do not have.
Does not: loop over rows (ps.optim.codegen), know settings (ps.optim.row_rules).
Pure; no numba here. Operands are as in ps.optim.formulas; a number of a row is of the table's
dtype, and g, where a function takes it, is the row's whole gradient, 1-d.
"""

from __future__ import annotations

import numpy as np

from ps.optim.formulas import Scalar, Two


def rowwise_adagrad(g: Scalar, v: Scalar, learning_rate: Scalar, root: Scalar) -> Scalar:
    """`a += mean(g * g); v -= learning_rate * g / sqrt(a + epsilon)`, the mean over the row.

    Slots: none of the elements; a, one number per row, starts at `initial_accumulator_value`. The
    root comes from `mean_square_root`.
    Source: Naumov et al., Deep Learning Recommendation Model, 2019; exact row-wise Adagrad of
    FBGEMM's table batched embeddings. Departures: epsilon stands inside the root and a starts above
    0, as in Keras's Adagrad: a table with dim 1 is Adagrad bit for bit.
    """
    return v - (learning_rate * g) / root


def mean_square_root(g: Scalar, a: Scalar, num_elements: Scalar, epsilon: Scalar) -> Two:
    """`a += mean(g * g)`; returns a and the root of `a + epsilon`.

    The sum goes through the row in order, so that its bits depend on the row alone.
    """
    total = g[0] * g[0]
    for i in range(1, g.size):
        total = total + g[i] * g[i]
    a = a + total / num_elements
    return a, np.sqrt(a + epsilon)


def adam_step(t: Scalar, one: Scalar, learning_rate: Scalar, beta_1: Scalar, beta_2: Scalar) -> Two:
    """`t += 1`; returns t and Adam's `learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t)`."""
    t = t + one
    return t, learning_rate * np.sqrt(one - beta_2**t) / (one - beta_1**t)


def adamax_step(t: Scalar, one: Scalar, beta_1: Scalar) -> Two:
    """`t += 1`; returns t and Adamax's `1 - beta_1^t`."""
    t = t + one
    return t, one - beta_1**t
