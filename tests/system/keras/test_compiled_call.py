"""Compiled functions that are called without TensorFlow's checks get each input in its place."""

from __future__ import annotations

from collections import OrderedDict

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


def test_what_is_captured_at_each_call_is_asked_for_at_each_call():
    now = [1.0]

    def work(given):
        graph = tf.compat.v1.get_default_graph()
        spec = tf.TensorSpec([], tf.float32)
        return given * graph.capture_call_time_value(lambda: tf.constant(now[0]), spec)

    call, _ = called((tf.constant(2.0),), work)
    for value in (5.0, 6.0, 7.0):
        now[0] = value
        assert float(call(tf.constant(2.0))) == 2 * value


def test_named_results_keep_their_order():
    call, concrete = called(
        (tf.constant(2.0),), lambda given: {"loss": given, "accuracy": given + 1, "b": {"z": given}}
    )
    for _ in range(2):
        assert list(call(tf.constant(2.0))) == list(concrete(tf.constant(2.0)))


@pytest.mark.parametrize(
    "result",
    [
        lambda given: {"loss": given, "accuracy": given + 1},
        lambda given: OrderedDict(loss=given, accuracy=given + 1, z=given + 2),  # sorted by one
        lambda given: {"b": tf.SparseTensor([[0]], [given], [1]), "a": given},
    ],
    ids=["dict", "ordered dict", "composite"],
)
def test_every_call_gives_the_results_by_the_names_that_the_function_gives(result):
    call, concrete = called((tf.constant(2.0),), result)
    for given in (2.0, 3.0):
        found, expected = call(tf.constant(given)), concrete(tf.constant(given))
        tf.nest.assert_same_structure(found, expected, expand_composites=True)
        pairs = (tf.nest.flatten(each, expand_composites=True) for each in (found, expected))
        assert all(np.array_equal(*pair) for pair in zip(*pairs, strict=True))


def test_the_calling_thread_gives_what_tensorflows_threads_give():
    given = tf.random.stateless_normal([64, 64], [1, 2])
    variable = tf.Variable(given)

    def work(first):
        variable.assign_add(first)
        return {"b": first @ variable, "a": [tf.reduce_sum(first), None]}

    concrete = tf.function(work).get_concrete_function(given)
    found = []
    for in_this_thread in (False, True):
        variable.assign(given)
        call = CompiledCall(concrete, in_this_thread=in_this_thread)
        found.append([call(given) for _ in range(3)])
    for several, one in zip(*found, strict=True):
        np.testing.assert_array_equal(several["b"], one["b"])
        np.testing.assert_array_equal(several["a"][0], one["a"][0])
        assert one["a"][1] is None


def test_an_operation_that_fails_is_named_as_by_tensorflow():
    def work(first):
        return tf.debugging.check_numerics(first, "a bad number", name="looked_at")

    call = CompiledCall(tf.function(work).get_concrete_function(tf.TensorSpec([None], tf.float32)))
    call(tf.constant([1.0]))
    with pytest.raises(tf.errors.InvalidArgumentError) as found:
        call(tf.constant([np.nan]))
    for part in ("Graph execution error", "looked_at", "a bad number"):
        assert part in str(found.value)
