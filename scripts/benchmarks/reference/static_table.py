"""Rows by id as TensorFlow serves them: a StaticHashTable from id to position, and tf.gather."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def lookup_of(ids: Array, rows: Array) -> Callable[[Array], Array]:
    """Build the table; returns a function from ids to rows.

    Args:
        ids: [n] int64.
        rows: [n, dim].
    """
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    positions = tf.range(ids.size, dtype=tf.int64)
    pairs = tf.lookup.KeyValueTensorInitializer(tf.constant(ids), positions)
    table = tf.lookup.StaticHashTable(pairs, default_value=0)
    values = tf.constant(rows)

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int64)])  # type: ignore[untyped-decorator]  # TensorFlow is untyped
    def look_up(wanted: Any) -> Any:
        return tf.gather(values, table.lookup(wanted))

    def call(wanted: Array) -> Array:
        found: Array = look_up(tf.constant(wanted)).numpy()
        return found

    return call
