"""Keras alone: the model of keras_step and the seconds of each of its `fit` steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np


def build_model(hidden: int) -> Any:
    """A perceptron; `hidden=800` has 1.28 million parameters."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss="sparse_categorical_crossentropy",
        jit_compile=False,
    )
    return model


def digits_like(num_rows: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Random images and labels; a step costs the same for any numbers."""
    random = np.random.default_rng(0)
    images = random.random((num_rows, 784), dtype=np.float32)
    return images, random.integers(0, 10, num_rows)


def step_seconds(model: Any, x: Any, y: Any, batch_size: int, skip: int) -> list[float]:
    """Run `fit` and return how long each step took, without the first `skip` (tracing)."""
    import keras

    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter())  # noqa: ARG005  # Keras passes both by name
    )
    model.fit(x, y, batch_size=batch_size, epochs=1, verbose=0, callbacks=[clock])
    return [float(value) for value in np.diff(ends)[skip:]]
