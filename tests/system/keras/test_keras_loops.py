"""Keras' own predict and evaluate of a model with tables: other ranks than before, and no rows."""

from __future__ import annotations

import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

from tfos.errors import SettingsError
from tfos.keras import Embedding, keras_loops
from tfos.keras.embedding.layer import has_tables

tf = pytest.importorskip("tensorflow")

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


@pytest.mark.parametrize("call", ["predict_on_batch", "test_on_batch"])
def test_batches_by_themselves_may_have_other_ranks(model, call):
    """Arrays of numpy tell their rank otherwise than a dataset does."""
    labels = [] if call == "predict_on_batch" else [np.full((6, 1), 2.0)]

    def answered(ids):
        """Return the answers, or what Keras says instead."""
        try:
            return getattr(model, call)(ids, *labels)
        except ValueError as error:
            return np.array([str(error)])

    found = [answered(each) for each in (IDS, IDS[:, None], IDS)]
    assert [np.ravel(each).tolist() for each in found] == [[4.0] * len(np.ravel(found[0]))] * 3


def test_two_threads_may_make_the_first_prediction_together(monkeypatch):
    """One took the other's function for its own, which then called itself for ever."""
    original = keras.Model.make_predict_function.__wrapped__
    entered = threading.Barrier(2)
    is_made, is_answered = threading.Event(), threading.Event()

    def in_turns(self, force):
        entered.wait(60)
        if threading.current_thread().name.endswith("_0"):
            assert is_made.wait(60)
        original(self, force)
        if threading.current_thread().name.endswith("_1"):
            is_made.set()
            assert is_answered.wait(60)

    making = functools.partial(keras_loops.making, name="predict_function", wanted=has_tables)
    monkeypatch.setattr(keras.Model, "make_predict_function", making(in_turns))
    ids = keras.Input((), dtype="int64")
    model = keras.Model(ids, Embedding(2, unseen=[1.0, 3.0])(ids))
    model.compile("sgd", "mse", jit_compile=True)
    model.make_predict_function()

    def answers(_):
        try:
            return model.predict_on_batch(IDS).tolist()
        except (RecursionError, tf.errors.OpError) as error:  # it calls itself; XLA compiles it
            return str(error)
        finally:
            is_answered.set()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(answers, range(2))) == [[[1.0, 3.0]] * 6] * 2
    assert model.predict_on_batch(IDS).tolist() == [[1.0, 3.0]] * 6
    assert model.jit_compile is True


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
    with pytest.raises(SettingsError, match=r"predict\(\) got 0 rows, .*; check len\(x\) first"):
        model.predict(IDS[:0], verbose=0)
    assert model.predict_on_batch(IDS[:0]).shape == (0, 1)


def test_a_function_is_traced_once_per_rank(model):
    for _ in range(2):
        for each in (IDS, IDS[:, None]):
            model.predict(each, verbose=0)
    made = model.predict_function._made
    assert [each.experimental_get_tracing_count() for each in made.values()] == [1, 1]
