"""KerasModel without a cluster: what is refused before a node starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import DecimalType, DoubleType, StructField, StructType

from tfos.errors import SettingsError
from tfos.ml import KerasModel
from tfos.predict.signature import ModelSignature, ModelSource, TensorInfo


def test_floats_for_ids_are_refused_before_an_evaluation_starts_a_node():
    model = KerasModel(b"m").setFeaturesCol("x").setLabelCol("y")
    model._signature = ModelSignature(
        source=ModelSource(content=b"m"),
        digest="d",
        inputs={"id": TensorInfo("int64", (), is_id=True)},
        outputs={"y": TensorInfo("float32", (1,))},
    )
    fields = [StructField("x", DecimalType(20, 0)), StructField("y", DoubleType())]
    frame: Any = SimpleNamespace(schema=StructType(fields), sparkSession=None)
    with pytest.raises(SettingsError, match=r"column x: decimal: the model takes ids of int64"):
        model.evaluate(frame)
