"""Rows of a tf.data.Dataset's batches: whether the first slot gets any of them.

Covers: datasets whose number of rows a batch is known only as they are read.
Does not: part the batches (tfos.runner.mirrored_rank).
Threads: none of its own.

Single batches may have fewer rows than slots, also the first ones: the last batch of a pass, of a
file, of a bucket of lengths, in any order if the dataset shuffles its batches. Then the first slot
has fewer steps. Where no batch has as many rows as there are slots it has none at all, and returns
a model that it has not trained.
"""

from __future__ import annotations

import re
from typing import Any

from tfos.errors import SettingsError

_MAX_SMALL = 100
"""Batches from the first one on that may have fewer rows than slots: a dataset that repeats has no
end at which all of them are seen."""
_TOLD = re.compile(r"the first \d+ batches have at most .*?or fewer slots", re.DOTALL)


def checked(dataset: Any, size: int) -> Any:
    """Return a dataset of the same batches that fails if none has as many rows as there are slots.

    It fails at its end, or at the 100th batch.

    Args:
        dataset: of batches, [batch, ...].
        size: number of slots.
    """
    import keras
    import tensorflow as tf

    optional, spec = tf.experimental.Optional, dataset.element_spec
    spec = spec if type(spec) is tuple else (spec,)  # map hands a named tuple on whole

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
    """Return what a dataset of `checked` has failed with; None: the error is another one.

    Args:
        error: of TensorFlow, with the text among its own.
    """
    found = _TOLD.search(str(error))
    return SettingsError(found[0]) if found else None
