"""The rows of the DeepFM benchmark as a tf.data.Dataset, batched and then parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def batches(files: Sequence[str], batch_size: int, *, shuffle_files: bool = False) -> Any:
    """Return a dataset of ({"ids", "numbers"}, label), one pass over the files.

    Args:
        files: TFRecord files.
        batch_size: rows of a batch.
        shuffle_files: read them in another order in each process and pass.
    """
    import tensorflow as tf

    spec = {
        "ids": tf.io.FixedLenFeature((26,), tf.int64),
        "numbers": tf.io.FixedLenFeature((13,), tf.float32),
        "label": tf.io.FixedLenFeature((), tf.float32),
    }

    def parsed(records: Any) -> Any:
        columns = tf.io.parse_example(records, spec)
        return {name: columns[name] for name in ("ids", "numbers")}, columns["label"]

    names = tf.data.Dataset.from_tensor_slices(list(files))
    if shuffle_files:
        names = names.shuffle(len(files))
    records = tf.data.TFRecordDataset(names).batch(batch_size)
    return records.map(parsed).prefetch(tf.data.AUTOTUNE)


def labels_of(data: Any) -> Any:
    """Return the labels of all rows of a dataset, float32[n]."""
    import numpy as np

    return np.concatenate([labels for _, labels in data.as_numpy_iterator()])
