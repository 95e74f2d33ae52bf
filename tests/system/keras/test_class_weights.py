"""Class weights of batches: the numbers of Keras, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfos.errors import SettingsError
from tfos.keras.data.class_weights import ClassWeights

pytestmark = pytest.mark.tf

X = np.zeros((4, 2), np.float32)
WEIGHTS = st.dictionaries(st.integers(-3, 6), st.floats(0, 10), max_size=8)


@given(
    WEIGHTS,
    st.lists(st.integers(-5, 9), max_size=30),
    st.sampled_from(["int64", "int8", "float32", "float64"]),
    st.booleans(),
)
def test_weights_of_numbers_are_those_of_keras(class_weight, classes, dtype, is_column):
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    y = np.array(classes, dtype)
    if dtype.startswith("float"):
        y = y + np.where(np.arange(y.size) % 2, 0.3, -0.3).astype(dtype)  # Keras rounds
    y = y[:, None] if is_column else y
    expected = class_weight_to_sample_weights(y, class_weight)
    x, same, weights = ClassWeights(class_weight)((X, y))
    assert x is X
    assert same is y
    np.testing.assert_array_equal(weights, expected)
    assert weights.dtype == expected.dtype


@given(WEIGHTS, st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_weights_of_one_hot_rows_are_those_of_keras(class_weight, classes):
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    y = np.eye(5, dtype=np.float32)[classes]
    weights = ClassWeights(class_weight)((X, y))[2]
    np.testing.assert_array_equal(weights, class_weight_to_sample_weights(y, class_weight))


def test_sample_weights_are_multiplied():
    y = np.array([0, 1, 1, 2])
    own = np.array([1, 2, 0.5, 3], np.float32)
    for given_weights in (own, own[:, None]):
        weights = ClassWeights({0: 0.5, 1: 4.0})((X, y, given_weights))[2]
        np.testing.assert_array_equal(weights, np.array([0.5, 8, 2, 3], np.float32))


@pytest.mark.parametrize(
    ("given_weights", "match"),
    [
        ("balanced", "a dict from class to weight .*got 'balanced'"),
        ([0.5, 2.0], "a dict from class to weight"),
        ({"yes": 2.0}, "class 'yes'.*must be an int"),
        ({0.5: 2.0}, "class 0.5.*must be an int"),
        ({True: 2.0}, "class True.*must be an int"),
        ({0: "2"}, "weight of class 0 .*'2'"),
        ({0: float("nan")}, "weight of class 0 .*nan"),
        ({0: {1: 2.0}}, "weight of class 0"),
    ],
)
def test_impossible_weights_are_refused(given_weights, match):
    with pytest.raises(SettingsError, match=match):
        ClassWeights(given_weights)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((X,), "the rows have no labels"),
        ((X, (X, X)), "2 outputs"),
        ((X, {"a": X, "b": X}), "2 outputs"),
        ((X, np.array(["a", "b", "c", "d"], object)), "but these are text"),
        ((X, np.zeros(4), np.ones((4, 3))), r"\(4, 3\).*\(4,\)"),
        ((X, np.zeros(4), {"a": np.ones(4)}), "sample weights are dict"),
    ],
)
def test_batches_without_one_output_are_refused(batch, match):
    with pytest.raises(SettingsError, match=match):
        ClassWeights({0: 2.0})(batch)
