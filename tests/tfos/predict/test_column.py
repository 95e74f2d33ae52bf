"""The task that tells a model's names and types, without Spark and without a model."""

from __future__ import annotations

import dataclasses
import resource
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, LongType, StructType, TimestampNTZType, TimestampType

from tests.support.exports import write_export
from tests.support.fake_spark import FakeSpark
from tfos.errors import ExportError, SettingsError, UnsupportedError
from tfos.predict import column
from tfos.predict.column import (
    PredictColumn,
    check_kinds,
    predict_column,
    predicted_by,
    read_signature,
)
from tfos.predict.predictor import OutputColumn, predictor_of
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


def test_an_older_spark_is_told_before_the_model_is_read(monkeypatch):
    monkeypatch.setattr(column, "arrow_udf", lambda: None)
    with pytest.raises(UnsupportedError, match=r"Spark 4\.1, .*inference\(df, model=path\).* work"):
        predict_column("/no/model")


def test_a_model_is_named_by_its_path(monkeypatch):
    """A Keras model in its place was re's "expected string or bytes-like object"."""

    def read(session, source):
        info = {"x": TensorInfo("float32", (None, 3))}
        return ModelSignature(source=source, digest="d", inputs=info, outputs=info)

    session = SimpleNamespace(sparkContext=FakeSpark())
    monkeypatch.setattr(column, "arrow_udf", lambda: print)
    monkeypatch.setattr(column, "active_session", lambda: session)
    monkeypatch.setattr(column, "read_signature", read)
    path: Any = PurePath("/models/7.keras")
    assert predict_column(path).signature.source == predict_column(str(path)).signature.source
    model: Any = {}
    with pytest.raises(SettingsError, match=r"saved one, got dict\. Write it with ctx\.export"):
        predict_column(model)


def test_why_there_is_no_model_is_the_error(monkeypatch):
    def refuse(source):
        raise SettingsError(f"no model {source}")

    monkeypatch.setattr("tfos.predict.loading.read_signature", refuse)
    session: Any = Session()
    with pytest.raises(SettingsError, match="no model a model of 6 bytes"):
        read_signature(session, SOURCE)


def test_a_damaged_export_is_told_by_its_own_sentence(monkeypatch):
    """Spark wrapped it into the trace of a job that it had tried several times."""

    def refuse(source):
        raise ExportError("part-00001.parquet is missing")

    monkeypatch.setattr("tfos.predict.loading.read_signature", refuse)
    session: Any = Session()
    with pytest.raises(SettingsError, match=r"part-00001\.parquet is missing"):
        read_signature(session, SOURCE)


@pytest.mark.parametrize("error", [ImportError("failed to map segment"), MemoryError("no room")])
def test_a_limit_of_the_address_space_is_named_where_tensorflow_does_not_fit(monkeypatch, error):
    def import_tensorflow(source):
        raise error

    monkeypatch.setattr("tfos.predict.loading.read_signature", import_tensorflow)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (700 << 20, resource.RLIM_INFINITY))
    session: Any = Session()
    with pytest.raises(SettingsError, match=r"(map|room).*700 MiB.*Unset spark\.executor\.pyspark"):
        read_signature(session, SOURCE)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    with pytest.raises(type(error)):  # another reason
        read_signature(session, SOURCE)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ({"base": "x"}, r"is a delta of the state x.*without since="),
        ({}, r"has only tables.*ctx\.export\(model, path, tables=\"beside\"\)"),
    ],
)
def test_an_export_that_predicts_nothing_is_refused_before_its_index_is_built(
    tmp_path, monkeypatch, kind, text
):
    def build(*_, **__):
        raise AssertionError("an index was built")

    monkeypatch.setattr("tfos.serving.load", build)
    write_export(tmp_path / "e", {1: 1.0}, **kind)
    session: Any = Session()
    with pytest.raises(SettingsError, match=text):
        read_signature(session, ModelSource(path=str(tmp_path / "e")))


