"""Keys of a batch that are one of its features are that feature, and others are computed."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tfos.keras.embedding import ids_ahead, row_flow

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf


class Layer:
    table = name = "t"
    dim = 2


def record(make_keys, data):
    layer = Layer()

    def step(given):
        flow = row_flow.flow_for(layer, None)
        assert flow is not None
        flow.rows(layer, make_keys(given))

    packed = tf.nest.map_structure(
        lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), data
    )
    return ids_ahead.record(step, packed, [layer])


def recorded(make_keys, data):
    found = record(make_keys, data)
    assert found.calls[0].is_ahead
    return found.keys(data)[0]


def flat(keys):
    return np.asarray(keys).reshape(-1).astype(np.int64)


DATA = {
    "small": tf.constant([[7, -1], [5, 3]], tf.int32),
    "ids": tf.constant([[2**40, 2], [3, 4], [5, -6]], tf.int64),
    "numbers": tf.constant([[1.5], [2.5]]),
}


@pytest.mark.parametrize("name", ["ids", "small"])
def test_a_feature_as_it_is_needs_no_function(name):
    found = recorded(lambda given: tf.reshape(tf.cast(given[name], tf.int64), [-1]), DATA)
    assert found is DATA[name]
    wider = recorded(lambda given: tf.reshape(tf.expand_dims(given[name], 1), [-1]), DATA)
    assert wider is DATA[name]


@pytest.mark.parametrize(
    ("make_keys", "expected"),
    [
        (lambda given: tf.cast(given["numbers"], tf.int64)[:, 0], [1, 2]),
        (lambda given: tf.reshape(given["ids"] + 1, [-1]), [2**40 + 1, 3, 4, 5, 6, -5]),
        (lambda given: tf.reshape(tf.transpose(given["ids"]), [-1]), [2**40, 3, 5, 2, 4, -6]),
        (lambda given: given["ids"][:, 1], [2, 4, -6]),
        # 2^40 does not fit into 32 bits: the key is what the model makes of it.
        (lambda given: tf.cast(tf.cast(given["ids"], tf.int32), tf.int64)[:, 0], [0, 3, 5]),
        (
            lambda given: tf.reshape(tf.cast(tf.cast(given["ids"], tf.int32), tf.int64), [-1]),
            [0, 2, 3, 4, 5, -6],
        ),
        (
            lambda given: tf.reshape(tf.cast(tf.cast(given["small"], tf.uint8), tf.int64), [-1]),
            [7, 255, 5, 3],
        ),
    ],
)
def test_what_is_made_of_a_feature_is_computed(make_keys, expected):
    np.testing.assert_array_equal(flat(recorded(make_keys, DATA)), expected)


def with_lookup():
    layer = keras.layers.StringLookup(vocabulary=["b", "c", "a"])
    return lambda given: tf.reshape(layer(given["texts"]), [-1])


def with_tensor():
    more = tf.constant([1, 0], tf.int64)
    return lambda given: tf.reshape(given["ids"] + more, [-1])


@pytest.mark.parametrize(
    ("make_keys", "expected"),
    [
        (with_lookup(), [3, 0, 1]),
        (with_tensor(), [2**40 + 1, 2, 4, 4, 6, -6]),
    ],
)
def test_what_is_made_of_a_feature_may_need_what_the_model_has(make_keys, expected):
    """A model with a StringLookup before its Embedding ended in an error of TensorFlow's."""
    data = DATA | {"texts": tf.constant([["a"], ["z"], ["b"]])}
    np.testing.assert_array_equal(flat(recorded(make_keys, data)), expected)


def of_variable():
    moduli = tf.Variable([10, 2], dtype=tf.int64, trainable=False)
    return lambda given: tf.reshape(given["ids"] % moduli, [-1])


def of_vocabulary_that_grows():
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=-1)

    def keys(given):
        ids = tf.reshape(given["ids"], [-1])
        found = table.lookup(ids)
        table.insert(ids, ids)
        return found

    return keys


@pytest.mark.parametrize("make", [of_variable, of_vocabulary_that_grows])
def test_what_may_change_before_the_step_is_read_inside_of_it(make):
    """A callback's assignment reached the ids one batch late, and a pipeline's steps later yet."""
    (call,) = record(make(), DATA).calls
    assert not call.is_ahead
    assert "a variable, a vocabulary that may change" in call.why_inside


def test_a_check_that_the_feature_must_pass_is_kept():
    def checked(given):
        is_small = tf.reduce_all(given["ids"] < 2**62)
        with tf.control_dependencies([tf.raw_ops.Assert(condition=is_small, data=[is_small])]):
            return tf.reshape(tf.identity(given["ids"]), [-1])

    recorded(checked, DATA)
    outside = DATA | {"ids": tf.constant([[2**62 + 5, 1]], tf.int64)}
    with pytest.raises(tf.errors.InvalidArgumentError):
        recorded(checked, outside)
