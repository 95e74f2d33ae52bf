"""The task that tells a model's names and types, without Spark and without a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, LongType, StructType, TimestampNTZType, TimestampType

from tfos.errors import SettingsError
from tfos.predict.column import check_kinds, read_signature
from tfos.predict.predictor import predictor_of
from tfos.predict.signature import ModelSignature, ModelSource, TensorInfo

SOURCE = ModelSource(content=b"a file", custom_objects={"f": print})


class Session:
    """Runs the task of a DataFrame of one row here, and takes note of what it has left of that."""

    left: Any = None

    def range(self, *_: int) -> Session:
        return self

    def mapInArrow(self, task: Any, schema: str) -> Session:
        assert schema == "found binary"
        self._task = task
        return self

    def collect(self) -> list[Any]:
        batches = iter([pa.record_batch({"id": [0]})])
        rows = [row for batch in self._task(batches) for row in batch.to_pylist()]
        self.left = next(batches, None)
        return [SimpleNamespace(**row) for row in rows]


def test_a_task_tells_names_and_types_in_order_and_takes_all_it_is_sent(monkeypatch):
    """Spark ends a Python worker that leaves rows: what it has loaded would be loaded again."""
    signature = ModelSignature(
        source=SOURCE,
        digest="d",
        inputs={"z": TensorInfo("float32", (None, 3)), "a": TensorInfo("object", (), True)},
        outputs={"y": TensorInfo("int64", (2,))},
    )
    monkeypatch.setattr("tfos.predict.loading.read_signature", lambda source: signature)
    session: Any = Session()
    found = read_signature(session, SOURCE)
    assert found == signature
    assert list(found.inputs) == ["z", "a"]
    assert session.left is None


def test_why_there_is_no_model_is_the_error(monkeypatch):
    def refuse(source):
        raise SettingsError(f"no model {source}")

    monkeypatch.setattr("tfos.predict.loading.read_signature", refuse)
    session: Any = Session()
    with pytest.raises(SettingsError, match="no model a model of 6 bytes"):
        read_signature(session, SOURCE)


def test_a_struct_is_refused_before_a_job():
    """Its fields have no names that a transformer takes."""
    signature = ModelSignature(
        source=SOURCE,
        digest="d",
        inputs={"x": TensorInfo("float32", (2,))},
        outputs={"y": TensorInfo("float32", ())},
    )
    kinds = StructType().add("n", LongType()).add("s", StructType().add("x", LongType()))
    frame: Any = SimpleNamespace(schema=kinds)
    text = (
        r"column 's' is struct<x:bigint>; select its fields .*withColumn\('x', F\.col\('s\.x'\)\)"
    )
    with pytest.raises(SettingsError, match=text):
        check_kinds(predictor_of(signature, ["n", "s"], [], 3), frame)


@pytest.mark.parametrize("kind", [TimestampType(), TimestampNTZType(), ArrayType(TimestampType())])
def test_timestamps_for_floats_are_refused_before_a_job(kind):
    signature = ModelSignature(
        source=SOURCE,
        digest="d",
        inputs={"x": TensorInfo("float32", ()), "n": TensorInfo("int64", ())},
        outputs={"y": TensorInfo("float32", ())},
    )
    frame: Any = SimpleNamespace(schema=StructType().add("at", kind).add("n", LongType()))
    check_kinds(predictor_of(signature, ["n", "at"], [], 3), frame)
    with pytest.raises(SettingsError, match=r"feature column at: .*takes float32.*F\.hour"):
        check_kinds(predictor_of(signature, ["at", "n"], [], 3), frame)
