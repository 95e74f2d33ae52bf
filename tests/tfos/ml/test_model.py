"""KerasModel without a cluster: what is refused before a node starts."""

from __future__ import annotations

import dataclasses
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.sql.types import DecimalType, DoubleType, StructField, StructType

from tests.support.model_files import keras_file
from tfos.config import ClusterConfig
from tfos.errors import NotCompiled, SettingsError
from tfos.estimators.training import FitResult, FitSettings
from tfos.ml import KerasEstimator, KerasModel
from tfos.ml import estimator as estimator_module
from tfos.ml import model as model_module
from tfos.predict.signature import ModelSignature, ModelSource, TensorInfo


def test_floats_for_ids_are_refused_before_an_evaluation_starts_a_node():
    model = KerasModel(keras_file({"loss": "mse"})).setFeaturesCol("x").setLabelCol("y")
    model._signature = ModelSignature(
        source=ModelSource(content=b"m"),
        digest="d",
        inputs={"id": TensorInfo("int64", (), is_id=True)},
        outputs={"y": TensorInfo("float32", (1,))},
    )
    fields = [StructField("x", DecimalType(20, 0)), StructField("y", DoubleType())]
    frame: Any = SimpleNamespace(mapInArrow=None, schema=StructType(fields), sparkSession=None)
    with pytest.raises(SettingsError, match=r"column x: decimal: the model takes ids of int64"):
        model.evaluate(frame)


def test_a_model_that_was_never_compiled_is_evaluated_by_no_node():
    """A cluster started for it, and its worker told of functions that are not in the file."""
    frame: Any = SimpleNamespace(mapInArrow=None)
    with pytest.raises(NotCompiled, match=r"never compiled: .*keras_model\(\) .*compile\("):
        KerasModel(keras_file(None)).evaluate(frame)


def test_a_directory_of_a_fit_that_has_ended_is_left_to_another_program(monkeypatch):
    """A cell of a notebook that runs twice, though it means to go on; also once it is emptied."""
    monkeypatch.setattr(estimator_module, "_directories", {})
    monkeypatch.setattr(estimator_module, "fit", lambda *_: FitResult(b"", {}))
    estimator = KerasEstimator(model_fn=object, clusterSize=2, checkpointDir="/c", resume=True)
    frame: Any = SimpleNamespace(mapInArrow=None, columns=["features", "label"])
    estimator._fit(frame)
    text = r"'/c': a fit of this program has ended there.* in another program.* restart its kernel"
    with pytest.raises(SettingsError, match=text):
        estimator._fit(frame)


def test_a_fit_after_a_failed_one_has_its_directory(monkeypatch):
    monkeypatch.setattr(estimator_module, "_directories", {})
    results: list[Any] = [KeyboardInterrupt(), FitResult(b"m", {})]

    def fit(*_: Any) -> FitResult:
        found: Any = results.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(estimator_module, "fit", fit)
    estimator = KerasEstimator(model_fn=object, clusterSize=2, checkpointDir="/c", resume=True)
    frame: Any = SimpleNamespace(mapInArrow=None, columns=["features", "label"])
    with pytest.raises(KeyboardInterrupt):
        estimator._fit(frame)
    assert estimator._fit(frame).content == b"m"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"featuresCol": "x"}, "featuresCol: 'x': the DataFrame has no such"),
        ({"labelCol": "x"}, "labelCol: 'x': the DataFrame has no such"),
        ({"featuresCols": ["x"]}, "featuresCols: 'x': the DataFrame has no such"),
        ({"labelCols": ["x"]}, "labelCols: 'x': the DataFrame has no such"),
    ],
)
def test_a_column_that_is_missing_is_told_by_the_param_that_names_it(given, text):
    plan = KerasEstimator(model_fn=object, **given).column_plan()
    with pytest.raises(SettingsError, match=f"^{text}"):
        plan.check([("features", DoubleType()), ("label", DoubleType())])