@pytest.mark.parametrize(
    ("default_fs", "path", "whole"),
    [
        ("hdfs://nn", "/models/7", "hdfs://nn/models/7"),
        ("hdfs://nn", "file:///models/7", "file:///models/7"),
        ("file:///", "/models/7.keras", "/models/7.keras"),
        ("file:///", "models/7", "{cwd}/models/7"),
        ("hdfs://nn", "/a b/\0", "/a b/\0"),
    ],
)
def test_a_plain_path_is_where_the_cluster_exports_to(
    default_fs, path, whole, tmp_path, monkeypatch
):
    """Each executor read its own disk, and perhaps an older model there."""

    class Asked(Exception):
        pass

    def asked(session, source):
        raise Asked(source.path)

    monkeypatch.chdir(tmp_path)
    spark = FakeSpark()
    monkeypatch.setattr(spark._jsc, "hadoopConfiguration", lambda: {"fs.defaultFS": default_fs})
    session = SimpleNamespace(sparkContext=spark)
    monkeypatch.setattr(column, "active_session", lambda: session)
    monkeypatch.setattr(column, "read_signature", asked)
    monkeypatch.setattr(column, "check_classic", lambda frame: None)
    frame = SimpleNamespace(sparkSession=session)
    for call in (
        lambda: predict_column(path),
        lambda: predicted_by(frame, path, None, None, "error"),
    ):
        with pytest.raises(Asked) as found:
            call()
        assert str(found.value) == whole.format(cwd=tmp_path)
    with pytest.raises(SettingsError, match="batch_size must be an int >= 1, got 0"):
        predicted_by(frame, path, None, None, "error", 0)


def test_a_model_whose_inputs_have_no_columns_of_their_names_asks_for_columns(monkeypatch):
    info = TensorInfo("float32", (2,))
    signature = ModelSignature(
        source=SOURCE, digest="d", inputs={"a": info, "b": info}, outputs={"y": info}
    )
    monkeypatch.setattr(column, "read_signature", lambda session, source: signature)
    monkeypatch.setattr(column, "check_classic", lambda frame: None)
    monkeypatch.setattr(column, "_whole_path", lambda session, path: path)
    frame = SimpleNamespace(sparkSession=None, columns=["a", "x"])
    text = r"inputs \['a', 'b'\].* no column 'b'. It has \['a', 'x'\]; name the input columns"
    with pytest.raises(SettingsError, match=text):
        predicted_by(frame, "m.keras", None, None, "error")


@pytest.mark.parametrize("rows", [None, {}, "/data.parquet", PurePath("/data.parquet")])
def test_rows_that_are_no_frame_are_refused(rows):
    """They ended in an AttributeError."""
    text = r"rows must be a Spark DataFrame, got (builtins|pathlib)\..*; use spark\.read or "
    with pytest.raises(SettingsError, match=text):
        predicted_by(rows, "m.keras", None, None, "error")


def test_an_output_of_unknown_rank_is_no_number():
    """Its column was a float, and each query failed at the rows' shape."""
    known, unknown = TensorInfo("float32", (2,)), TensorInfo("float32", (), has_rank=False)
    signature = ModelSignature(
        source=SOURCE, digest="d", inputs={"x": known}, outputs={"y": known, "z": unknown}
    )
    predict = predictor_of(signature, ["x"], [OutputColumn("z", "z")], 3)
    text = r"output 'z' has an unknown number of dimensions.*set_shape"
    with pytest.raises(SettingsError, match=text):
        predict.schema()
    assert predictor_of(signature, ["x"], [OutputColumn("y", "y")], 3).schema()
    assert str(unknown) == "float32 of unknown shape"


