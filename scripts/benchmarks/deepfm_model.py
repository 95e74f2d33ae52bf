"""The DeepFM that all sides of the benchmark train; only its embedding layers are each side's own.

H. Guo et al., DeepFM: a factorization-machine based neural network for CTR prediction, 2017.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

BATCH_SIZE = 512
DIM = 16
LEARNING_RATE = {"Adagrad": 0.02, "Adam": 1e-3}
NUM_COLUMNS = 26
NUM_NUMBERS = 13

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Size:
    """How large the model and its data are."""

    num_ids: int = 1_000_000
    hidden: tuple[int, ...] = (400, 400, 400)
    num_examples: int = 415_744
    """Rows to train with, in all files together: 406 batches of 1,024."""
    num_held_out: int = 102_400
    num_workers: int = 2
    turn_steps: int = 60
    """Steps of each process in a turn."""


TOY = Size(
    num_ids=2600, hidden=(16,), num_examples=8192, num_held_out=2048, num_workers=1, turn_steps=3
)


def build_model(keras: Any, embedding: Callable[[int], Any], hidden: tuple[int, ...]) -> Any:
    """Return the model: first order, factorization machine and perceptron, summed to a logit.

    Args:
        keras: the package, Keras 3 or tf-keras.
        embedding: returns a layer from int64[batch, 26] to [batch, 26, dim].
        hidden: units of the perceptron's layers.
    """
    import tensorflow as tf

    class FactorizationMachine(keras.layers.Layer):  # type: ignore[misc]
        """First order and pairs: [batch, 26, 1] and [batch, 26, dim] to [batch, 1]."""

        def call(self, first_order: Any, rows: Any) -> Any:
            squared = tf.square(tf.reduce_sum(rows, axis=1))
            pairs = squared - tf.reduce_sum(tf.square(rows), axis=1)
            return tf.reduce_sum(first_order, axis=1) + 0.5 * tf.reduce_sum(
                pairs, axis=1, keepdims=True
            )

    layers = keras.layers
    ids = keras.Input((NUM_COLUMNS,), dtype="int64", name="ids")
    numbers = keras.Input((NUM_NUMBERS,), name="numbers")
    rows = embedding(DIM)(ids)
    deep = layers.Concatenate()([layers.Flatten()(rows), numbers])
    for units in hidden:
        deep = layers.Dense(units, activation="relu")(deep)
    machine = FactorizationMachine()(embedding(1)(ids), rows)
    logit = layers.Add()([machine, layers.Dense(1)(numbers), layers.Dense(1)(deep)])
    return keras.Model({"ids": ids, "numbers": numbers}, logit)


def auc(labels: Array, scores: Array) -> float:
    """Return the area under the ROC curve: the share of pairs in the right order.

    Args:
        labels: [n] of 0 and 1.
        scores: [n] floats.
    """
    found, place = np.unique(scores, return_inverse=True)
    above = np.bincount(place, labels, len(found))
    below = np.bincount(place, 1 - labels, len(found))
    right = above @ (np.cumsum(below) - below / 2)
    return float(right / (above.sum() * below.sum()))