def test_a_model_has_the_params_of_its_fit(monkeypatch):
    """As models of spark.ml: they tell which setting a tuner has chosen."""
    monkeypatch.setattr(estimator_module, "fit", lambda *_: FitResult(b"m", {}))
    estimator = KerasEstimator(model_fn=object, epochs=3, validationCol="held")
    frame: Any = SimpleNamespace(mapInArrow=None, columns=["features", "label", "held"])
    model = estimator.copy({estimator.learningRate: 0.5})._fit(frame)
    assert (model.getEpochs(), model.getLearningRate(), model.getNumPS()) == (3, 0.5, -1)
    assert model.column_plan().validation is None  # its rows need no such column
    assert not hasattr(model, "setEpochs")  # it would have no effect
    assert estimator.setEpochs(4).getEpochs() == 4


def test_a_model_takes_the_params_of_its_estimator(monkeypatch):
    """`transform(df, {estimator.predictionCol: "p"})` left the Param out; spark.ml's take it."""
    monkeypatch.setattr(estimator_module, "fit", lambda *_: FitResult(b"m", {}))
    estimator = KerasEstimator(model_fn=object)
    frame: Any = SimpleNamespace(mapInArrow=None, columns=["features", "label"])
    model = estimator._fit(frame)
    changed = model.copy({estimator.predictionCol: "p", model.batchSize: 7})
    assert (changed.getPredictionCol(), changed.getBatchSize()) == ("p", 7)
    assert (model.getPredictionCol(), model.uid) == ("prediction", estimator.uid)


def test_a_model_is_evaluated_with_the_config_of_its_estimator(monkeypatch):
    asked: list[FitSettings] = []
    content = keras_file({"loss": "mse"})
    monkeypatch.setattr(estimator_module, "fit", lambda *_: FitResult(content, {}))
    monkeypatch.setattr(model_module, "read_signature", lambda *_: None)
    monkeypatch.setattr(model_module, "described", lambda recipe, _: recipe)
    monkeypatch.setattr(model_module, "evaluate", lambda *given: asked.append(given[-1]))
    config = ClusterConfig(allow_dynamic=True)
    frame: Any = SimpleNamespace(mapInArrow=None, columns=["features", "label"], sparkSession=None)
    KerasEstimator(model_fn=object, batchSize=7, config=config)._fit(frame).evaluate(frame)
    assert [(each.config, each.batch_size) for each in asked] == [(config, 7)]


def model_of(**outputs):
    """Return a KerasModel whose outputs have these shapes."""
    model = KerasModel(b"m").setFeaturesCol("x")
    model._signature = ModelSignature(
        source=ModelSource(content=b"m"),
        digest="d",
        inputs={"x": TensorInfo("float32", ())},
        outputs={name: TensorInfo("float32", shape) for name, shape in outputs.items()},
    )
    return model


def test_each_output_has_a_column():
    one, two = model_of(y=(1,)), model_of(total=(1,), side=(2,))
    found = [
        [(each.output, each.column, each.form) for each in model._outputs(model._signature, ["x"])]
        for model in (
            one,
            one.copy().setClassCol("c"),
            two,
            two.copy().setPredictionCols(["a", "b"]),
        )
    ]
    assert found == [
        [("y", "prediction", "number")],
        [("y", "prediction", "number"), ("y", "c", "class")],
        [("total", "total", "tensor"), ("side", "side", "tensor")],
        [("total", "a", "tensor"), ("side", "b", "tensor")],
    ]


def predictor_for(values, shape, monkeypatch, **params):
    """Return what transform() makes of a model whose only output has such values."""
    info = TensorInfo(values.dtype.name, shape)
    model = model_of(y=shape)
    model._set(**params)
    model._signature = dataclasses.replace(model._signature, outputs={"y": info})
    monkeypatch.setattr(model_module, "predicted", lambda frame, predictor: predictor)
    frame: Any = SimpleNamespace(mapInArrow=None, columns=["x"], sparkSession=None)
    return model._transform(frame)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    "values",
    [
        np.array([0, 2**53 + 1]),
        np.array([0, -(2**53) - 1]),
        np.array([0, -(2**63)]),
        np.array([0, 2**64 - 1], "uint64"),
    ],
    ids=str,
)
def test_a_whole_number_that_a_double_rounds_is_refused(values, shape, monkeypatch):
    predictor = predictor_for(values, shape, monkeypatch)
    with pytest.raises(SettingsError, match=f"is {values[1]} in a row.* predictionCols"):
        predictor._joined([[values.reshape(2, *shape)]])


