"""DeepFM in one process by `fit` on a tf.data.Dataset of the files, by Keras 3 or by tf-keras."""

from __future__ import annotations

from typing import Any

from scripts.benchmarks.deepfm_model import LEARNING_RATE, auc, build_model
from scripts.benchmarks.deepfm_turns import Task, read_task, say, turn_callback
from scripts.benchmarks.reference.deepfm_input import batches, labels_of


def stock_model(keras: Any, task: Task) -> Any:
    """Return the model with stock embedding layers, not compiled.

    Args:
        keras: the package.
        task: names the sizes and the seed.
    """

    def embedding(dim: int) -> Any:
        return keras.layers.Embedding(task.num_ids, dim)

    keras.utils.set_random_seed(task.seed)
    return build_model(keras, embedding, tuple(task.hidden))


def train(keras: Any, optimizers: Any) -> None:
    """Train by turns, or for one pass.

    Args:
        keras: the package.
        optimizers: its module of them.
    """
    task = read_task()
    model = stock_model(keras, task)
    optimizer = getattr(optimizers, task.optimizer)(LEARNING_RATE[task.optimizer])
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True))
    data = batches(task.files, task.batch_size)
    say("ready")
    if task.turns:
        model.fit(data, epochs=1 << 30, callbacks=[turn_callback(keras)], verbose=0)
    model.fit(data, verbose=0)
    held_out = batches([task.held_out], 4096)
    say(auc(labels_of(held_out), model.predict(held_out, verbose=0)[:, 0]))
