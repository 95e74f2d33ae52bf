"""Weights that a program begins with, where the servers' parameters were trained before it came."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest

from feeding.receiver.channel import FeedChannel
from tests.support.keras_training import (
    Context,
    Servers,
    feed_epochs,
    rows_of,
    serving,
    together,
)
from tfos.errors import SettingsError, UnsupportedModel
from tfos.fit_place import FitPlace
from tfos.keras import Embedding
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.embedding.loading import load_layer_rows
from tfos.keras.fit.distribute import distribute
from tfos.keras.step import trainer
from tfos.keras.step.exchange import given_values

tf = pytest.importorskip("tensorflow")
pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(230),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' save
]

BATCH = 16
X = np.random.default_rng(0).integers(0, 40, (64, 3))
Y = (X.sum(1) > 60).astype("float32")
RESTARTED = 100
"""Generation of a newer attempt."""


def make_model(*, has_table: bool = False, is_frozen: bool = False) -> keras.Model:
    keras.utils.set_random_seed(7)
    ids = keras.Input((3,), dtype="int64")
    kind = Embedding(4, table="user") if has_table else keras.layers.Embedding(40, 4, name="few")
    hidden = keras.layers.Flatten()(kind(ids))
    hidden = keras.layers.Dense(4, trainable=not is_frozen, name="hidden")(hidden)
    model = keras.Model(ids, keras.layers.Dense(1, "sigmoid", name="out")(hidden))
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", jit_compile=False)
    return model


def trained(model: keras.Model, steps: int) -> None:
    for step in range(steps):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        model.train_on_batch(X[rows], Y[rows])


def shifted(model: keras.Model) -> list[np.ndarray]:
    """Values that the servers never had."""
    return [weight + 1 for weight in model.get_weights()]


def again(context: Context, *, place: FitPlace | None = None) -> Context:
    """A context of the same rank, started again."""
    return replace(context, client=context.make_client(RESTARTED), fit_place=place)


def assert_equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


def assert_has(model: keras.Model, cluster: Servers) -> None:
    held = cluster.values()
    for weight in model.trainable_weights[-2:]:
        np.testing.assert_array_equal(weight.numpy(), held[weight.path])


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        each.getMessage()
        for each in caplog.records
        if each.levelno == logging.WARNING and each.name == given_values.__name__
    ]


@pytest.mark.parametrize("has_table", [False, True])
def test_a_chief_that_is_started_again_keeps_what_was_trained(tmp_path, caplog, has_table):
    with serving() as cluster:
        lost = make_model(has_table=has_table)
        distribute(lost, cluster.contexts[0])
        lost.set_weights(first := shifted(lost))  # before any step: they are what training begins
        lost.save_weights(tmp_path / "first.weights.h5")
        trained(lost, 3)
        held = cluster.values()
        chief = again(cluster.contexts[0], place=FitPlace(0, 1))
        model = make_model(has_table=has_table)
        distribute(model, chief)
        model.set_weights(first)
        assert_equal(cluster.values(), held)
        assert_has(model, cluster)
        if not has_table:
            model.load_weights(tmp_path / "first.weights.h5")
            assert_equal(cluster.values(), held)
            assert_has(model, cluster)
        (told,) = warnings_of(caplog)
        assert "were already trained" in told
        assert "3 updates" in told
        chief.client.close()


def test_a_sequential_model_that_is_loaded_goes_on_at_servers_that_hold_it(tmp_path: Path):
    """Keras drops the names of the models around its layers when it loads one."""
    with serving() as cluster:
        model = keras.Sequential(
            [keras.Input((3,)), keras.Sequential([keras.layers.Dense(4)]), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(1e-5), "mse", jit_compile=False)
        distribute(model, cluster.contexts[0])
        trained(model, 3)
        model.save(tmp_path / "m.keras")
        held = cluster.values()
        chief = again(cluster.contexts[0], place=FitPlace(0, 1))
        loaded = keras.models.load_model(tmp_path / "m.keras")
        distribute(loaded, chief)
        loaded.predict(X[:2], verbose=0)
        assert_equal(cluster.values(), held)
        for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        trained(loaded, 1)
        chief.client.close()


def test_a_run_that_resumes_keeps_its_checkpoint(tmp_path: Path, caplog):
    with serving() as cluster:
        model = distribute(make_model(), cluster.contexts[0])
        first = shifted(model)
        model.set_weights(first)
        trained(model, 3)
        cluster.contexts[0].client.save(tmp_path, None)
        held = cluster.values()
    with serving() as cluster:
        cluster.contexts[0].client.restore(tmp_path)
        model = distribute(make_model(), cluster.contexts[0])
        model.set_weights(first)
        assert_equal(cluster.values(), held)
        model.fit(X, Y, batch_size=BATCH, verbose=0)
        assert_has(model, cluster)
        model.set_weights(first)  # of its own training: they are meant
        assert_has(model, cluster)
        np.testing.assert_array_equal(model.get_weights()[-1], first[-1])
    assert "set_weights" in caplog.text


def make_unbuilt() -> keras.Model:
    """Whose first batch builds it: a run that has no epoch left trains none."""
    model = keras.Sequential([keras.layers.Dense(1, name="out")], name="line")
    model.compile(keras.optimizers.SGD(1e-5), "mse", jit_compile=False)
    return model


def test_a_model_without_an_input_has_the_trained_values_where_no_epoch_is_left(tmp_path: Path):
    with serving() as cluster:
        first = distribute(make_unbuilt(), cluster.contexts[0])
        first.fit(X, Y, epochs=2, batch_size=BATCH, verbose=0)
        chief = again(cluster.contexts[0], place=FitPlace(1, 0))
        model = distribute(make_unbuilt(), chief)
        for use in (
            lambda: model.predict(((each,) for each in [X]), steps=1),
            lambda: model.predict(tf.data.Dataset.from_generator(lambda: [X], tf.int64)),
            lambda: model.predict(tf.data.Dataset.range(3)),  # it has no batches
            lambda: model.predict_on_batch("no rows"),
            lambda: model.save(tmp_path / "m.keras"),
        ):
            with pytest.raises(
                UnsupportedModel, match=r"Give it a keras\.Input, or call it once, model\(x\[:1\]\)"
            ):
                use()
        model.build(X.shape)
        assert model.fit(X, Y, epochs=2, verbose=0).history == {}  # it was over
        np.testing.assert_array_equal(model.get_weights()[0], first.get_weights()[0])
        model.save(tmp_path / "m.keras")
        saved = keras.models.load_model(tmp_path / "m.keras")
        np.testing.assert_array_equal(saved.get_weights()[0], first.get_weights()[0])
        chief.client.close()


ROWS = tf.data.Dataset.from_tensor_slices((X, Y))


class Rows(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return X, Y


def test_a_model_without_an_input_answers_with_the_trained_values_before_its_first_fit():
    with serving() as cluster:
        first = distribute(make_unbuilt(), cluster.contexts[0])
        untrained = first.evaluate(X, Y, verbose=0)  # a baseline; the servers are empty by then
        first.fit(X, Y, epochs=2, batch_size=BATCH, verbose=0)
        trained, answers = first.evaluate(X, Y, verbose=0), first.predict(X, verbose=0)
        assert trained < untrained
        told = {
            "evaluate": (trained, lambda model: model.evaluate(X, Y, verbose=0)),
            "test_on_batch": (trained, lambda model: model.test_on_batch(X, Y)),
            "PyDataset": (trained, lambda model: model.evaluate(Rows(), verbose=0)),
            "Dataset": (trained, lambda model: model.evaluate(ROWS.batch(BATCH), verbose=0)),
            "predict": (answers, lambda model: model.predict(X, verbose=0)),
            "predict_on_batch": (answers, lambda model: model.predict_on_batch(X)),
        }  # fmt: skip
        for name, (expected, use) in told.items():
            chief = again(cluster.contexts[0], place=FitPlace(0, 1))
            model = distribute(make_unbuilt(), chief)
            try:
                np.testing.assert_allclose(use(model), expected, rtol=1e-5, err_msg=name)
            except UnsupportedModel as error:
                pytest.fail(f"{name}: {error}")
            chief.client.close()
        chief = again(cluster.contexts[0], place=FitPlace(0, 1))
        feed_epochs(chief.feed_channel, [rows_of(X, Y)], finish=True)
        found = distribute(make_unbuilt(), chief).predict(FeedDataset(chief, BATCH), verbose=0)
        np.testing.assert_allclose(found, answers, rtol=1e-5)
        chief.client.close()


def test_a_resumed_model_without_an_input_validates_behind_an_epoch_without_rows():
    refused = []
    with serving() as cluster:
        distribute(make_unbuilt(), cluster.contexts[0]).fit(X, Y, batch_size=BATCH, verbose=0)
        for looks in (False, True):
            chief = again(cluster.contexts[0])
            chief.feed_channel = FeedChannel()
            feed_epochs(chief.feed_channel, [[], rows_of(X, Y)], finish=True)
            model = distribute(make_unbuilt(), chief)

            def look(logs, model=model, looks=looks):
                if looks:  # a generator tells no shapes, and the fit that runs is to go on
                    try:
                        model.predict(((each,) for each in [X]), verbose=0, steps=1)
                    except UnsupportedModel as error:
                        refused.append(error)

            model.fit(
                FeedDataset(chief, BATCH),
                epochs=2,
                validation_data=(X, Y),
                verbose=0,
                callbacks=[keras.callbacks.LambdaCallback(on_train_begin=look)],
            )
            assert refused == []
            assert len(model.history.history["val_loss"]) == 2
            chief.client.close()


def test_weights_that_are_set_on_a_model_built_after_distribute_give_way_to_trained_ones(caplog):
    with serving() as cluster:
        first = distribute(make_unbuilt(), cluster.contexts[0])
        first.fit(X, Y, batch_size=BATCH, verbose=0)
        chief = again(cluster.contexts[0])
        model = distribute(make_unbuilt(), chief)
        model.build(X.shape)
        model.set_weights([np.full_like(each, 7) for each in first.get_weights()])
        np.testing.assert_array_equal(model.get_weights()[0], first.get_weights()[0])
        assert "set_weights before the first step here changes nothing" in caplog.text
        chief.client.close()


def test_statistics_that_are_set_in_an_incomplete_sum_give_way_to_trained_ones():
    def make_normalizing():
        layers = [keras.layers.BatchNormalization(name="norm"), keras.layers.Dense(1, name="out")]
        model = keras.Sequential([keras.Input((3,)), *layers], name="line")
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        model.compile(optimizer, "mse", jit_compile=False)
        return model

    with serving() as cluster:
        trained(distribute(make_normalizing(), cluster.contexts[0]), 3)
        chief = again(cluster.contexts[0])
        model = distribute(make_normalizing(), chief)
        trained(model, 1)
        model.set_weights([np.full_like(each, 7) for each in model.get_weights()])
        held = cluster.values()
        for weight in model.weights:
            np.testing.assert_array_equal(weight.numpy(), held[weight.path])
        chief.client.close()


def test_a_worker_that_has_taken_trained_values_agrees_with_the_others_on_the_first_batch(tmp_path):
    with serving() as cluster:
        distribute(make_unbuilt(), cluster.contexts[0]).fit(X, Y, batch_size=BATCH, verbose=0)
        cluster.contexts[0].client.save(tmp_path, None)
    with serving(num_workers=2) as cluster:
        cluster.contexts[0].client.restore(tmp_path)

        def work(rank: int) -> None:
            model = distribute(make_unbuilt(), cluster.contexts[rank])
            model.build(X.shape)
            if rank == 0:
                model.evaluate(X, Y, verbose=0)
            model.fit(X, Y, batch_size=BATCH, verbose=0)

        together(work, 2)
        assert cluster.pushes == 2 * len(X) // BATCH


def test_a_checkpoint_that_was_never_trained_takes_the_first_values(tmp_path: Path):
    with serving() as cluster:
        distribute(make_model(), cluster.contexts[0])
        cluster.contexts[0].client.save(tmp_path, 0)
    with serving() as cluster:
        cluster.contexts[0].client.restore(tmp_path)
        model = distribute(make_model(), cluster.contexts[0])
        model.set_weights(first := shifted(model))
        np.testing.assert_array_equal(model.get_weights()[-1], first[-1])
        assert_has(model, cluster)


def test_best_weights_are_restored_by_a_chief_without_rows(tmp_path: Path):
    """Its first epoch has ended, so what callbacks set is of this training."""
    with serving() as cluster:
        trained(distribute(make_model(), cluster.contexts[0]), 3)
        cluster.contexts[0].client.save(tmp_path, None)
    with serving() as cluster:
        cluster.contexts[0].client.restore(tmp_path)
        model = distribute(make_model(), cluster.contexts[0], on_nonfinite="skip")
        best = shifted(model)
        at_end = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.set_weights(best))
        nothing = np.full(Y.shape, np.nan, "float32")  # no step of this process is sent
        model.fit(X, nothing, batch_size=BATCH, verbose=0, callbacks=[at_end])
        assert_has(model, cluster)
        np.testing.assert_array_equal(model.get_weights()[-1], best[-1])


@pytest.mark.parametrize("is_again", [False, True])
def test_a_push_while_the_chief_attaches_does_not_cost_it_its_first_values(
    monkeypatch, caplog, is_again
):
    """Nobody had trained when it seeded, or found its lost attempt's seed."""
    with serving(num_workers=2) as cluster:
        chief = cluster.contexts[0]
        if is_again:
            distribute(make_model(), chief)
            chief = again(chief)

        def after_a_push_of_the_other(*args, **kwargs):
            monkeypatch.setattr(trainer, "load_layer_rows", load_layer_rows)
            trained(distribute(make_model(), cluster.contexts[1]), 1)
            load_layer_rows(*args, **kwargs)

        monkeypatch.setattr(trainer, "load_layer_rows", after_a_push_of_the_other)
        model = distribute(make_model(), chief)
        assert cluster.pushes == 1
        model.set_weights(first := shifted(model))
        np.testing.assert_array_equal(model.get_weights()[-1], first[-1])
        assert_has(model, cluster)
        assert not warnings_of(caplog)
        if is_again:
            chief.client.close()