def test_prediction_cols_keep_whole_numbers_as_they_are(monkeypatch):
    values = np.array([2**53 + 1, -1])
    predictor = predictor_for(values, (), monkeypatch, predictionCols=["p"])
    assert predictor.schema() == "`p` bigint"
    (column,) = predictor._joined([[values]]).columns
    assert column.to_pylist() == values.tolist()
    of_floats = predictor_for(np.array([0.5], "float32"), (), monkeypatch, predictionCols=["p"])
    assert of_floats.schema() == "`p` double"


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array([2**53, -(2**53)]), "double"),
        (np.array([2**53, 0], "uint64"), "double"),
        (np.array([b"a", b"\xff"], object), "binary"),
        (np.array([2**31 - 1, -1], "int32"), "double"),
        (np.array([2**32 - 1, 1], "uint32"), "double"),
        (np.array([True, False]), "double"),
        (np.array([0.5, 0.25], "float32"), "double"),
    ],
)
def test_one_number_per_row_is_a_double_as_the_evaluators_of_spark_take_it(
    values, kind, shape, monkeypatch
):
    predictor = predictor_for(values, shape, monkeypatch)
    assert predictor.schema() == f"`prediction` {kind}"
    (column,) = predictor._joined([[values.reshape(2, *shape)]]).columns
    assert column.to_pylist() == values.tolist()


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"seed": -2}, "seed=-2 with 1 workers"),
        ({"seed": 2**40}, "seed=1099511627776 with"),
        ({"numPS": -2}, "numPS=-2; it must be 0 or more"),
        ({"stalenessBound": -2}, "stalenessBound=-2; it must be 0 or more"),
    ],
)
def test_numbers_below_what_leaves_a_setting_out_are_refused(params, text):
    with pytest.raises(SettingsError, match=text):
        KerasEstimator(model_fn=object, **params)._settings().check()


def test_what_leaves_a_setting_out_and_what_is_set_reaches_the_fit():
    settings = KerasEstimator(model_fn=object, seed=-1, exactlyOnce=True)._settings()
    assert (settings.seed, settings.num_ps, settings.staleness_bound) == (None, None, None)
    assert settings.exactly_once


def test_every_param_of_a_fit_reaches_it():
    params: dict[str, Any] = {
        "batchSize": 7,
        "epochs": 3,
        "clusterSize": 4,
        "numPS": 2,
        "consistency": "ssp",
        "stalenessBound": 5,
        "seed": 9,
        "validationSplit": 0.25,
        "learningRate": 0.5,
        "checkpointDir": "/c",
        "resume": True,
        "feedTimeout": 9.0,
        "exactlyOnce": True,
        "verbose": False,
    }
    config = ClusterConfig(allow_dynamic=True)
    beside: dict[str, Any] = {"callbacks": [object()], "class_weight": {0: 2.0}, "config": config}
    expected = FitSettings(
        batch_size=7,
        epochs=3,
        cluster_size=4,
        num_ps=2,
        consistency="ssp",
        staleness_bound=5,
        seed=9,
        validation_split=0.25,
        learning_rate=0.5,
        checkpoint_dir="/c",
        resume=True,
        feed_timeout_s=9.0,
        exactly_once=True,
        verbose=False,
        **beside,
    )
    assert KerasEstimator(model_fn=object, **params, **beside)._settings() == expected
    columns = KerasEstimator(
        model_fn=object,
        featuresCols=["a", "b"],
        labelCol="y",
        weightCol="w",
        validationCol="held",
    ).column_plan()
    assert (columns.features, columns.labels) == (("a", "b"), ("y",))
    assert (columns.weight, columns.validation) == ("w", "held")


