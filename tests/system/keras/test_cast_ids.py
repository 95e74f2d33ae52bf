"""Ids that Keras would change on their way to a layer: refused in each way to run a model."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tfos.errors import UnsupportedModel
from tfos.keras import Embedding

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

IDS = np.array([2**24 + 1, 2**24 + 3, 5, 7])
LABELS = np.ones((4, 1), "float32")


class Rows:
    """A source in which the row of key k is [k]."""

    def rows(self, table, keys, *, training=False):
        return keys.astype("float32")[:, None]

    def dump(self, table, limit_bytes):
        return None


def model_of(dtype="int64", shape=(), between=lambda ids: ids):
    user = keras.Input(shape, dtype=dtype, name="user")
    layer = Embedding(1, table="user")
    layer.bind(Rows())
    model = keras.Model(user, layer(between(user)))
    model.compile("sgd", "mse")
    return model


RUNS = {
    "fit": lambda model, ids: model.fit(ids, LABELS, verbose=0),
    "evaluate": lambda model, ids: model.evaluate(ids, LABELS, verbose=0),
    "predict": lambda model, ids: model.predict(ids, verbose=0),
    "predict_on_batch": lambda model, ids: model.predict_on_batch(ids),
    "test_on_batch": lambda model, ids: model.test_on_batch(ids, LABELS),
    "train_on_batch": lambda model, ids: model.train_on_batch(ids, LABELS),
    "call": lambda model, ids: model(tf.constant(ids)),
    "validation": lambda model, ids: model.fit(
        ids.astype("int64"), LABELS, verbose=0, validation_data=(ids, LABELS)
    ),
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.long] * (way != "fit")) for way in RUNS]
)
def test_floats_for_a_sequential_model_are_refused_too(way):
    model = keras.Sequential([keras.Input((1,), dtype="int64", name="user"), Embedding(1)])
    model.compile("sgd", "mse")
    with pytest.raises(
        UnsupportedModel, match=r"^feature 'user' has float32 numbers.* int64 of the model"
    ):
        RUNS[way](model, IDS.astype("float32")[:, None])


@pytest.mark.fault("F49")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.long] * (way not in ("fit", "predict", "call")))
        for way in RUNS
    ],
)
def test_floats_for_an_input_of_integers_are_refused_in_each_way_to_run(way):
    with pytest.raises(
        UnsupportedModel, match=r"^feature 'user' has float32 numbers.* int64 of the model"
    ):
        RUNS[way](model_of(), IDS.astype("float32"))


@pytest.mark.fault("F49")
@pytest.mark.parametrize("way", ["predict_on_batch", "train_on_batch", "call"])
@pytest.mark.parametrize("dtype", ["complex64", "str"])
def test_what_no_integer_is_made_of_is_refused_by_name(way, dtype):
    """Keras would drop the imaginary part, and complex64 rounds as float32 does."""
    with pytest.raises(UnsupportedModel, match=r"'user' has (complex64|string) values.* of int64"):
        RUNS[way](model_of(), IDS.astype(dtype))


@pytest.mark.parametrize("way", ["fit", "predict", "call"])
def test_integers_that_a_narrower_input_cannot_hold_are_refused(way):
    model = model_of("int32")
    assert RUNS[way](model, np.array([1, 2, 3, 2**31 - 1])) is not None
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"int64 numbers outside of -2147483"):
        RUNS[way](model, np.array([2**32 + 5, 5, 6, 7]))


def test_a_negative_id_for_an_unsigned_input_is_refused():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"outside of 0\.\.4294967295"):
        model_of("uint32")(tf.constant([-1, 2]))


def test_ids_of_64_bits_pass_as_their_bits():
    found = model_of("uint64")(tf.constant([1, -1], "int64"))
    assert found.numpy().ravel().tolist() == [1.0, -1.0]


def test_ragged_ids_of_a_narrower_input_are_compared_too():
    user = keras.Input((None,), dtype="int32", ragged=True, name="user")
    layer = Embedding(1, table="user", combiner="sum")
    layer.bind(Rows())
    model = keras.Model(user, layer(user))
    fine = tf.ragged.constant([[1, 2], []], dtype="int64")
    assert model(fine).numpy().ravel().tolist() == [3.0, 0.0]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'user' has int64 numbers outside"):
        model(tf.ragged.constant([[2**40], []], dtype="int64"))


@pytest.mark.filterwarnings("ignore:When providing")  # of Keras: a key is no input's name
@pytest.mark.parametrize("given", ["by name", "by key", "in order"])
def test_the_feature_is_found_however_the_inputs_are_given(given):
    user = keras.Input((), dtype="int64", name="user")
    price = keras.Input((1,), dtype="int64", name="price")
    scaled = keras.layers.Rescaling(0.5)(price)  # Keras may round what no id is made of
    layer = Embedding(1, table="user")
    layer.bind(Rows())
    inputs = {"u": user, "p": price} if given == "by key" else [user, price]
    model = keras.Model(inputs, keras.layers.Concatenate()([layer(user), scaled]))
    names = {"by name": ("user", "price"), "by key": ("u", "p"), "in order": None}[given]

    def run(ids, prices):
        batch = [tf.constant(ids), tf.constant(prices)]
        return model(batch if names is None else dict(zip(names, batch, strict=True)))

    assert run([5, 6], [[1.5], [2.0]]).shape == (2, 2)
    with pytest.raises(UnsupportedModel, match="feature 'user' has float32"):
        run([5.0, 6.0], [[1], [2]])


def test_ids_are_found_behind_layers_and_inside_other_models():
    inner = keras.Sequential([keras.Input((3,), dtype="int64"), Embedding(1, combiner="sum")])
    user = keras.Input((3,), dtype="int64", name="user")
    model = keras.Model(user, inner(user + 1))
    with pytest.raises(UnsupportedModel, match="feature 'user' has float32"):
        model(tf.zeros((2, 3)))


def test_models_without_the_layer_are_left_to_keras():
    user = keras.Input((), dtype="int32", name="user")
    model = keras.Model(user, keras.layers.Embedding(9, 2)(user))
    assert model(tf.constant([1.7, 2.0])).shape == (2, 2)


def test_ids_of_a_narrower_input_are_found_ahead_of_a_step(caplog):
    model = model_of("int32")
    model.fit(np.arange(4), LABELS, verbose=0)
    assert "inside the step" not in caplog.text
