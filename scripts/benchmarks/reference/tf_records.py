"""TFRecord files read as TensorFlow's guide to fast input says: batched, then parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feeding.formats.tfrecord.example import Feature


def read(path: str, columns: dict[str, tuple[Any, str]], batch_rows: int) -> int:
    """Read the file into numpy batches; returns how many rows it had."""
    import tensorflow as tf

    spec = {
        name: tf.io.FixedLenFeature(shape, tf.as_dtype(dtype))
        for name, (shape, dtype) in columns.items()
    }
    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    records = tf.data.TFRecordDataset(path).batch(batch_rows)
    batches = records.map(lambda batch: tf.io.parse_example(batch, spec)).prefetch(2)
    first = next(iter(columns))
    return sum(len(batch[first]) for batch in batches.with_options(options).as_numpy_iterator())


def parser(records: Sequence[bytes], columns: Mapping[str, Feature]) -> Callable[[], Any]:
    """Return a call that parses the records, batched as one tensor, into tensors."""
    import tensorflow as tf

    def spec(feature: Feature) -> Any:
        dtype = tf.string if feature.dtype == "bytes" else tf.as_dtype(feature.dtype)
        if feature.shape is None:
            return tf.io.RaggedFeature(dtype)
        return tf.io.FixedLenFeature(feature.shape, dtype)

    specs = {name: spec(feature) for name, feature in columns.items()}
    batch = tf.constant(records)
    parse = tf.function(lambda serialized: tf.io.parse_example(serialized, specs))
    return lambda: parse(batch)