REFUSED: list[tuple[dict[str, Any], tuple[str, ...], list[str], str]] = [
    (
        {},
        ("y",),
        ["x", "Prediction"],
        r"have a column 'prediction', .*\['x', 'Prediction'\]. Choose",
    ),
    ({"predictionCol": "X"}, ("y",), ["x"], "the results have a column 'X'"),
    ({"classCol": "x"}, (), ["x"], "the results have a column 'x'"),
    ({"classCol": "prediction"}, ("y",), ["x"], "the results have a column 'prediction'"),
    ({}, ("total", "side"), ["x", "side"], "the results have a column 'side'.*predictionCols"),
    ({"predictionCols": ["a", "x"]}, (), ["x"], "the results have a column 'x'"),
    (
        {"predictionCols": ["a"]},
        ("total", "side"),
        ["x"],
        r"\['a'\], .* outputs \['total', 'side'\]",
    ),
    (
        {"predictionCols": ["side", "q"]},
        ("total", "side"),
        ["x"],
        r"predictionCols=.*'side' would be the output 'total'.*\['total', 'side'\]",
    ),
    ({"classCol": "c"}, ("total", "side"), ["x"], "classCol='c', but the model has the outputs"),
    (
        {"classCol": "c", "predictionCols": ["a", "b"]},
        (),
        ["x"],
        "Only a model with one output has a class",
    ),
    ({"predictionCol": "p", "predictionCols": ["a"]}, ("y",), ["x"], "set one of them"),
    ({"predictBatchSize": 0}, ("y",), ["x"], "predictBatchSize must be an int >= 1, got 0"),
]


@pytest.mark.parametrize(("params", "outputs", "given", "text"), REFUSED)
def test_results_without_a_place_are_refused_before_a_fit(
    params, outputs, given, text, monkeypatch
):
    """CrossValidator transforms what it has fitted: the training would be lost."""
    monkeypatch.setattr(estimator_module, "fit", lambda *_: FitResult(b"", {}))
    estimator = KerasEstimator(model_fn=object, **params)
    estimator.recipe = dataclasses.replace(estimator.recipe, outputs=outputs)
    frame: Any = SimpleNamespace(mapInArrow=None, columns=given)
    with pytest.raises(SettingsError, match=text):
        estimator._fit(frame)


def labelled(monkeypatch: pytest.MonkeyPatch, **params: Any) -> tuple[KerasEstimator, Any]:
    """Return an estimator of the outputs click and buy, and a frame with columns of these names."""
    monkeypatch.setattr(estimator_module, "fit", lambda *_: FitResult(b"", {}))
    estimator = KerasEstimator(model_fn=object, labelCols=["click", "buy"], **params)
    estimator.recipe = dataclasses.replace(estimator.recipe, outputs=("click", "buy"))
    return estimator, SimpleNamespace(mapInArrow=None, columns=["x", "click", "buy"])


def test_outputs_may_be_called_as_their_labels_and_fit_says_what_transform_needs(monkeypatch):
    estimator, frame = labelled(monkeypatch)
    with pytest.warns(UserWarning, match=r"\['click', 'buy'\].*CrossValidator.*predictionCols"):
        fitted = estimator._fit(frame)
    fitted._signature = model_of(click=(1,), buy=(1,))._signature
    with pytest.raises(SettingsError, match=r"have a column 'click'.*predictionCols"):
        fitted._outputs(fitted._signature, frame.columns)
    assert [each.column for each in fitted._outputs(fitted._signature, ["x"])] == ["click", "buy"]


def test_predicted_columns_that_are_named_stay_apart_from_labels(monkeypatch):
    estimator, frame = labelled(monkeypatch, predictionCols=["click", "p"])
    with pytest.raises(SettingsError, match="have a column 'click'"):
        estimator._fit(frame)
    estimator, frame = labelled(monkeypatch)
    frame.columns[0] = "Buy"
    with pytest.raises(SettingsError, match="have a column 'buy'"):
        estimator._fit(frame)
    estimator, frame = labelled(monkeypatch, predictionCols=["p", "q"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimator._fit(frame)


def test_a_model_takes_as_many_rows_as_it_is_told(monkeypatch):
    model = model_of(y=(1,)).setPredictBatchSize(7)
    monkeypatch.setattr(model_module, "predicted", lambda frame, predictor: predictor)
    frame: Any = SimpleNamespace(mapInArrow=None, columns=["x"], sparkSession=None)
    assert model._transform(frame).batch_size == 7
    assert model_of(y=(1,))._transform(frame).batch_size == 1024
    with pytest.raises(SettingsError, match="predictBatchSize must be an int >= 1, got 0"):
        KerasModel(b"not read").setPredictBatchSize(0)._transform(frame)
    taken = KerasEstimator(model_fn=object, predictBatchSize=9)._copyValues(KerasModel(b"m"))
    assert taken.getPredictBatchSize() == 9
