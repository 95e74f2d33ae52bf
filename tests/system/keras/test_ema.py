"""`use_ema`: what the model, its callbacks and the servers hold is what plain Keras has."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from ps.client.saving.saver import SaveOptions
from tests.support.keras_training import blobs, feed_epochs, rows_of, serving, together
from tfos.errors import FeedEndedWarning
from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.data.feed_dataset import FeedDataset
from tfos.keras.fit.distribute import distribute

pytest.importorskip("tensorflow")

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BATCH = 8
X, Y = blobs(6 * BATCH, num_features=6)


def model_with(**settings):
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9, use_ema=True, **settings)
    model.compile(optimizer, loss, jit_compile=False)
    return model


class Seen(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """The weights and averages that a user's callback meets at the end of each epoch and of all."""

    def __init__(self):
        super().__init__()
        self.weights = []
        self.averages = []
        self.losses = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(copies(self.model.weights))
        self.averages.append(copies(self.model.optimizer._model_variables_moving_average))

    def on_train_end(self, logs=None):
        self.losses.append(self.model.evaluate(X, Y, BATCH, verbose=0))


def copies(variables):
    return [variable.numpy() for variable in variables]


def assert_same(ours, theirs, atol=0.0):
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=atol)


@pytest.mark.long
def test_callbacks_two_fits_and_a_saved_file_have_what_keras_has(tmp_path):
    plain, expected = model_with(ema_momentum=0.8), Seen()
    for _ in range(2):
        plain.fit(X, Y, BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[expected])
    with serving(num_servers=2) as cluster:
        model, seen = model_with(ema_momentum=0.8), Seen()
        distribute(model, cluster.contexts[0], consistency="sync")
        for _ in range(2):
            model.fit(X, Y, BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[seen])
        for part in ("weights", "averages"):
            for ours, theirs in zip(getattr(seen, part), getattr(expected, part), strict=True):
                assert_same(ours, theirs)
        np.testing.assert_allclose(seen.losses, expected.losses, rtol=1e-5)
        assert_same(copies(model.weights), copies(plain.weights))
        held = cluster.values()
        assert_same([held[weight.path] for weight in model.weights], copies(plain.weights))
        model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    assert_same(copies(loaded.weights), copies(plain.weights))
    assert_same(copies(loaded.optimizer._model_variables_moving_average), seen.averages[-1])


def test_swapped_weights_are_validated_saved_and_given_back(tmp_path):
    """Keras swaps by adding and subtracting, which rounds; the servers' values are not touched."""
    found = []
    with serving() as cluster:
        for context in (None, cluster.contexts[0]):
            model = model_with(ema_momentum=0.8)
            if context is not None:
                distribute(model, context, consistency="sync")
            swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
            keep = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
            history = model.fit(
                X, Y, BATCH, epochs=3, shuffle=False, verbose=0, callbacks=[swap, keep],
                validation_data=(X, Y),
            )  # fmt: skip
            saved = []
            for epoch in (1, 2, 3):
                loaded = keras.models.load_model(tmp_path / f"{epoch}.keras", compile=False)
                saved += copies(loaded.weights)
            found.append((history.history["val_loss"], [*saved, *copies(model.weights)]))
    (losses, weights), (our_losses, our_weights) = found
    np.testing.assert_allclose(our_losses, losses, rtol=1e-5)
    assert_same(our_weights, weights, atol=1e-6)


@pytest.mark.long
def test_stale_workers_end_with_the_servers_averages():
    with serving(num_workers=2, num_servers=2) as cluster:
        models = [model_with(ema_momentum=0.9, ema_overwrite_frequency=4) for _ in range(2)]

        def work(rank):
            model, seen = models[rank], Seen()
            distribute(model, cluster.contexts[rank], consistency="ssp", staleness_bound=1)
            model.fit(X, Y, BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[seen])
            return seen

        seen = together(work, 2)
        assert cluster.pushes == 24
        assert_same(seen[0].averages[-1], seen[1].averages[-1])
        held = cluster.values()
        for model in models:
            assert_same(copies(model.weights), seen[0].averages[-1])
            assert_same([held[weight.path] for weight in models[0].weights], copies(model.weights))


def test_a_feed_that_ends_early_ends_with_the_averages():
    with serving() as cluster:
        context = cluster.contexts[0]
        model = distribute(model_with(ema_momentum=0.9), context)
        feed_epochs(context.feed_channel, [rows_of(X, Y)], finish=True)
        dataset = FeedDataset(context, batch_size=BATCH)
        seen = Seen()
        with pytest.warns(FeedEndedWarning):
            model.fit(dataset, epochs=3, verbose=0, callbacks=[seen])
        assert_same(copies(model.weights), seen.averages[-1])
        assert not np.array_equal(seen.weights[-1][0], seen.averages[-1][0])


def test_averages_swapped_in_at_the_end_of_the_last_fed_epoch_are_what_the_servers_keep():
    """SwapEMAWeights gives the weights back in the last epoch that `fit` was asked for."""
    with serving() as cluster:
        context = cluster.contexts[0]
        model = distribute(model_with(ema_momentum=0.8), context)
        feed_epochs(context.feed_channel, [rows_of(X, Y), rows_of(X, Y)], finish=True)
        seen, swap = Seen(), keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        rows = FeedDataset(context, batch_size=BATCH)
        model.fit(rows, epochs=AllEpochs(), verbose=0, callbacks=[seen, swap])
        assert_same(copies(model.weights), seen.averages[-1])
        held = cluster.values()
        assert_same([held[weight.path] for weight in model.weights], seen.averages[-1])
        assert not np.array_equal(seen.weights[-1][0], seen.averages[-1][0])


@pytest.mark.filterwarnings("ignore:.*epochs.*:UserWarning")
def test_a_fit_whose_epochs_are_all_trained_ends_with_the_averages(tmp_path):
    """As that of a resumed program which was stopped behind its last epoch."""
    keras.backend.clear_session()
    with serving() as cluster:
        model = distribute(model_with(ema_momentum=0.9), cluster.contexts[0], consistency="sync")
        seen, directory = Seen(), str(tmp_path / "saves")
        save = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: model._tfos_trainer.client.save(
                directory, None, options=SaveOptions()
            )
        )
        model.fit(X, Y, BATCH, epochs=1, verbose=0, callbacks=[save, seen])
    keras.backend.clear_session()  # the same names, as in another process
    with serving() as cluster:
        cluster.contexts[0].client.restore(directory)
        model = distribute(model_with(ema_momentum=0.9), cluster.contexts[0], consistency="sync")
        assert_same(copies(model.weights), seen.weights[-1])
        model.fit(X, Y, BATCH, initial_epoch=1, epochs=1, verbose=0)
        assert_same(copies(model.weights), seen.averages[-1])
        held = cluster.values()
        assert_same([held[weight.path] for weight in model.weights], seen.averages[-1])
