"""Compiled functions that are called without TensorFlow's checks get each input in its place."""

from __future__ import annotations

import numpy as np
import pytest

from tfos.keras.compiled_call import CompiledCall

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf


def called(data, function):
    specs = tf.nest.map_structure(tf.type_spec_from_value, data)
    concrete = tf.function(function, autograph=False).get_concrete_function(*specs)
    return CompiledCall(concrete), concrete


def test_nested_inputs_keep_their_places_also_those_of_one_shape():
    lists = tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 2])
    data = (
        {"z": tf.constant([1.0]), "a": (tf.constant([2.0]), lists)},
        [tf.constant([3.0]), tf.constant([4.0])],
    )

    def joined(first, second):
        return {
            "all": tf.concat([first["z"], first["a"][0], *second], 0),
            "lists": first["a"][1] + 1,
        }

    call, concrete = called(data, joined)
    for _ in range(2):
        found, expected = call(*data), concrete(*data)
        np.testing.assert_array_equal(found["all"], [1.0, 2.0, 3.0, 4.0])
        assert found["lists"].to_list() == expected["lists"].to_list() == [[1], [2, 3]]
    assert call._takes_leaves


def test_inputs_in_another_order_than_tensorflows_take_the_public_call(monkeypatch):
    data = ({"z": tf.constant([1.0]), "a": tf.constant([2.0])},)
    call, _ = called(data, lambda first: first["z"] - first["a"])
    original = tf.nest.flatten
    monkeypatch.setattr(
        tf.nest, "flatten", lambda *given, **options: original(*given, **options)[::-1]
    )
    np.testing.assert_array_equal(call(*data), [-1.0])
    assert not call._takes_leaves


def test_a_function_that_captures_variables_reads_their_newest_values():
    variable = tf.Variable(1.0)
    call, _ = called((tf.constant(2.0),), lambda given: given * variable)
    assert float(call(tf.constant(2.0))) == 2.0
    variable.assign(5.0)
    assert float(call(tf.constant(3.0))) == 15.0
