"""`fit` with each optimizer through a server equals plain Keras, in sync mode with one worker."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest

from ps.errors import NonFiniteGradient
from tests.support.keras_training import blobs, serving, together
from tfos.errors import UnsupportedModel, UnsupportedOptimizer
from tfos.keras.fit.distribute import distribute

pytest.importorskip("tensorflow")

pytestmark = [pytest.mark.tf, pytest.mark.timeout(110)]

BATCH = 8
X, Y = blobs(12 * BATCH, num_features=6)


def make(name, *args, **settings):
    return functools.partial(getattr(keras.optimizers, name), *args, **settings)


def without_decay_of_biases():
    optimizer = keras.optimizers.Lion(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def warming_up():
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, 10, 0.01)
    return keras.optimizers.SGD(schedule, momentum=0.9, gradient_accumulation_steps=2)


EQUAL = {
    "amsgrad": make("AdamW", 0.01, amsgrad=True),
    "adamax": make("Adamax", 0.01),
    "ftrl": make("Ftrl", 0.1, l1_regularization_strength=0.001, beta=0.1),
    "lion without decay of biases": without_decay_of_biases,
    "averages that replace the weights": make(
        "AdamW", 0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=5
    ),
    "accumulation over 2 batches with a schedule": warming_up,
    "accumulation over 5 batches, 2 left": make("Adam", 0.01, gradient_accumulation_steps=5),
}
"""Equal bit for bit."""

NEAR = {
    "adagrad": make("Adagrad", 0.1),
    "rmsprop": make("RMSprop", 0.01),
    "rmsprop with everything": make("RMSprop", 0.01, momentum=0.5, centered=True, epsilon=1e-3),
    "adadelta": make("Adadelta", 1.0),
    "nadam": make("Nadam", 0.01),
    "accumulation with a global clip": make(
        "SGD", 0.1, global_clipnorm=0.1, gradient_accumulation_steps=3
    ),
}
"""Equal but for the last bits of a step's root, power or norm, and what they lead to."""


ITS_RULE_ALONE = {
    *("adamax", "ftrl", "adagrad", "rmsprop", "rmsprop with everything", "adadelta", "nadam"),
    *("amsgrad", "lion without decay of biases", "averages that replace the weights"),
}
"""Nothing but the rule is special, which test_optimizer_parity.py compares bit by bit."""


def model_with(optimizer):
    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(2)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def fit(model, epochs=1):
    model.fit(X, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ITS_RULE_ALONE))
        for name in (*EQUAL, *NEAR)
    ],
)
def test_one_sync_worker_equals_keras(name):
    optimizer = (EQUAL | NEAR)[name]
    plain = model_with(optimizer())
    fit(plain)
    with serving() as cluster:
        model = distribute(model_with(optimizer()), cluster.contexts[0], consistency="sync")
        fit(model)
        assert cluster.pushes == 12 // (plain.optimizer.gradient_accumulation_steps or 1)
        assert int(model.optimizer._iterations) == int(plain.optimizer._iterations) == 12
    tolerance = 0.0 if name in EQUAL else 16 * float(np.finfo(np.float32).eps)
    for weight, reference in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), reference.numpy(), rtol=0, atol=tolerance)


def test_an_incomplete_sum_waits_for_the_next_epoch():
    """12 batches an epoch, 5 an update: as in Keras the rest of an epoch opens the next sum."""
    optimizer = EQUAL["accumulation over 5 batches, 2 left"]
    plain = model_with(optimizer())
    fit(plain, epochs=2)
    with serving() as cluster:
        model = distribute(model_with(optimizer()), cluster.contexts[0], consistency="sync")
        fit(model, epochs=2)
        assert (cluster.pushes, cluster.rows(0)) == (4, 4 * 5 * BATCH)
        assert int(model.optimizer._iterations) == int(plain.optimizer._iterations) == 24
    for weight, reference in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), reference.numpy())