@pytest.mark.parametrize("is_again", [False, True])
def test_another_worker_that_comes_later_computes_with_the_trained_values(caplog, is_again):
    """It is told nothing: what it sets never reaches the servers."""
    with serving(num_workers=2) as cluster:
        chief = distribute(make_model(), cluster.contexts[0])
        if is_again:
            distribute(make_model(), cluster.contexts[1])
        first = shifted(chief)
        chief.set_weights(first)
        trained(chief, 3)
        late = again(cluster.contexts[1], place=FitPlace(0, 1)) if is_again else cluster.contexts[1]
        model = distribute(make_model(), late)
        model.set_weights(first)
        assert_has(model, cluster)
        assert not warnings_of(caplog)
        late.client.close()


def test_what_is_refused_in_the_first_attempt_is_in_the_next():
    with serving() as cluster:
        lost = distribute(make_model(is_frozen=True), cluster.contexts[0])
        trained(lost, 2)
        chief = again(cluster.contexts[0])
        model = distribute(make_model(is_frozen=True), chief)
        with pytest.raises(UnsupportedModel, match="which is not trained, was changed"):
            model.set_weights(shifted(model))
        chief.client.close()


def test_rows_that_this_process_has_trained_still_refuse_other_dense_weights():
    with serving() as cluster:
        trained(distribute(make_model(has_table=True), cluster.contexts[0]), 2)
        chief = again(cluster.contexts[0])
        model = distribute(make_model(has_table=True), chief)
        trained(model, 1)
        with pytest.raises(SettingsError, match="rows of the last one"):
            model.set_weights(shifted(model))
        chief.client.close()
