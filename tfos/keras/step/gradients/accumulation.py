"""Gradient accumulation: the worker pushes the mean over several batches.

Covers: Keras's `gradient_accumulation_steps`, in the worker's compiled step.
Does not: push (tfos.keras.step.exchange), clip or decay, which act on the mean.      Threads:
those of the step.

As in Keras, a sum that is incomplete when `fit` ends waits for the next `fit`. It exists in this
process only: a restarted worker begins a new one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfos.keras.step import optimizers
from tfos.keras.step.variables import master_dtype


class Accumulator:
    """Sums of the gradients since the last push.

    Args:
        optimizer: the model's optimizer; its iterations count batches, as in Keras.
        variables: the trainable variables.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        import tensorflow as tf

        self._steps = optimizers.batches_per_update(optimizer)
        self._iterations = optimizers.unwrap(optimizer)._iterations.value
        self._count = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._sums = {
            id(variable): tf.Variable(
                tf.zeros(variable.shape, master_dtype(variable)), trainable=False
            )
            for variable in variables
        }

    def add(self, gradients: dict[int, Any], finite: Any) -> tuple[dict[int, Any], Any]:
        """Add a batch's gradients; for compiled functions.

        Args:
            gradients: tensors by id of their variable, with its shape and its `master_dtype`.
            finite: scalar bool tensor; False skips the batch.

        Returns:
            The means since the last push, by id and shaped like `gradients`, and a scalar bool:
            whether they are complete and must be pushed.
        """
        import tensorflow as tf

        last = tf.equal(self._count, self._steps - 1)
        means = {}
        for key, gradient in gradients.items():
            kept = self._sums[key]
            before = kept.read_value()
            total = gradient + before
            means[key] = total / self._steps
            after = tf.where(last, tf.zeros_like(total), total)
            kept.assign(tf.where(finite, after, before))
        return means, last

    def count(self, finite: Any) -> None:
        """Count the batch, at the end of the compiled step, after all reads of its number."""
        import tensorflow as tf

        taken = tf.cast(finite, tf.int64)
        self._count.assign(tf.math.floormod(self._count + taken, self._steps))
        self._iterations.assign_add(tf.cast(taken, self._iterations.dtype))
