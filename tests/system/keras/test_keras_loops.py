"""Keras' own predict and evaluate of a model with tables: other ranks than before, and no rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tfos.errors import SettingsError
from tfos.keras import Embedding

pytestmark = [
    pytest.mark.tf,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

IDS = np.arange(6)


@pytest.fixture(params=["functional", "Sequential"])
def model(request):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((), dtype="int64"), Embedding(2, unseen=[1.0, 3.0])]
    layers.append(keras.layers.Dense(1, kernel_initializer="ones"))
    if request.param == "Sequential":
        made = keras.Sequential(layers)
    else:
        made = keras.Model(layers[0], layers[2](layers[1](layers[0])))
    made.compile("sgd", "mse")
    return made


def predicted(model, ids):
    """Return the answers, or what Keras says instead."""
    try:
        return model.predict(ids, verbose=0)
    except ValueError as error:
        return np.array([str(error)])


def test_a_later_prediction_may_have_another_rank(model):
    """A column of ids, then as rows of one: Keras squeezes those of a fresh model."""
    answers = [predicted(model, each) for each in (IDS, IDS[:, None], IDS[:2])]
    assert [each.tolist() for each in answers] == [[[4.0]] * 6, [[4.0]] * 6, [[4.0]] * 2]
    assert model.predict_on_batch(IDS[:, None]).tolist() == [[4.0]] * 6


def test_a_rank_that_the_model_cannot_take_is_refused_by_its_shape(model):
    model.predict(IDS, verbose=0)
    with pytest.raises(ValueError, match=r"Expected shape \(None,\), .* shape \(3, 2\)"):
        model.predict(IDS.reshape(3, 2), verbose=0)
    assert model.predict(IDS, verbose=0).tolist() == [[4.0]] * 6


def test_a_later_evaluation_may_have_another_rank(model):
    labels = np.full((6, 1), 2.0)
    assert [model.evaluate(each, labels, verbose=0) for each in (IDS, IDS[:, None])] == [4.0, 4.0]


@pytest.mark.filterwarnings("ignore:.*ran out of data:UserWarning")
def test_predict_of_no_rows_is_a_sentence_before_any_training_too(model):
    with pytest.raises(SettingsError, match=r"predict\(\) got 0 rows, .*; ask len\(x\) first"):
        model.predict(IDS[:0], verbose=0)
    assert model.predict_on_batch(IDS[:0]).shape == (0, 1)


def test_a_function_is_traced_once_per_rank(model):
    for _ in range(2):
        for each in (IDS, IDS[:, None]):
            model.predict(each, verbose=0)
    made = model.predict_function._made
    assert [each.experimental_get_tracing_count() for each in made.values()] == [1, 1]