def normalizing_model():
    keras.utils.set_random_seed(7)
    layers = [keras.Input((6,)), keras.layers.BatchNormalization(momentum=0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def test_statistics_of_layers_keep_the_batches_of_an_incomplete_sum():
    """No push has them yet, so a pull would undo them: at an epoch's end, or by predict."""
    plain = normalizing_model()
    with serving() as cluster:
        model = distribute(normalizing_model(), cluster.contexts[0], consistency="sync")
        for each in (plain, model):
            fit(each, epochs=2)
            each.predict(X, verbose=0)
            fit(each)
    for weight, reference in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight.numpy(), reference.numpy(), rtol=1e-4, atol=1e-6)


def test_statistics_of_a_step_that_failed_are_the_servers_again():
    with serving() as cluster:
        model = distribute(normalizing_model(), cluster.contexts[0], consistency="sync")
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        with pytest.raises(NonFiniteGradient):
            model.train_on_batch(X[:BATCH] * np.inf, Y[:BATCH])
        assert np.isfinite(model.predict(X, verbose=0)).all()


def test_a_batch_that_is_not_finite_is_left_out_of_the_sum():
    optimizer = make("SGD", 0.1, gradient_accumulation_steps=2)
    plain = model_with(optimizer())
    kept = [X[i : i + BATCH] for i in range(0, 4 * BATCH, BATCH)]
    labels = [Y[i : i + BATCH] for i in range(0, 4 * BATCH, BATCH)]
    for x, y in zip(kept, labels, strict=True):
        plain.train_on_batch(x, y)
    with serving() as cluster:
        model = model_with(optimizer())
        distribute(model, cluster.contexts[0], consistency="sync", on_nonfinite="skip")
        bad = np.full_like(kept[0], np.nan)
        x = np.concatenate([kept[0], bad, *kept[1:]])
        y = np.concatenate([labels[0], labels[0], *labels[1:]])
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert (cluster.pushes, cluster.null_pushes(), cluster.rows(0)) == (2, 0, 4 * BATCH)
    for weight, reference in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_array_equal(weight.numpy(), reference.numpy())


def test_two_workers_accumulate_and_push_together():
    with serving(num_workers=2) as cluster:
        models = [model_with(make("SGD", 0.1, gradient_accumulation_steps=3)()) for _ in range(2)]

        def work(rank):
            fit(distribute(models[rank], cluster.contexts[rank], consistency="sync"))

        together(work, 2)
        assert (cluster.rows(0), cluster.rows(1)) == (len(X), len(X))
        assert cluster.servers[0].stats().clock == 4
    plain = model_with(make("SGD", 0.1, gradient_accumulation_steps=3)())
    fit(plain)  # both workers had the same rows, so their mean is each one's gradient
    for model in models:
        for weight, reference in zip(model.weights, plain.weights, strict=True):
            np.testing.assert_allclose(weight.numpy(), reference.numpy(), atol=1e-7)


@pytest.mark.parametrize("optimizer", [make("Ftrl", 0.1), make("RMSprop", 0.1, epsilon=0.0)])
def test_variables_without_gradient_are_refused_where_zeros_would_move_them(optimizer):
    inputs = keras.Input((6,))
    unused = keras.layers.Dense(3, name="unused")
    unused(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.extra = unused
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(), loss, jit_compile=False)
    with serving() as cluster:
        distribute(model, cluster.contexts[0], consistency="sync")
        with pytest.raises(UnsupportedModel, match=r"unused/kernel.* changes values whose grad"):
            fit(model)
        assert cluster.pushes == 0


def test_a_class_of_ones_own_is_refused_also_around_a_known_optimizer():
    class Careful(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]  # no types
        pass

    class Slower(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
        pass

    with serving() as cluster:
        for optimizer in (Careful(keras.optimizers.SGD()), Slower()):
            with pytest.raises(UnsupportedOptimizer, match=type(optimizer).__name__):
                distribute(model_with(optimizer), cluster.contexts[0])