def test_columns_of_tensorflowonspark_hold_pythons_numbers():
    """They were float and int: an insert into the table of an older program changed its types."""
    dtypes = {
        "f": "float32",
        "h": "float16",
        "d": "float64",
        "i": "int32",
        "u": "uint8",
        "n": "int64",
        "b": "bool",
        "t": "object",
    }
    outputs = {
        name: TensorInfo(dtype, (2,) if name == "f" else ()) for name, dtype in dtypes.items()
    }
    signature = ModelSignature(
        source=SOURCE, digest="d", inputs={"x": TensorInfo("float32", ())}, outputs=outputs
    )
    asked = [OutputColumn(name, name, "python") for name in dtypes]
    predictor = predictor_of(signature, ["x"], asked, 3)
    kinds = ["array<double>", "double", "double", "bigint", "bigint", "bigint", "boolean", "binary"]
    named = (f"`{name}` {kind}" for name, kind in zip(dtypes, kinds, strict=True))
    assert predictor.schema() == ", ".join(named)
    values = [np.zeros((1, 2) if name == "f" else 1, dtype) for name, dtype in dtypes.items()]
    values[-1][:] = b"text"
    found = predictor._joined([values])
    assert [str(each.type) for each in found.columns][:4] == [
        *("list<item: double>", "double", "double", "int64"),
    ]
    assert found.column("t").to_pylist() == [b"text"]


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
    frame: Any = SimpleNamespace(schema=StructType().add("at", kind).add("k", LongType()))
    check_kinds(predictor_of(signature, ["k", "at"], [], 3), frame)
    with pytest.raises(SettingsError, match=r"feature column at: .*takes float32.*F\.hour"):
        check_kinds(predictor_of(signature, ["at", "k"], [], 3), frame)


def test_columns_with_the_names_of_the_inputs_fill_these_in_any_order():
    """Those of a dict are in the order of its sorted keys, and were filled by place."""
    signature = ModelSignature(
        source=SOURCE,
        digest="d",
        inputs=dict.fromkeys(("item", "user"), TensorInfo("float32", ())),
        outputs={"y": TensorInfo("float32", ())},
    )

    def places(*columns, inputs=None):
        return predictor_of(signature, columns, [], 3, inputs).inputs

    assert places("user", "item") == (("user", (0,)), ("item", (1,)))
    assert places("a", "b") == (("item", (0,)), ("user", (1,)))
    assert places("a", "user") == (("item", (0,)), ("user", (1,)))
    text = r"'user' would be the input 'item'.*another input of that name.*, or rename 'user'; "
    with pytest.raises(SettingsError, match=rf"{text}.*inputs=\['item', 'user'\]\) takes"):
        places("user", "b")
    with pytest.raises(SettingsError, match=r"'User' would be the input 'item'.*rename 'User'"):
        places("User", "Item")  # one name to Spark; each filled the other's input
    assert places("Item", "User") == (("item", (0,)), ("user", (1,)))
    # One column may be several inputs.
    assert places("user", "user") == (("item", (0,)), ("user", (1,)))
    # A SavedModel need not record the order of its inputs.
    signature = dataclasses.replace(signature, is_ordered=False)
    assert places("user", "item") == (("user", (0,)), ("item", (1,)))
    for columns in (("a", "b"), ("user", "item", "user")):
        with pytest.raises(SettingsError, match="does not record the order of its inputs item, us"):
            places(*columns)
    # Named at predict_column, they are as they are named.
    assert places("item", "user", inputs=["user", "item"]) == (("user", (0,)), ("item", (1,)))


def test_columns_in_backticks_have_the_names_inside(monkeypatch):
    """Spark takes `a.b` without them as a field: such columns were filled by place, swapped."""
    told: list[tuple[str, ...]] = []

    class Column:  # as Spark's
        def __str__(self) -> str:
            return "Column<'`c.d`'>"

    def made(_: Any, names: tuple[str, ...], *__: Any) -> Any:
        told.append(names)
        return SimpleNamespace(schema=lambda: "`y` float")

    function = SimpleNamespace(asNondeterministic=lambda: lambda *_: SimpleNamespace(alias=str))
    monkeypatch.setattr("pyspark.sql.functions.col", str)
    monkeypatch.setattr(column, "predictor_of", made)
    monkeypatch.setattr(column, "_udf", lambda: lambda *_, **__: function)
    signature = ModelSignature(source=SOURCE, digest="d", inputs={}, outputs={})
    predict = PredictColumn(signature, None, ["y"], 3)
    predict("`a.b`", Column())
    predict("`a``.b`", "`s`.`x`", "x", "`", "```q```")
    predict.udf("`c.d`", "a.b")
    assert told == [("a.b", "c.d"), ("a`.b", "`s`.`x`", "x", "`", "`q`"), ("c.d", "a.b")]
