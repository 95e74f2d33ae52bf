"""The error of a step that is not finite, alone: it names where the first NaN or infinity is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from tfos.keras.step import nonfinite, variables

tf = pytest.importorskip("tensorflow")

pytestmark = pytest.mark.tf


@pytest.fixture(scope="module")
def found():
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")]
    )
    model.compile("sgd", "mse")
    return variables.collect(model, model.optimizer)


def worst(found, gradient: Any) -> str:
    parts = [tf.constant(part) for part in np.split(gradient, [5])]
    output: Any = SimpleNamespace(gradients=[parts])
    no_tables: Any = None
    return nonfinite.worst_value(found, output, no_tables, None)


def test_the_first_variable_with_bad_values_is_named_with_their_number(found):
    gradient = np.zeros(13, np.float32)  # a: 2 x 3 and 3; b: 3 x 1 and 1
    gradient[[6, 8, 12]] = np.nan, -np.inf, np.nan
    assert worst(found, gradient) == f"2 of 3 gradient values of '{found.trainable[0].names[1]}'"


def test_a_gradient_that_became_infinite_in_clipping_names_no_variable(found):
    assert worst(found, np.zeros(13, np.float32)) == "gradient values (before clipping)"


def test_the_error_says_which_step_and_what_to_do():
    error = nonfinite.error_of("7 of 9 values", num_rows=4, where="worker:1, step 3")
    text = str(error)
    for part in ("7 of 9 values of a batch of 4 rows", "worker:1, step 3", 'on_nonfinite="skip"'):
        assert part in text
