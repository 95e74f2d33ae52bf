"""Sources of rows for calls outside of a prepared step: evaluation, inference, a plain `model(x)`.

Covers: the interface, the source of a layer that has none, the lookup inside a graph.
Does not: train (tfos.keras.step.tables).
Threads: TensorFlow calls a source from its own threads, several at a time.

A graph that contains such a lookup runs in this process only; exports replace the layers
(tfos.keras.export).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class RowSource(Protocol):
    """Rows by table and key."""

    def rows(self, table: str, keys: Array, *, training: bool = False) -> Array | None:
        """Return the rows of keys: [n, dim] of the table's dtype; None: the table is not there.

        Args:
            table: its name.
            keys: [n] int64.
            training: an id without a row has the values that its row would start with; otherwise
                the table's `unseen`.
        """


class _NoRows:
    """The source of a layer whose table does not exist yet."""

    def rows(self, table: str, keys: Array, *, training: bool = False) -> Array | None:  # noqa: ARG002
        return None


NO_ROWS: RowSource = _NoRows()


def rows_for(layer: Any, keys: Array, *, training: bool) -> Array:
    """Return the rows of one call, [n, dim] float32; zeros for padding.

    Args:
        layer: the Embedding.
        keys: [n] int64.
        training: as RowSource.rows.
    """
    rows = np.zeros((keys.size, layer.dim), np.float32)
    kept = slice(None) if layer.pad_key is None else keys != layer.pad_key
    found = layer.source.rows(layer.table, keys[kept], training=training) if keys.size else None
    if found is not None:
        rows[kept] = found
    elif layer.settings.unseen:
        rows[kept] = layer.settings.unseen
    return rows


def looked_up(layer: Any, keys: Any, *, training: bool) -> Any:
    """Return the rows of one call as a tensor [n, dim], looked up when the step runs.

    Args:
        layer: the Embedding.
        keys: [n] int64 tensor.
        training: as RowSource.rows.
    """
    import tensorflow as tf

    def look_up(flat: Array) -> Array:
        return rows_for(layer, flat, training=training)

    # Stateful: another call with the same ids may find other rows.
    return tf.numpy_function(look_up, [keys], tf.float32, stateful=True)
