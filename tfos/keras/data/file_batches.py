"""Batches of numpy columns as a tf.data.Dataset.

Does not: read files (feeding.reading.reader).      Threads: tf.data's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from feeding.columnar.schema import ColumnSpec, Schema
from feeding.receiver.batch_reader import BatchColumn, Ragged


def tf_dataset(epoch: Callable[[], Iterator[dict[str, BatchColumn]]], schema: Schema) -> Any:
    """Return a dataset whose every iteration takes one epoch's batches."""
    import tensorflow as tf

    def tensors() -> Iterator[dict[str, Any]]:
        for columns in epoch():
            yield {name: _tensor(column) for name, column in columns.items()}

    signature = {spec.name: _spec(spec) for spec in schema.columns}
    return tf.data.Dataset.from_generator(tensors, output_signature=signature)


def _tensor(column: BatchColumn) -> Any:
    import tensorflow as tf

    if isinstance(column, Ragged):
        return tf.RaggedTensor.from_row_splits(column.values, column.offsets, validate=False)
    return column


def _spec(spec: ColumnSpec) -> Any:
    import tensorflow as tf

    dtype = tf.string if spec.kind in ("bytes", "str") else tf.as_dtype(spec.dtype)
    if spec.kind == "ragged":
        return tf.RaggedTensorSpec((None, None), dtype, ragged_rank=1, row_splits_dtype=tf.int64)
    return tf.TensorSpec((None, *spec.shape), dtype)
