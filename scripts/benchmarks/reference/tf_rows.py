"""Gather and sparse Adagrad with TensorFlow's own kernels on a dense variable, one thread."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import numpy as np
import tensorflow as tf

Array = np.ndarray[Any, Any]


class TfRows:
    """A variable [num_rows, dim] with its accumulator; rows are found by their number."""

    def __init__(self, num_rows: int, dim: int) -> None:
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        with tf.device("CPU:0"):
            self._values = tf.Variable(tf.zeros((num_rows, dim)))
            self._accumulator = tf.Variable(tf.fill((num_rows, dim), 0.1))
        self._rate = tf.constant(0.1)
        self._epsilon = tf.constant(1e-7)

    def gather(self, rows: Any) -> Any:
        """Return the values of these rows, a tensor."""
        return tf.raw_ops.ResourceGather(
            resource=self._values.handle, indices=rows, dtype=tf.float32
        )

    def update(self, rows: Any, grads: Any) -> None:
        """Apply Adagrad to these rows."""
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=self._values.handle,
            accum=self._accumulator.handle,
            lr=self._rate,
            epsilon=self._epsilon,
            grad=grads,
            indices=rows,
        )


def as_tensor(array: Array) -> Any:
    """Return the array as a tensor, made before the clock runs."""
    return tf.constant(array)
