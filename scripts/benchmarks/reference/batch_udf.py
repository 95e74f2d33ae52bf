"""A DataFrame answered by a Keras model the way Spark's own documentation does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def predictions(frame: Any, path: str, width: int, batch_rows: int) -> Any:
    """Return the DataFrame with a column `prediction` beside its own.

    Args:
        frame: has a column `pixels`, arrays of `width` floats.
        path: of the model.
        width: items of a row.
        batch_rows: rows that the model is given at once.
    """
    from pyspark.ml.functions import predict_batch_udf
    from pyspark.sql.types import ArrayType, FloatType

    def load() -> Callable[[Any], Any]:
        import keras

        model = keras.models.load_model(path)
        return lambda batch: model.predict_on_batch(batch)

    answer = predict_batch_udf(
        load,
        return_type=ArrayType(FloatType()),
        batch_size=batch_rows,
        input_tensor_shapes=[[width]],
    )
    return frame.withColumn("prediction", answer("pixels"))
