"""Labels that Keras would broadcast over one unit are refused, and nothing else is."""

from __future__ import annotations

import dataclasses
import decimal
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras
import tensorflow as tf

from tfos.errors import SettingsError
from tfos.keras.data.label_shapes import check_has_labels, check_labels

pytestmark = pytest.mark.tf


def model(*units: int, loss: Any = "mse") -> keras.Model:
    given = keras.Input((3,))
    outputs = [keras.layers.Dense(each, name=f"out{at}")(given) for at, each in enumerate(units)]
    made = keras.Model(given, outputs[0] if len(outputs) == 1 else outputs)
    made.compile(loss=loss)
    return made


def labels(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


WIDE = r"labels of output 'out0' have the shape \[batch, 2\] and the output has \[batch, 1\]: "


def user_loss(expected: Any, found: Any) -> Any:
    return keras.ops.mean(keras.ops.square(expected - found))


class Renamed(keras.losses.MeanSquaredError):  # type: ignore[misc]  # Keras has no types
    pass


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (Renamed(), "mean_squared_error"),
        ("mse", "mean_squared_error"),
        (keras.losses.mean_absolute_error, "mean_absolute_error"),
        (keras.losses.Huber(0.5), "huber"),
        (["mse"], "mean_squared_error"),
        ({"out0": "mse"}, "mean_squared_error"),
    ],
)
def test_two_labels_of_one_unit_are_refused(loss: Any, name: str):
    with pytest.raises(SettingsError, match=rf"{WIDE}{name} would compare all 2 .* 2 units"):
        check_labels(model(1, loss=loss), labels(8, 2))


TEXT = ["0", "1"]


@pytest.mark.parametrize("given", [np.array(TEXT, object), np.array(TEXT), tf.constant(TEXT)])
@pytest.mark.parametrize("loss", ["binary_crossentropy", keras.losses.MeanSquaredError()])
def test_labels_of_text_are_refused_by_their_output(given: Any, loss: Any):
    with pytest.raises(SettingsError, match=r"'out0' are text, and .*(entropy|error) .*numbers"):
        check_labels(model(1, loss=loss), given)
    with pytest.raises(SettingsError, match="output 'out1' are text"):
        check_labels(model(1, 1, loss=loss), {"out0": labels(2), "out1": given})


class OfText(keras.losses.BinaryCrossentropy):  # type: ignore[misc]  # Keras has no types
    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        numbers = keras.ops.expand_dims(tf.strings.to_number(y_true), -1)
        return super().__call__(numbers, y_pred, sample_weight)


class OfTwo(keras.losses.MeanSquaredError):  # type: ignore[misc]  # Keras has no types
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return super().call(y_true[:, :1] * y_true[:, 1:], y_pred)


@dataclasses.dataclass
class WithoutHash:
    weight: float = 2.0

    def __call__(self, y_true: Any, y_pred: Any) -> Any:
        return self.weight * user_loss(y_true[:, :1], y_pred)


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (OfText(), tf.constant(TEXT)),
        (OfTwo(), tf.zeros((2, 2))),
        (WithoutHash(), tf.zeros((2, 2))),
    ],
)
def test_a_loss_with_a_call_of_its_own_takes_what_it_converts(loss: Any, given: Any):
    made = model(1, loss=loss)
    check_labels(made, given)
    made.train_on_batch(tf.zeros((2, 3)), given)  # so does Keras


def test_a_model_whose_compute_loss_is_replaced_is_not_compared():
    made = model(1)
    made.compute_loss = lambda x, y, found, *_, **__: keras.ops.mean(found)
    check_labels(made, tf.constant(TEXT))
    made.train_on_batch(tf.zeros((2, 3)), tf.constant(TEXT))  # so does Keras


def test_objects_that_are_no_text_are_not_called_text():
    check_labels(model(1), np.array([decimal.Decimal(1), None], object))
    check_labels(model(1), np.array([], object))
    series = pytest.importorskip("pandas").Series([1, 2], dtype=object)  # train_on_batch, eager
    check_labels(model(1), series)


@pytest.mark.parametrize(
    "given",
    [(labels(8, 2), labels(8, 1)), {"out0": labels(8, 2), "out1": labels(8)}],
    ids=["in order", "by name"],
)
def test_the_output_is_named_where_there_are_several(given: Any):
    with pytest.raises(SettingsError, match=WIDE):
        check_labels(model(1, 1), given)


