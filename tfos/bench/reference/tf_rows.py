"""Gather and sparse Adagrad with TensorFlow's own kernels on a dense variable, one thread."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class TfRows:
    """A variable [num_rows, dim] with its accumulator; rows are found by their number.

    Args:
        num_rows: rows of the variable.
        dim: elements of a row.
    """

    def __init__(self, num_rows: int, dim: int) -> None:
        import tensorflow as tf

        self._gather = tf.raw_ops.ResourceGather
        self._apply = tf.raw_ops.ResourceSparseApplyAdagradV2
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        with tf.device("CPU:0"):
            self._values = tf.Variable(tf.zeros((num_rows, dim)))
            self._accumulator = tf.Variable(tf.fill((num_rows, dim), 0.1))
        self._dtype = tf.float32
        self._rate = tf.constant(0.1)
        self._epsilon = tf.constant(1e-7)

    def gather(self, rows: Any) -> Any:
        """Return the values of these rows, a tensor."""
        return self._gather(resource=self._values.handle, indices=rows, dtype=self._dtype)

    def update(self, rows: Any, grads: Any) -> None:
        """Apply Adagrad to these rows.

        Args:
            rows: [n] int64, distinct.
            grads: [n, dim] float32.
        """
        self._apply(
            var=self._values.handle,
            accum=self._accumulator.handle,
            lr=self._rate,
            epsilon=self._epsilon,
            grad=grads,
            indices=rows,
        )


def as_tensor(array: Array) -> Any:
    """Return the array as a tensor, made before the clock runs."""
    import tensorflow as tf

    return tf.constant(array)
