"""A DataFrame answered by a Keras model the way Spark's own documentation does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def predictions(frame: Any, path: str, width: int, batch_rows: int) -> Any:
    """Return the DataFrame with a column `prediction` beside its own, by a traced function.

    Args:
        frame: has a column `pixels`, arrays of `width` floats.
        path: the model's path.
        width: items of a row.
        batch_rows: rows that the model is given at once.
    """
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    def load() -> Callable[[Any], Any]:
        import keras
        import tensorflow as tf

        model = keras.models.load_model(path)
        run = tf.function(
            lambda x: model(x, training=False),
            input_signature=[tf.TensorSpec((None, width), tf.float32)],
        )
        return lambda batch: run(tf.constant(batch)).numpy()

    answer = predict_batch_udf(
        load,
        return_type=ArrayType(FloatType()),
        batch_size=batch_rows,
        input_tensor_shapes=[[width]],
    )
    return frame.withColumn("prediction", answer("pixels"))


def naive_predictions(frame: Any, path: str) -> Any:
    """Return the same by a pandas_udf that calls `model.predict` per Arrow batch.

    Args:
        frame: has a column `pixels`, arrays of floats.
        path: the model's path.
    """
    import pandas as pd  # type: ignore[import-untyped]  # pandas has no types
    from pyspark.sql.functions import pandas_udf

    def answer(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        import keras
        import numpy as np

        model = keras.models.load_model(path)
        for batch in batches:
            yield pd.Series(list(model.predict(np.stack(batch.tolist()), verbose=0)))

    answer.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    return frame.withColumn("prediction", pandas_udf(answer, "array<float>")("pixels"))
