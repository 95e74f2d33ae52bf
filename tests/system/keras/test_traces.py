"""Which batches share a compiled step."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import keras
import numpy as np
import pytest

from feeding.columnar.batch import Ragged
from tfos.keras.data import tensors
from tfos.keras.step.gradients import traces

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tf


@pytest.fixture
def found():
    """Traces that number their results, and the specs of each."""
    made = []

    def trace(*specs):
        made.append(specs)
        return len(made)

    return traces.Traces(trace), made


def batch(rows=4, length=3, dtype="int64", name="ids"):
    return {name: tf.zeros([rows, length], dtype)}, tf.zeros([rows])


def test_a_kind_is_made_once_whatever_its_rows(found):
    known, _ = found
    assert [known.find(batch(rows)) for rows in (4, 4, 7, 1)] == [1, 1, 1, 1]


def test_other_dtypes_names_and_missing_parts_are_other_kinds(found):
    known, _ = found
    kinds = [batch(), batch(dtype="int32"), batch(name="others"), (*batch(), None), batch()[:1]]
    kinds.append((batch()[0], tf.constant(0.0)))
    for _ in range(2):
        assert [known.find(kind) for kind in kinds] == [1, 2, 3, 4, 5, 6]


def test_lengths_that_vary_are_left_open(found):
    known, made = found
    assert [known.find(batch(length=length)) for length in (3, 5, 9, 3, 5)] == [1, 2, 2, 1, 2]
    assert made[1][0]["ids"].shape.as_list() == [None, None]


def test_lists_are_known_again(found):
    known, _ = found
    lists = [tf.RaggedTensor.from_row_lengths(tf.range(3), own) for own in ([1, 2], [0, 3])]
    lists.append(tf.RaggedTensor.from_row_lengths(tf.range(3.0), [3]))
    lists.append(tf.RaggedTensor.from_row_lengths(tf.zeros([3, 2]), [3]))
    lists.append(tf.RaggedTensor.from_row_lengths(lists[0], [1, 1]))
    lists.append(tf.RaggedTensor.from_uniform_row_length(tf.range(4), 2))
    for _ in range(2):
        assert [known.find((each,)) for each in lists] == [1, 1, 2, 3, 4, 1]


def test_a_bounded_number_of_exact_kinds_is_remembered(found, monkeypatch):
    monkeypatch.setattr(traces, "MAX_KINDS", 3)
    known, _ = found
    for length in range(2, 20):
        assert known.find(batch(length=length)) == min(length - 1, 2)
    assert len(known._by_kind) <= 3


Pair = namedtuple("Pair", ["first", "second"])


def test_every_nesting_of_arrays_becomes_tensors():
    one, two = np.arange(3.0), np.array([[b"a"], [b"b"]])
    given = ({"x": one, "y": [two, OrderedDict(z=one)]}, Pair(one, 2.5))
    found = tensors.constant(given)
    tf.nest.assert_same_structure(given, found)
    for mine, theirs in zip(tf.nest.flatten(found), tf.nest.flatten(given), strict=True):
        assert isinstance(mine, tf.Tensor)
        np.testing.assert_array_equal(mine, theirs)
    lists = tensors.constant({"x": Ragged(one, np.array([0, 1, 3]))})["x"]
    assert lists.to_list() == [[0.0], [1.0, 2.0]]


def test_rows_are_those_of_the_first_tensor_that_has_any():
    assert tensors.num_rows((None, {"b": tf.zeros([7]), "a": tf.constant(3)})) == 7
    assert tensors.num_rows((tf.RaggedTensor.from_row_lengths(tf.range(3), [1, 2]),)) == 2
    assert tensors.num_rows((tf.constant(1.0),)) == 1


@pytest.mark.parametrize("owner", [tf.Module, keras.layers.Layer])
@pytest.mark.parametrize("held", [{"b": 7, "a": 7}, [7, 7]])
def test_batches_nested_as_the_attributes_of_modules_are_known_again(found, owner, held):
    known, _ = found
    holder = owner()
    for at in (1, 1, 2):
        each = tf.zeros([7, at])
        holder.given = dict.fromkeys(held, each) if isinstance(held, dict) else [each, each]
        assert type(holder.given) not in (dict, list)
        assert tensors.num_rows((holder.given,)) == 7
        assert known.find((holder.given,)) == at
    assert len(known._by_kind) == 2