@pytest.mark.parametrize("loss", ["mse", ["mse", "mse"], {"out0": "mse", "out1": user_loss}])
def test_one_array_of_labels_for_several_outputs_is_refused_with_the_argument(loss: Any):
    wanted = r"2 outputs .* \[batch, 2\]: .* label_cols=\{'out0': '…', 'out1': '…'\}"
    with pytest.raises(SettingsError, match=wanted):
        check_labels(model(1, 1, loss=loss), labels(8, 2))


def by_key() -> keras.Model:
    given = keras.Input((3,))
    made = keras.Model(given, {key: keras.layers.Dense(1)(given) for key in ("click", "buy")})
    made.compile(loss="mse")
    return made


def test_a_dict_of_outputs_is_named_by_its_keys_and_not_by_its_layers():
    with pytest.raises(SettingsError, match=r"label_cols=\{'buy': '…', 'click': '…'\}"):
        check_labels(by_key(), labels(8, 2))
    with pytest.raises(SettingsError, match=r"output 'click' have the shape \[batch, 2\]"):
        check_labels(by_key(), {"buy": labels(8), "click": labels(8, 2)})


def test_an_ordered_dict_of_outputs_keeps_its_order():
    given = keras.Input((3,))
    outputs = OrderedDict(one=keras.layers.Dense(1)(given), all=keras.layers.Dense(2)(given))
    made = keras.Model(given, outputs)
    made.compile(loss="mse")
    check_labels(made, {"all": labels(8, 2), "one": labels(8)})
    with pytest.raises(SettingsError, match=r"output 'one' have the shape \[batch, 2\]"):
        check_labels(made, {"all": labels(8, 2), "one": labels(8, 2)})


def two_of_one_layer() -> keras.Model:
    given = keras.Input((3,))
    _, *states = keras.layers.LSTM(1, return_state=True)(keras.layers.Reshape((3, 1))(given))
    made = keras.Model(given, states)
    made.compile(loss="mse")
    return made


def nested() -> keras.Model:
    given = keras.Input((3,))
    both = [keras.layers.Dense(1)(given) for _ in range(2)]
    made = keras.Model(given, {"both": both})
    made.compile(loss="mse")
    return made


@pytest.mark.parametrize("made", [two_of_one_layer, nested])
def test_outputs_that_no_dict_of_columns_can_name_get_their_labels_from_a_map_fn(made: Any):
    with pytest.raises(SettingsError, match=r"\[batch, 2\]: .* a map_fn returns them nested"):
        check_labels(made(), labels(8, 2))


def test_one_array_of_labels_is_that_of_the_one_output_with_a_loss():
    assert check_labels(model(2, 1, loss=["mse", None]), labels(8, 2))


class OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


def own_step() -> keras.Model:
    given = keras.Input((3,))
    made = OwnStep(given, keras.layers.Dense(1)(given))
    made.compile(loss="mse")
    return made


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (lambda: model(1), labels(8)),
        (lambda: model(1), labels(8, 1)),
        (lambda: model(2), labels(8, 2)),
        (lambda: model(2), labels(8, 1)),
        (lambda: model(3, loss="sparse_categorical_crossentropy"), labels(8, 1)),
        (lambda: model(1, loss=user_loss), labels(8, 2)),
        (lambda: model(1, loss=None), labels(8, 2)),
        (lambda: model(1, loss="cosine_similarity"), labels(8, 2)),
        (lambda: model(1, 1, loss={"out1": "mse"}), (labels(8, 2), labels(8))),
        (own_step, labels(8, 2)),
    ],
)
def test_what_may_be_meant_so_is_let_through(made: Any, given: Any):
    assert check_labels(made(), given)


def test_a_model_without_a_shape_is_looked_at_again():
    made = keras.Sequential([keras.layers.Dense(1)])
    made.compile(loss="mse")
    assert not check_labels(made, labels(8, 2))
    made.build((None, 3))
    with pytest.raises(SettingsError, match="shape"):
        check_labels(made, labels(8, 2))


@pytest.mark.parametrize("loss", ["mse", keras.losses.Huber(), {"out0": "mse"}])
def test_rows_without_labels_are_refused_with_the_argument(loss: Any):
    with pytest.raises(SettingsError, match=r"no labels, .* have \['x', 'price'\].*label_cols='…'"):
        check_has_labels(model(1, loss=loss), ["x", "price"], "train_step")
    with pytest.raises(SettingsError, match="the rows have values without names"):
        check_has_labels(model(1, loss=loss), [], "train_step")


def test_rows_without_labels_are_taken_where_no_loss_of_keras_compares_them():
    check_has_labels(own_step(), ["x"], "train_step")
    check_has_labels(model(1, loss=None), ["x"], "train_step")
    check_has_labels(model(1, loss=user_loss), ["x"], "train_step")
