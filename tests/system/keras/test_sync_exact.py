"""Sync training is the training of one process, bit for bit."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from tests.support.keras_training import blobs, serving, together
from tfos.keras.fit.distribute import distribute

tf = pytest.importorskip("tensorflow")

pytestmark = [
    pytest.mark.tf,
    pytest.mark.timeout(110),
    pytest.mark.usefixtures("deterministic"),
]

STEPS = 50
BATCH = 32
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
    "schedule": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
    ),
}


ONCE = ("schedule",)
"""A rule with slots and one with a rate that changes; test_optimizer_parity.py has all rules."""


def make_model(optimizer):
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((20,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(2)]
    )
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    return model


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in ONCE)) for name in OPTIMIZERS],
)
def test_one_sync_worker_equals_keras_bit_for_bit(name):
    x, y = blobs(STEPS * BATCH)
    plain = make_model(OPTIMIZERS[name]())
    expected = plain.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    with serving(num_servers=2) as cluster:
        model = distribute(make_model(OPTIMIZERS[name]()), cluster.contexts[0], consistency="sync")
        history = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        for weight, reference in zip(model.weights, plain.weights, strict=True):
            np.testing.assert_array_equal(weight.numpy(), reference.numpy())
        assert history.history == expected.history
        assert int(model.optimizer.iterations) == STEPS == cluster.pushes
        held = cluster.values()
        for weight in model.trainable_weights:
            np.testing.assert_array_equal(held[weight.path], weight.numpy())


def reduced_in_rank_order(model, shards):
    """One process that computes each shard's gradient and applies their mean, weighted by rows."""

    @tf.function(autograph=False, jit_compile=False)
    def gradient(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True))
        return tape.gradient(loss, model.trainable_weights)

    for batches in zip(*shards, strict=True):
        rows = [len(y) for _, y in batches]
        per_worker = [gradient(tf.constant(x), tf.constant(y)) for x, y in batches]
        total = np.float32(sum(rows))
        mean = []
        for parts in zip(*per_worker, strict=True):
            weights = [np.float32(count) / total for count in rows]
            products = [part.numpy() * w for part, w in zip(parts, weights, strict=True)]
            summed = products[0]
            for product in products[1:]:
                summed = summed + product
            mean.append(tf.constant(summed))
        model.optimizer.apply(mean, model.trainable_variables)


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.long), "adam"])
def test_two_sync_workers_equal_one_process_that_reduces_two_shards(name):
    x, y = blobs(2 * STEPS * BATCH)
    half = STEPS * BATCH
    parts = [(x[:half], y[:half]), (x[half:], y[half:])]
    shards = [
        [(px[i : i + BATCH], py[i : i + BATCH]) for i in range(0, half, BATCH)] for px, py in parts
    ]
    oracle = make_model(OPTIMIZERS[name]())
    reduced_in_rank_order(oracle, shards)
    with serving(num_workers=2) as cluster:
        models = [make_model(OPTIMIZERS[name]()) for _ in range(2)]

        def work(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            px, py = parts[rank]
            return model.fit(px, py, batch_size=BATCH, shuffle=False, verbose=0).history

        histories = together(work, 2)
        assert histories[0] == histories[1], "combined metrics are everybody's logs"
        for model in models:
            for weight, reference in zip(model.weights, oracle.weights, strict=True):
                np.testing.assert_array_equal(weight.numpy(), reference.numpy())


@pytest.mark.parametrize(
    ("clip", "num_servers"),
    [
        pytest.param("clipnorm", 2, marks=pytest.mark.long),
        ("global_clipnorm", 2),
        pytest.param("clipvalue", 1, marks=pytest.mark.long),
    ],
)
def test_clipping_acts_on_the_mean_of_two_sync_workers(clip, num_servers):
    steps = 5
    x, y = blobs(2 * steps * BATCH)
    half = steps * BATCH
    parts = [(x[:half], y[:half]), (x[half:], y[half:])]
    shards = [
        [(px[i : i + BATCH], py[i : i + BATCH]) for i in range(0, half, BATCH)] for px, py in parts
    ]
    limit = {clip: 0.02 if clip == "clipvalue" else 0.1}
    oracle = make_model(keras.optimizers.SGD(0.5, momentum=0.9, **limit))
    reduced_in_rank_order(oracle, shards)
    with serving(num_workers=2, num_servers=num_servers) as cluster:
        models = [make_model(keras.optimizers.SGD(0.5, momentum=0.9, **limit)) for _ in range(2)]

        def work(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            px, py = parts[rank]
            model.fit(px, py, batch_size=BATCH, shuffle=False, verbose=0)

        together(work, 2)
        for one, two in zip(models[0].weights, models[1].weights, strict=True):
            np.testing.assert_array_equal(one.numpy(), two.numpy())
    for weight, expected in zip(models[0].weights, oracle.weights, strict=True):
        ulp = np.spacing(np.abs(expected.numpy()).max())
        assert np.abs(weight.numpy() - expected.numpy()).max() <= 2 * ulp


def test_workers_with_uneven_epochs_end_them_together():
    x, y = blobs(10 * BATCH)
    with serving(num_workers=2) as cluster:
        models = [make_model(keras.optimizers.SGD(0.1)) for _ in range(2)]

        def work(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            rows = (3 if rank else 10) * BATCH
            return model.fit(x[:rows], y[:rows], batch_size=BATCH, epochs=2, verbose=0).history

        histories = together(work, 2)
        assert histories[0] == histories[1]
        assert (cluster.rows(0), cluster.rows(1)) == (20 * BATCH, 6 * BATCH)
        stats = cluster.servers[0].stats()
        assert stats.clock == 20, "10 barriers an epoch: 3 of both, 7 of worker 0 alone"
        for one, two in zip(models[0].weights, models[1].weights, strict=True):
            np.testing.assert_array_equal(one.numpy(), two.numpy())


def test_statistics_are_the_mean_over_the_workers_after_each_step():
    """A running mean by halves of 0 on one worker, and of 8 on the other."""
    keras.utils.set_random_seed(7)
    models = []
    seen: dict[int, list[float]] = {}
    for _ in range(2):
        layers = [keras.Input((1,)), keras.layers.BatchNormalization(momentum=0.5)]
        models.append(keras.Sequential([*layers, keras.layers.Dense(1)]))
        models[-1].compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    with serving(num_workers=2) as cluster:

        def work(rank):
            model = distribute(models[rank], cluster.contexts[rank], consistency="sync")
            mean, found = model.layers[0].moving_mean, seen.setdefault(rank, [])
            watch = keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: found.append(float(mean[0]))
            )
            x = np.full((8, 1), 8.0 * rank, "float32")
            model.fit(x, x, batch_size=4, callbacks=[watch], shuffle=False, verbose=0)

        together(work, 2)
    assert seen == {0: [2.0, 3.0], 1: [2.0, 3.0]}
