"""What Keras does to the weights at the end of `fit` is in the checkpoint that is saved at last."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from ps.manifest.manifest import Manifest
from tests.support.keras_training import Servers, blobs, serving
from tfos.config import Checkpoints
from tfos.keras.fit.distribute import distribute
from tfos.worker.saver import ChiefSaver

pytest.importorskip("tensorflow")

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

BATCH = 16
X, Y = blobs(6 * BATCH, num_features=6)


def model_with(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def best_weights() -> tuple[keras.Model, list[keras.callbacks.Callback]]:
    def spoil(epoch: int, logs: dict[str, float]) -> None:
        logs["loss"] = float(epoch)  # the first epoch's weights are the best

    stop = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    spoiled = keras.callbacks.LambdaCallback(on_epoch_end=spoil)
    return model_with(keras.optimizers.SGD(0.2)), [spoiled, stop]


def averages() -> tuple[keras.Model, list[keras.callbacks.Callback]]:
    return model_with(keras.optimizers.SGD(0.2, use_ema=True, ema_momentum=0.8)), []


def restored(directory: Path, like: Manifest) -> dict[str, np.ndarray]:
    with serving() as cluster:
        client = cluster.contexts[0].client
        client.restore(directory)
        assert client.manifest == like
        return cluster.values()


@pytest.mark.parametrize("train", [pytest.param(best_weights, marks=pytest.mark.long), averages])
def test_the_last_save_has_the_weights_that_fit_ended_with(tmp_path: Path, train):
    def saved_before_the_end(epoch: int, logs: dict[str, float]) -> None:
        assert saver.save_now() == ""  # of the last update: the clock stands from here on
        pushed.update(held(cluster))

    pushed: dict[str, np.ndarray] = {}
    with serving(num_servers=2) as cluster:
        model, callbacks = train()
        distribute(model, cluster.contexts[0])
        plan = Checkpoints(directory=str(tmp_path), every_s=3600.0)
        saver = ChiefSaver(plan, cluster.contexts[0].new_ps_client)
        saver.start()
        early = keras.callbacks.LambdaCallback(on_epoch_end=saved_before_the_end)
        model.fit(X, Y, BATCH, epochs=4, verbose=0, callbacks=[early, *callbacks])
        ended = held(cluster)
        saver.close()
        manifest = cluster.manifest
    assert any(not np.array_equal(pushed[name], ended[name]) for name in ended)
    found = restored(tmp_path, manifest)
    for weight in model.weights:
        np.testing.assert_array_equal(ended[weight.path], weight.numpy())
        np.testing.assert_array_equal(found[weight.path], ended[weight.path])


def held(cluster: Servers) -> dict[str, np.ndarray]:
    return {name: value.copy() for name, value in cluster.values().items()}
