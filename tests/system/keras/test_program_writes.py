"""ProgramWrites: which assignments are noted, and that copies of a variable are plain."""

from __future__ import annotations

import copy
import pickle

import keras
import numpy as np
import pytest

from tfos.keras.step.exchange.program_writes import ProgramWrites

pytestmark = pytest.mark.tf


@pytest.fixture
def layer():
    made = keras.layers.Dense(1)
    made.build((None, 2))
    return made


@pytest.mark.parametrize(
    "write",
    [
        lambda layer: layer.kernel.assign([[1.0], [2.0]]),
        lambda layer: layer.bias.assign_add([1.0]),
        lambda layer: layer.bias.assign_sub([1.0]),
        lambda layer: layer.set_weights(layer.get_weights()),
    ],
)
def test_what_keras_assigns_is_noted_for_the_newest_of_two_models(layer, write):
    older, newer = (ProgramWrites(layer.trainable_variables) for _ in range(2))
    layer.kernel.value.assign([[3.0], [4.0]])  # as an answer of the servers is
    np.testing.assert_array_equal(layer(np.ones((1, 2))), [[7.0]])
    assert not newer.were_made
    write(layer)
    assert (older.were_made, newer.were_made) == (False, True)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_a_copy_of_a_variable_is_one_of_keras_alone(layer, copied):
    kind = type(layer.kernel)
    writes = ProgramWrites(layer.trainable_variables)
    assert isinstance(layer.kernel, kind)
    made = copied(layer.kernel)
    assert type(made) is kind
    np.testing.assert_array_equal(made, layer.kernel)
    before = layer.kernel.numpy()
    made.assign(made + 1)
    assert not writes.were_made
    if copied is not copy.copy:  # that shares the values
        np.testing.assert_array_equal(layer.kernel, before)
