"""Layers with `adapt`: all workers compute with what the chief's layers have learned."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from tests.support.keras_training import serving, together
from tfos.errors import SettingsError, UnsupportedModel
from tfos.fit_place import FitPlace
from tfos.keras.fit.distribute import distribute
from tfos.keras.fit.saved_parameters import SavedParameters
from tfos.keras.step.adapted_layers import adapted_layers, check_like

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' save
]
X = np.random.default_rng(0).normal(3, 2, (64, 4)).astype("float32")
Y = (X[:, :1] > 3).astype("float32")
WORDS = np.array([["a"], ["b"], ["c"], ["b"]] * 16, dtype=object)


def normalizing(scale: float = 1.0, **settings: Any) -> keras.Model:
    first = keras.layers.Normalization(name="scaled", **settings)
    if scale:
        first.adapt(X * scale)
    last = keras.layers.Dense(1, kernel_initializer="ones", name="out")
    model = keras.Sequential([keras.Input((4,)), first, last], name="whole")
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize("settings", [{}, {"trainable": False}])
def test_all_workers_normalize_as_their_files_say(tmp_path: pathlib.Path, settings: Any):
    models = [normalizing(1, **settings), normalizing(10, **settings)]

    def work(rank: int) -> np.ndarray:
        distribute(models[rank], cluster.contexts[rank], consistency="sync")
        models[rank].fit(X[rank::2], Y[rank::2], batch_size=8, verbose=0)
        return models[rank].predict(X, verbose=0)

    with serving(num_workers=2) as cluster:
        chiefs, others = together(work, 2)
        models[1].save(tmp_path / "other.keras")
        cluster.contexts[0].client.save(tmp_path / "saved", None)
    np.testing.assert_array_equal(chiefs, others)
    loaded = keras.models.load_model(tmp_path / "other.keras")
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), others)
    evaluated = normalizing(5, **settings)
    parameters = SavedParameters(evaluated, str(tmp_path / "saved"), _storage())
    parameters.load()
    np.testing.assert_array_equal(evaluated.predict(X, verbose=0), others)
    parameters.close()


def test_what_was_compiled_before_normalizes_likewise():
    inner = [normalizing(1), normalizing(10)]
    models = []
    for each in inner:
        models.append(keras.Sequential([keras.Input((4,)), each]))
        models[-1].compile("sgd", "mse", jit_compile=False)

    def work(rank: int) -> tuple[np.ndarray, ...]:
        model = models[rank]
        for each in (inner[rank], model):
            each.predict(X, verbose=0)
            each.evaluate(X, Y, verbose=0)
        distribute(model, cluster.contexts[rank], consistency="sync")
        model.fit(X[rank::2], Y[rank::2], batch_size=8, verbose=0)
        predicted = model.predict(X, verbose=0), inner[rank].predict(X, verbose=0)
        losses = model.evaluate(X, Y, verbose=0), inner[rank].evaluate(X, Y, verbose=0)
        return *predicted, np.array(losses)

    with serving(num_workers=2) as cluster:
        chiefs, others = together(work, 2)
    for one, other in zip(chiefs, others, strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_that_were_not_adapted_have_learned_the_same():
    def layers() -> keras.Model:
        model = keras.Model()
        model.first = keras.layers.StringLookup(output_mode="tf_idf")
        model.second = keras.layers.Discretization(num_bins=3)
        model.third = keras.layers.TextVectorization()
        return model

    one, other = adapted_layers(layers()), adapted_layers(layers())
    assert [each.digest for each in one] == [each.digest for each in other]


def _storage() -> Any:
    from ps.checkpoint.storage import storage_at

    return storage_at


def test_adapting_after_distribute_is_refused():
    model = normalizing(0)
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        model.get_layer("scaled").adapt(X)
        with pytest.raises(UnsupportedModel, match=r"scaled/mean.*Call adapt, load_weights"):
            model.fit(X, Y, verbose=0)
        assert cluster.pushes == 0


def lookup(data: Any) -> Any:
    return _adapted(keras.layers.StringLookup(name="learned"), data)


def vectors(data: Any) -> Any:
    return _adapted(keras.layers.TextVectorization(output_sequence_length=1), data)


def weighted(data: Any) -> Any:
    return _adapted(keras.layers.StringLookup(output_mode="tf_idf", name="learned"), data)


def bins(data: Any) -> Any:
    lengths = np.array([[float(ord(each[0]))] for each in data], "float32")
    return _adapted(keras.layers.Discretization(num_bins=2, name="learned"), lengths)


def _adapted(layer: Any, data: Any) -> Any:
    layer.adapt(data)
    return layer


def numbers_of(layer: Any) -> keras.Model:
    is_text = not isinstance(layer, keras.layers.Discretization)
    given = keras.Input((1,), dtype="string" if is_text else "float32")
    numbers = keras.ops.cast(layer(given), "float32")
    model = keras.Model(given, keras.layers.Dense(1, name="out")(keras.layers.Flatten()(numbers)))
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lookup, [["c"], ["b"], ["b"]]),  # b, c, without a
        (vectors, [["c"], ["b"], ["b"]]),
        (weighted, [["a"], ["b"], ["b"], ["c"], ["c"]]),  # the same words in other numbers of rows
        (bins, [["y"], ["z"], ["z"]]),
    ],
)
def test_workers_with_other_vocabularies_or_bins_are_refused(
    make: Callable[[Any], Any], other: Any
):
    import tensorflow as tf

    first = make(WORDS)
    is_text = not isinstance(first, keras.layers.Discretization)
    x = tf.constant(WORDS.astype(str)) if is_text else X[:, :1]
    for second, is_refused in ((make(WORDS), False), (make(np.array(other, object)), True)):
        models = [numbers_of(first), numbers_of(second)]

        def fit(rank: int, models: list[keras.Model] = models) -> Any:
            distribute(models[rank], cluster.contexts[rank], consistency="sync")
            return models[rank].fit(x, Y, batch_size=32, verbose=0)

        with serving(num_workers=2) as cluster:
            if is_refused:
                with pytest.raises(SettingsError, match=r"learned different vocabularies or bins"):
                    together(fit, 2)
                assert cluster.pushes == 0
            else:
                together(fit, 2)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_restarted_worker_with_another_vocabulary_is_refused(epoch: int):
    import tensorflow as tf

    x = tf.constant(WORDS.astype(str))
    with serving(num_workers=2) as cluster:
        chief, lost = cluster.contexts
        cluster.servers[0].worker_lost(1)
        model = distribute(numbers_of(lookup(WORDS)), chief)
        model.fit(x, Y, batch_size=32, epochs=2, verbose=0)
        chief.client.finish()
        place = FitPlace(0, epoch)
        again = replace(lost, client=lost.make_client(100), fit_place=place)
        other = distribute(numbers_of(lookup([["c"], ["b"], ["b"]])), again)
        with pytest.raises(SettingsError, match=r"worker 1 and .* worker 0 have learned different"):
            other.fit(x, Y, batch_size=32, epochs=2, verbose=0)
        again.client.close()


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (lookup, [["c"], ["c"], ["c"], ["b"], ["b"], ["a"]]),  # as many words
        (vectors, [["c"], ["c"], ["c"], ["b"], ["b"], ["a"]]),
        (weighted, [["a"], ["b"], ["b"], ["c"], ["c"]]),
        (bins, [["y"], ["z"], ["z"]]),
    ],
)
def test_a_run_that_resumes_with_another_vocabulary_or_bins_is_refused(
    make: Callable[[Any], Any], other: Any, tmp_path: pathlib.Path
):
    import tensorflow as tf

    saved, is_text = str(tmp_path), make is not bins
    x = tf.constant(WORDS.astype(str)) if is_text else X[:, :1]

    def train(data: Any, cluster: Any) -> None:
        model = distribute(numbers_of(make(data)), cluster.contexts[0])
        model.fit(x, Y, batch_size=32, verbose=0)

    with serving() as cluster:
        train(WORDS, cluster)
        cluster.contexts[0].client.save(saved, None)
    for data, is_refused in ((WORDS, False), (np.array(other, object), True)):
        parameters = SavedParameters(numbers_of(make(data)), saved, _storage())
        with serving() as cluster:
            cluster.contexts[0].client.restore(saved)
            if not is_refused:
                train(data, cluster)
                parameters.load()
                parameters.close()
                continue
            with pytest.raises(SettingsError, match=r"learned .* but the servers' parameters were"):
                train(data, cluster)
            assert cluster.pushes == 0
        with pytest.raises(SettingsError, match=r"but the parameters in the checkpoint of step"):
            parameters.load()


def test_words_that_follow_the_known_ones_are_new_from_then_on(tmp_path: pathlib.Path):
    def model_of(words: list[str]) -> keras.Model:
        return numbers_of(keras.layers.StringLookup(vocabulary=words, name="learned"))

    for run, words in enumerate((["a", "b"], ["a", "b", "c"], ["a", "b", "d"])):
        with serving() as cluster:
            if run:
                cluster.contexts[0].client.restore(str(tmp_path))
            if words[-1] == "d":
                with pytest.raises(SettingsError, match=r"new words may follow at the end"):
                    distribute(model_of(words), cluster.contexts[0])
                return
            distribute(model_of(words), cluster.contexts[0])
            cluster.contexts[0].client.set_metadata("run", run)  # so that there is a change to save
            cluster.contexts[0].client.save(str(tmp_path), None)


def test_adapting_again_between_two_fits_is_refused():
    import tensorflow as tf

    x = tf.constant(WORDS.astype(str))
    layer = keras.layers.StringLookup(max_tokens=4, name="learned")
    model = numbers_of(layer)
    with serving() as cluster:
        distribute(model, cluster.contexts[0])
        layer.adapt(WORDS)  # before the first fit: it knew no word yet
        model.fit(x, Y, batch_size=32, verbose=0)
        layer.adapt(np.array([["c"], ["c"], ["a"]], object))
        with pytest.raises(SettingsError, match=r"'learned' has learned 2 words"):
            model.fit(x, Y, batch_size=32, verbose=0)


def test_a_layer_that_is_adapted_only_before_the_fit_is_compared_then(tmp_path: pathlib.Path):
    import tensorflow as tf

    x = tf.constant(WORDS.astype(str))
    for run, words in enumerate((WORDS, WORDS, np.array([["c"], ["c"], ["a"]], object))):
        layer = keras.layers.StringLookup(max_tokens=4, name="learned")
        model = numbers_of(layer)
        with serving() as cluster:
            if run:
                cluster.contexts[0].client.restore(str(tmp_path))
            distribute(model, cluster.contexts[0])
            layer.adapt(words)
            if run == 2:
                with pytest.raises(SettingsError, match=r"'learned' has learned 2 words"):
                    model.fit(x, Y, batch_size=32, verbose=0)
                return
            model.fit(x, Y, batch_size=32, verbose=0)
            cluster.contexts[0].client.save(str(tmp_path), None)


@pytest.mark.parametrize(
    ("names", "words", "is_same"),
    [
        (("a", "b"), ("xy", "zu"), True),
        (("b", "a"), ("zu", "xy"), True),  # the program names its columns in another order
        (("lookup_7", "lookup_8"), ("xy", "zu"), True),  # Keras has numbered them anew
        (("b", "a"), ("xy", "zu"), True),  # the same numbers for other layers
        (("a", "b"), ("xy", "uz"), False),
        (("a", "b"), ("zu", "xy"), False),
        (("a",), ("zu",), True),  # the first column's is in the data's map now
        (("a", "b", "c"), ("xy", "zu", "vw"), True),
        (("a",), ("uz",), False),
    ],
)
def test_layers_are_compared_by_their_place_or_their_name(
    names: tuple[str, ...], words: tuple[str, ...], is_same: bool
):
    def model_of(names: tuple[str, ...], words: tuple[str, ...]) -> keras.Model:
        given = keras.Input((1,), dtype="string")
        lookups = [
            keras.layers.StringLookup(vocabulary=list(each), name=name)(given)
            for name, each in zip(names, words, strict=True)
        ]
        return keras.Model(given, lookups)

    kept = adapted_layers(model_of(("a", "b"), ("xy", "zu")))
    refused = pytest.raises(SettingsError, match=r"were trained with 2 others")
    with contextlib.nullcontext() if is_same else refused:
        check_like(model_of(names, words), kept, "they")
