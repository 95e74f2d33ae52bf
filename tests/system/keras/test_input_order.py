"""Features that Keras would give to each other's inputs, or leave out, are refused."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras

from tfos.errors import SettingsError
from tfos.keras.input_order import check_inputs

pytestmark = pytest.mark.tf


def column() -> Any:
    return np.zeros((8, 1), np.float32)


def of_inputs(outer: type, inner: type = dict, kind: type = keras.Model) -> keras.Model:
    user, price = keras.Input((1,)), keras.Input((1,), name="price")
    outputs = keras.layers.Dense(1)(user - price)
    return kind(outer(user=inner(z=user, a=price), price=price), outputs)


def features(kind: type = dict) -> Any:
    return kind(user=kind(z=column(), a=column()), price=column())


@pytest.mark.parametrize(
    ("outer", "inner"), [(OrderedDict, dict), (dict, OrderedDict)], ids=["outer", "inner"]
)
def test_features_that_keras_takes_in_another_order_than_the_inputs_are_refused(
    outer: type, inner: type
):
    with pytest.raises(
        SettingsError, match=r"user\.z.* each other's features\. .*each OrderedDict"
    ):
        check_inputs(of_inputs(outer, inner), features(), "train_step")


class OwnCall(keras.Model):  # type: ignore[misc]  # Keras has no types
    def call(self, inputs: Any, **options: Any) -> Any:
        return super().call(inputs, **options)


class OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


@pytest.mark.parametrize("kind", [OwnStep, OwnCall])
def test_a_model_of_the_user_may_order_the_features_itself(kind: type):
    try:
        check_inputs(of_inputs(OrderedDict, kind=kind), features(), "train_step")
    except SettingsError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize("step", ["test_step", "predict_step"])
def test_a_step_of_the_user_orders_the_features_of_its_own_loop_alone(step: str):
    """A model whose train_step orders them is evaluated and predicts by Keras' own steps."""
    with pytest.raises(SettingsError, match="each OrderedDict"):
        check_inputs(of_inputs(OrderedDict, kind=OwnStep), features(), step)
    own = type("Own", (keras.Model,), {step: lambda _, data: data})
    check_inputs(of_inputs(OrderedDict, kind=own), features(), step)


def test_features_in_the_order_of_the_inputs_are_taken():
    for kind in (dict, OrderedDict):
        check_inputs(of_inputs(kind, kind), features(kind), "train_step")
    check_inputs(of_inputs(OrderedDict), {"user": column()}, "train_step")  # for Keras to refuse


def test_an_ordered_dict_of_a_map_fn_is_refused():
    with pytest.raises(SettingsError, match=r"each OrderedDict.* in map_fn"):
        check_inputs(of_inputs(dict), features(OrderedDict), "train_step")


@pytest.mark.filterwarnings("ignore:The structure of `inputs`")
def test_a_further_feature_is_refused_where_keras_would_take_it_for_an_input():
    a, b = keras.Input((1,), name="a"), keras.Input((1,), name="b")
    made = keras.Model({"a": a, "b": b}, a * 100 + b)
    one, two, nine = (np.full((1, 1), number, np.float32) for number in (1, 2, 9))
    between = {"a": one, "aa": nine, "b": two}
    assert float(made(between)[0, 0]) == 109  # Keras' own
    with pytest.raises(SettingsError, match=r"Leave out \['aa'\], by feature_cols="):
        check_inputs(made, between, "train_step")
    last = {"a": one, "b": two, "c": nine}
    assert float(made(last)[0, 0]) == 102
    check_inputs(made, last, "train_step")


class Joined(keras.Sequential):  # type: ignore[misc]  # Keras is not checked
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return super().call(keras.ops.concatenate(inputs, -1))


class Measured(keras.Sequential):  # type: ignore[misc]  # Keras is not checked
    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return {"mean": keras.ops.mean(x[1])}


def test_several_inputs_of_a_sequential_with_one_are_refused():
    """Keras names the inputs in a warning, and trains on the first: a column was left out."""

    def one(kind: Any) -> Any:
        made = kind([keras.Input((3,)), keras.layers.Dense(1)])
        made.compile(loss="mse")
        return made

    given = (np.zeros((8, 2), np.float32), np.zeros(8, np.float32))
    sequential = one(keras.Sequential)
    with pytest.raises(SettingsError, match=r"has 2 inputs.*model has one.*np\.column_stack\(x\)"):
        check_inputs(sequential, given, "train_step")
    assert np.column_stack(given).shape == (8, 3)
    check_inputs(sequential, given[0], "train_step")
    check_inputs(sequential, given[:1], "train_step")
    layers = [keras.layers.Concatenate(), keras.layers.Dense(1)]
    for each in (one(Joined), one(Measured), keras.Sequential(layers)):
        check_inputs(each, given, "train_step")
    with pytest.raises(ValueError, match="received 2 input tensors"):  # Keras' own
        keras.Model(x := keras.Input((3,)), keras.layers.Dense(1)(x))(given)
