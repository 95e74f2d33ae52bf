"""Rows of a tf.data.Dataset's batches: whether the first slot gets any of them.

Covers: datasets whose batch sizes are known only when they are read.
Does not: divide the batches (tfos.runner.mirrored_rank).
Threads: none of its own.

Some batches may have fewer rows than slots: the last batch of a pass, a file or a bucket of
lengths, anywhere if the dataset shuffles its batches. The first slot then has fewer steps. If no
batch has as many rows as there are slots, it has none at all, and returns a model that it has not
trained.
"""

from __future__ import annotations

import re
from typing import Any

from tfos.errors import SettingsError

_MAX_SMALL = 100
"""Number of first batches that may have fewer rows than slots: a repeating dataset has no end at
which all are seen."""
_TOLD = re.compile(r"the first \d+ batches have at most .*?or fewer slots", re.DOTALL)


def checked(dataset: Any, size: int) -> Any:
    """Return a dataset of the same batches that fails if none has as many rows as there are slots.

    It fails at its end, or at the 100th batch.

    Args:
        dataset: dataset of batches, [batch, ...].
        size: number of slots.
    """
    import keras
    import tensorflow as tf

    optional, spec = tf.experimental.Optional, dataset.element_spec
    spec = spec if type(spec) is tuple else (spec,)  # map passes a named tuple whole

    def wrapped(*batch: Any) -> Any:
        return optional.from_value(batch)

    def nothing(_: Any) -> Any:
        return optional.empty(spec)

    def looked_at(seen: Any, batch: Any) -> Any:
        number, largest = seen
        is_batch = batch.has_value()

        def rows() -> Any:
            return tf.shape(keras.tree.flatten(batch.get_value())[0])[0]

        largest = tf.maximum(largest, tf.cond(is_batch, rows, lambda: 0))
        number += tf.cast(is_batch, tf.int64)
        is_over = tf.logical_or(tf.logical_not(is_batch), number == _MAX_SMALL)
        is_small = (largest < size) & (number > 0)
        text = tf.strings.format(
            f"the first {{}} batches have at most {{}} rows for {size} slots: each batch is shared "
            "by all slots, so the first slot, whose model is returned, would train none. Use "
            "larger batches, or fewer slots",
            (number, largest),
        )
        with tf.control_dependencies([tf.debugging.Assert(~(is_over & is_small), [text])]):
            return (number, tf.identity(largest)), batch

    def is_batch(batch: Any) -> Any:
        return batch.has_value()

    def unwrapped(batch: Any) -> Any:
        return batch.get_value()

    end = tf.data.Dataset.range(1).map(nothing)
    told = dataset.map(wrapped).concatenate(end).scan((tf.zeros((), tf.int64), 0), looked_at)
    return told.filter(is_batch).map(unwrapped)


def refusal_in(error: Exception) -> SettingsError | None:
    """Return the error of a dataset of `checked`; None: the error is another one.

    Args:
        error: an error of TensorFlow that may contain the text.
    """
    found = _TOLD.search(str(error))
    return SettingsError(found[0]) if found else None
