"""Loss scale of a step: divides gradients by it, and searches a dynamic one.

Covers: the scale of LossScaleOptimizer, and of an optimizer's own `loss_scale_factor`.
Does not: scale the loss; Keras does.      Threads: those of the step.
"""

from __future__ import annotations

from typing import Any

from tfos.keras.step import optimizers
from tfos.keras.step.variables import MASTER_DTYPES


class LossScale:
    """The scale of one model's loss.

    Args:
        optimizer: the model's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.is_searched = optimizers.is_scaled(optimizer)
        """Whether a scale is searched, so that non-finite steps are expected."""
        if self.is_searched and not optimizer.built:
            # Only the scale and its counter are needed here; the slots are on the servers.
            optimizer.build([])

    def removed_from(self, gradient: Any) -> Any:
        """Return a gradient of the loss itself, in the dtype of its master on the servers.

        Args:
            gradient: tensor of the scaled loss. A scale of 65536 or more is infinite in float16.
        """
        import tensorflow as tf

        if self.is_searched:
            scale = self._optimizer.dynamic_scale
        else:
            scale = optimizers.unwrap(self._optimizer).loss_scale_factor
        gradient = tf.cast(gradient, MASTER_DTYPES[gradient.dtype.name])
        return gradient if scale is None else gradient / tf.cast(scale, gradient.dtype)

    def update(self, finite: Any) -> None:
        """Halve a searched scale after a non-finite step, double it after enough finite ones.

        Args:
            finite: scalar bool tensor.
        """
        import tensorflow as tf

        if not self.is_searched:
            return
        scale, counter = self._optimizer.dynamic_scale.value, self._optimizer.step_counter.value
        grown = tf.equal(counter, self._optimizer.dynamic_growth_steps - 1)
        factor = tf.where(finite, tf.where(grown, 2.0, 1.0), 0.5)
        count = tf.where(tf.logical_and(finite, tf.logical_not(grown)), counter + 1, 0)
        scale.assign(scale * factor)
        counter.assign(tf.cast(count, counter.dtype))
