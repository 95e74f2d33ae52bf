"""MirroredStrategyRunner on executors: two slots train what one process does."""

from __future__ import annotations

import numpy as np
import pytest

import tfos

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]


def train(reads_dataset, epochs):
    import keras
    import numpy
    import tensorflow as tf

    x = numpy.random.default_rng(0).normal(size=(1000, 20)).astype("float32")
    y = (x[:, 0] + x[:, 1] > 0).astype("int64")
    keras.utils.set_random_seed(11)
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(1, "sigmoid")]
    model = keras.Sequential([keras.Input((20,)), *layers])
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    if reads_dataset:
        batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
        history = model.fit(batches, epochs=epochs, verbose=0)
    else:
        history = model.fit(x, y, batch_size=64, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights(), int(model.optimizer.iterations), history.history["accuracy"][-1]


@pytest.mark.parametrize("reads_dataset", [False, True])
def test_two_slots_train_what_one_process_does(spark, reads_dataset):
    options = {"reads_dataset": reads_dataset, "epochs": 3}
    two = tfos.MirroredStrategyRunner(num_slots=2, use_gpu=False, sc=spark)
    one = tfos.MirroredStrategyRunner(num_slots=1, use_gpu=False, local_mode=True)
    weights, steps, accuracy = two.run(train, **options)
    expected, expected_steps, expected_accuracy = one.run(train, **options)
    assert (steps, accuracy) == (expected_steps, pytest.approx(expected_accuracy, abs=1e-3))
    for ours, theirs in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_function_that_fits_nothing_is_said(spark):
    runner = tfos.MirroredStrategyRunner(num_slots=2, use_gpu=False, sc=spark)
    with pytest.raises(tfos.NodeFailedError, match=r"without model.fit\(...\), so none of 2 slots"):
        runner.run(nothing)


def nothing():
    return 1
