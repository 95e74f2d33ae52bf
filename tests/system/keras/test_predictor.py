"""Predictor in this process: models of each kind of input answer Arrow batches."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import pyarrow as pa
import pytest
from pyspark import TaskContext

from tfos.keras import export
from tfos.keras.aligned_memory import aligned
from tfos.predict import loading
from tfos.predict.loading import read_signature
from tfos.predict.predictor import OutputColumn, _tensor, predictor_of
from tfos.predict.signature import ModelSource

pytestmark = [
    pytest.mark.tf,
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras' save
]


def answers(path: str, *batches: pa.RecordBatch, columns: list[str]) -> list[object]:
    signature = read_signature(ModelSource(path=path))
    gc.collect()  # the model itself: what is kept must keep its variables
    (name,) = signature.outputs
    predictor = predictor_of(signature, columns, [OutputColumn(name, "found")], 3, columns)
    return [row for found in predictor.results(0, batches) for row in found.column(0).to_pylist()]


def test_a_model_of_named_inputs_gets_each_column_as_its_input(tmp_path):
    a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b", dtype="int32")
    total = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(a)
    tens = keras.layers.Rescaling(10.0)(b)
    keras.Model({"b": b, "a": a}, keras.layers.Add()([total, tens])).save(tmp_path / "m.keras")
    batches = [
        pa.record_batch(
            {
                "b": pa.array([start, start + 1], pa.int32()),
                "a": pa.array([[1.0, start], [2.0, start]], pa.list_(pa.float32())),
            }
        )
        for start in (0, 5)
    ]
    found = answers(str(tmp_path / "m.keras"), *batches, columns=["b", "a"])
    assert found == [[1.0], [12.0], [56.0], [67.0]]


def test_texts_and_numbers_are_looked_up(tmp_path):
    texts = keras.Input((1,), name="text", dtype="string")
    index = keras.layers.StringLookup(vocabulary=["a", "b"], num_oov_indices=1)(texts)
    keras.Model(texts, index).save(tmp_path / "m.keras")
    batch = pa.record_batch({"text": ["b", "x", "a", "b"]})
    found = answers(str(tmp_path / "m.keras"), batch, columns=["text"])
    assert found == [[2], [0], [1], [2]]


def test_an_aligned_batch_is_the_tensors_memory():
    array = aligned(1024, "float32").reshape(4, 256)
    given = array.view()
    given.flags.writeable = False  # as Arrow's are
    made = _tensor(given)
    array[:] = 7
    assert (made.numpy() == 7).all()


def test_the_class_of_an_output_that_is_not_a_number_is_none(tmp_path):
    x = keras.Input((2,), name="x")
    keras.Model(x, keras.layers.Identity()(x)).save(tmp_path / "m.keras")
    signature = read_signature(ModelSource(path=str(tmp_path / "m.keras")))
    (name,) = signature.outputs
    predictor = predictor_of(signature, ["x"], [OutputColumn(name, "found", "class")], 3)
    rows = [[1.0, 3.0], [float("nan"), 3.0], [1.0, float("nan")], [2.0, 1.0]]
    batch = pa.record_batch({"x": pa.array(rows, pa.list_(pa.float32()))})
    found = [each for made in predictor.results(0, [batch]) for each in made.column(0).to_pylist()]
    assert str(found) == "[1.0, nan, nan, 0.0]"


@pytest.mark.long
def test_models_that_are_not_kept_are_freed(tmp_path, monkeypatch):
    """In a Python worker of Spark, which takes what is kept out of the collector's sight."""
    monkeypatch.setattr(TaskContext, "_taskContext", None)  # which a TaskContext() sets
    monkeypatch.setattr(TaskContext, "get", classmethod(lambda _: TaskContext()))
    monkeypatch.setattr(TaskContext, "cpus", lambda _: 1)
    monkeypatch.setattr(loading, "_loaded", {})
    monkeypatch.setattr(loading, "KEPT", 1)
    load, made = export.load_model, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(export, "load_model", noted)
    x = keras.Input((2,))
    model = keras.Model(x, keras.layers.Dense(1)(x))
    try:
        for number in range(loading.KEPT + 3):
            model.save(tmp_path / f"{number}.keras")
            read_signature(ModelSource(path=str(tmp_path / f"{number}.keras")))
        assert sum(each() is not None for each in made) <= loading.KEPT
    finally:
        gc.unfreeze()
