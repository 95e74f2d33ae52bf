"""DeepFM in one process by tf-keras, Keras 2: `fit` on a tf.data.Dataset of the files."""

from __future__ import annotations

from typing import Any

import tf_keras

from scripts.benchmarks.deepfm_model import LEARNING_RATE, auc, build_model
from scripts.benchmarks.deepfm_turns import Task, read_task, say, turn_callback
from scripts.benchmarks.reference.deepfm_input import batches, labels_of


def compiled_model(task: Task) -> Any:
    """Return the model with stock embedding layers and an optimizer that updates rows alone."""

    def embedding(dim: int) -> Any:
        return tf_keras.layers.Embedding(task.num_ids, dim)

    tf_keras.utils.set_random_seed(task.seed)
    model = build_model(tf_keras, embedding, tuple(task.hidden))
    kind = getattr(tf_keras.optimizers.legacy, task.optimizer)
    optimizer = kind(LEARNING_RATE[task.optimizer])
    model.compile(optimizer, tf_keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def main() -> None:
    task = read_task()
    model = compiled_model(task)
    data = batches(task.files, task.batch_size)
    say("ready")
    if task.turns:
        model.fit(data, epochs=1 << 30, callbacks=[turn_callback(tf_keras)], verbose=0)
    model.fit(data, verbose=0)
    held_out = batches([task.held_out], 4096)
    say(auc(labels_of(held_out), model.predict(held_out, verbose=0)[:, 0]))


if __name__ == "__main__":
    main()
