"""pipeline=k: pushes under way while later steps are computed, and nothing lost by it."""

from __future__ import annotations

import threading

import keras
import numpy as np
import pytest

from ps.errors import PSError
from tests.support.keras_training import blobs, serving
from tfos.errors import SettingsError
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

BATCH = 32
STEPS = 6
X, Y = blobs(STEPS * BATCH)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture
def cluster():
    with serving() as servers:
        yield servers


def make_model(optimizer=None):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
    )
    model.compile(optimizer or keras.optimizers.SGD(0.2), LOSS, jit_compile=False)
    return model


def push_threads():
    return [thread for thread in threading.enumerate() if thread.name == "tfos-push"]


def trained_with_delay(model, schedule, *, delay, epochs):
    """By hand: the gradient of each step is taken at the weights of `delay` steps before."""
    newest = [weight.numpy() for weight in model.trainable_weights]
    step = 0
    for _ in range(epochs):
        history = [newest]
        for place in range(STEPS):
            model.set_weights(history[max(0, place - delay)])
            rows = slice(place * BATCH, (place + 1) * BATCH)
            with tf.GradientTape() as tape:
                loss = LOSS(Y[rows], model(X[rows], training=True))
            gradients = tape.gradient(loss, model.trainable_weights)
            rate = np.float32(schedule(step))
            newest = [w - rate * g.numpy() for w, g in zip(newest, gradients, strict=True)]
            history.append(newest)
            step += 1
    return newest


@pytest.mark.parametrize("delay", [1, 3])
def test_parameters_are_exactly_so_many_steps_old_and_rates_are_those_of_their_steps(
    cluster, delay
):
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.3)
    reference = make_model()
    expected = trained_with_delay(reference, schedule, delay=delay, epochs=2)
    fresh = trained_with_delay(make_model(), schedule, delay=0, epochs=2)
    model = make_model(keras.optimizers.SGD(schedule))
    distribute(model, cluster.contexts[0], pipeline=delay)
    model.fit(X, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    for weight, value, other in zip(model.weights, expected, fresh, strict=True):
        np.testing.assert_allclose(weight.numpy(), value, rtol=2e-5, atol=2e-6)
        assert np.abs(weight.numpy() - other).max() > 1e-3, "the delay is visible"
    assert int(model.optimizer.iterations) == 2 * STEPS == cluster.pushes


def test_every_epoch_ends_with_nothing_in_flight_and_exact_counts(cluster, monkeypatch):
    model = distribute(make_model("adam"), cluster.contexts[0], pipeline=2)
    exchange, seen, sending, lags = model._tfos_trainer, [], [], []
    client = cluster.contexts[0].client
    original = client.push_pull

    def push_pull(*args, **options):
        lags.append(options["lag"])
        return original(*args, **options)

    monkeypatch.setattr(client, "push_pull", push_pull)

    def at_epoch_end(epoch, logs):
        seen.append((cluster.pushes, exchange.steps, exchange.rows, exchange.clock))
        for name, value in cluster.values().items():
            own = next(w for w in model.weights if w.path == name)
            np.testing.assert_array_equal(own.numpy(), value)

    watch = keras.callbacks.LambdaCallback(
        on_epoch_end=at_epoch_end,
        on_train_batch_end=lambda batch, logs: sending.append(
            exchange._attached.exchange.num_in_flight
        ),
    )
    model.fit(
        X, Y, batch_size=BATCH, epochs=3, validation_data=(X, Y), verbose=0, callbacks=[watch]
    )
    expected = [n * STEPS for n in (1, 2, 3)]
    assert seen == [(steps, steps, steps * BATCH, steps) for steps in expected]
    assert sending == 3 * [1, 2, 2, 2, 2, 2]
    assert lags == 3 * [0, 1, 2, 2, 2, 2], "how many of its pushes a step's parameters lacked"
    model.set_weights([weight * 0 for weight in model.get_weights()])
    assert not any(value.any() for value in cluster.values().values())


def test_statistics_of_layers_keep_every_batch(cluster):
    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.Input((20,)), keras.layers.BatchNormalization(momentum=0.5)]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.0), LOSS)
        return model

    plain, model = make(), distribute(make(), cluster.contexts[0], pipeline=1)
    for each in (plain, model):
        each.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    for weight, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-6)


def test_an_error_in_flight_ends_the_next_step_and_what_was_behind_it_is_not_sent(
    cluster, monkeypatch
):
    model = distribute(make_model(), cluster.contexts[0], pipeline=3)
    client, failed = cluster.contexts[0].client, threading.Event()
    begun: list[int] = []
    original = client.push_pull

    def push_pull(*args, **options):
        if len(begun) >= 2:
            failed.set()
            raise PSError("told by a server")
        begun.append(len(begun))
        return original(*args, **options)

    def at_batch_end(batch, logs):
        if batch == 2:
            assert failed.wait(20), "the third push is under way while the fourth step waits"

    monkeypatch.setattr(client, "push_pull", push_pull)
    steps = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: steps.append(batch),
        on_train_batch_end=at_batch_end,
    )
    with pytest.raises(PSError, match="told by a server"):
        model.fit(X, Y, batch_size=BATCH, verbose=0, callbacks=[watch])
    assert (steps[-1], cluster.pushes) == (3, 2)
    monkeypatch.undo()
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert cluster.pushes == 2 + STEPS, "the model is still of use"
    wait_for_no_push_thread()


def wait_for_no_push_thread():
    for thread in push_threads():
        thread.join(20)
    assert not push_threads()


@pytest.mark.fault("F12")
def test_servers_that_end_end_the_training_and_the_thread(cluster):
    model = distribute(make_model(), cluster.contexts[0], pipeline=1)
    cluster.contexts[0].client._servers.times.reconnect_s = 0.1
    stop = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 2 and cluster.servers[0].close()
    )
    with pytest.raises(PSError):
        model.fit(X, Y, batch_size=BATCH, epochs=5, verbose=0, callbacks=[stop])
    wait_for_no_push_thread()


def test_a_users_error_leaves_no_push_behind(cluster):
    model = distribute(make_model(), cluster.contexts[0], pipeline=2)

    def fail(batch, logs):
        if batch == 3:
            raise KeyError("the user's")

    with pytest.raises(KeyError, match="the user's"):
        model.fit(
            X,
            Y,
            batch_size=BATCH,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=fail)],
        )
    assert cluster.pushes == 4
    wait_for_no_push_thread()


def test_what_cannot_be_pipelined_is_refused(cluster):
    ctx = cluster.contexts[0]
    for wrong in (-1, 65, 1.0, True, "1"):
        with pytest.raises(SettingsError, match=f"pipeline must be .* got {wrong!r}"):
            distribute(make_model(), ctx, pipeline=wrong)
    for options in ({"consistency": "sync"}, {"consistency": "ssp", "staleness_bound": 2}):
        with pytest.raises(SettingsError, match="waits for its push"):
            distribute(make_model(), ctx, pipeline=1, **options)
