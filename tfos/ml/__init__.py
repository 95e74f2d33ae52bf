"""spark.ml: Keras models as estimators and transformers of DataFrames, in pipelines.

Covers: KerasEstimator, KerasModel: Params, persistence, evaluation.
Does not: train (tfos.estimators), predict (tfos.predict).
Public names load on first use: they import pyspark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from tfos.ml.estimator import KerasEstimator
    from tfos.ml.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]

_HOMES = {
    "KerasEstimator": "tfos.ml.estimator",
    "KerasModel": "tfos.ml.model",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
