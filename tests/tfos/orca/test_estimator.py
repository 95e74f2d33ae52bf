"""Orca's Estimator without a cluster: what it knows of its model."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql.types import DataType, DoubleType, StructField, StructType

from tests.support.model_files import keras_file
from tfos.config import ClusterConfig
from tfos.errors import SettingsError
from tfos.estimators.recipe import ModelRecipe
from tfos.estimators.training import FitResult, FitSettings
from tfos.orca import Estimator
from tfos.orca.other_names import ARGUMENTS, METHODS
from tfos.predict.signature import ModelSignature, ModelSource, TensorInfo

COMPILED = keras_file({"loss": "mse"})
FLOATS = TensorInfo("float32", (1,))
ONE_INPUT = ModelRecipe(content=COMPILED, inputs={"x": FLOATS}, outputs=("y",))


def made(config: Any, batch_size: int) -> None:
    """Stand for a function of data."""


def test_a_loaded_model_is_not_taken_for_the_one_before(tmp_path):
    """Its columns were checked against the inputs of that one."""
    (tmp_path / "m.keras").write_bytes(second := keras_file({"loss": "mae"}))
    estimator = Estimator(ONE_INPUT, {}, FitSettings(), None)
    estimator.load(str(tmp_path / "m.keras"))
    assert estimator._trained() == ModelRecipe(content=second, has_trained=True)


def test_the_history_has_a_value_per_epoch_of_every_fit_in_each_column():
    estimator = Estimator(ONE_INPUT, {}, FitSettings(), None)
    for history in (
        {"loss": [3.0, 2.0]},
        {"loss": [1.0], "val_loss": [1.5]},
        {"val_loss": [1.25], "loss": [0.5]},
    ):
        estimator._take(FitResult(COMPILED, history), 0, FitSettings())
    assert estimator.history["loss"] == [3.0, 2.0, 1.0, 0.5]
    assert estimator.history["val_loss"] == pytest.approx(
        [math.nan, math.nan, 1.5, 1.25], nan_ok=True
    )


def test_a_fit_whose_epochs_an_interrupted_one_had_trained_says_that_it_has_trained_nothing():
    settings = FitSettings(epochs=2, checkpoint_dir="/runs/servers-00001")
    estimator = Estimator(ONE_INPUT, {}, FitSettings(), None)
    estimator._resumes_epochs = True
    with pytest.warns(UserWarning, match=r"none of its epochs=2: .* /runs/servers-00001, had tr"):
        estimator._take(FitResult(COMPILED, {}), 1, settings)
    estimator._take(FitResult(COMPILED, {}), 2, settings)
    estimator._resumes_epochs = True
    estimator._take(FitResult(COMPILED, {"loss": [1.0]}), 3, settings)


def test_what_is_no_file_of_a_model_is_refused_when_it_is_loaded(tmp_path):
    estimator = Estimator(ONE_INPUT, {}, FitSettings(), None)
    (tmp_path / "m.h5").write_bytes(b"HDF5")
    for name, text in (
        ("m.h5", r"m\.h5: the model's 4 bytes are not a \.keras file"),
        ("", "directory"),
    ):
        with pytest.raises(SettingsError, match=text):
            estimator.load(str(tmp_path / name))
    assert estimator._trained() is ONE_INPUT


def test_a_model_that_keras_would_not_load_by_its_name_is_told_and_loads_here(tmp_path):
    estimator = Estimator(ONE_INPUT, {}, FitSettings(), None)
    for name in ("NCF_model", "m.h5"):
        with pytest.warns(
            UserWarning, match=rf"{name} as a \.keras file.*Rename it, or save under"
        ):
            estimator.save(str(tmp_path / name))
        estimator.load(str(tmp_path / name))
        assert estimator._trained().content == COMPILED
    for path in (str(tmp_path / "m.keras"), tmp_path / "m.keras"):
        estimator.save(path)  # a warning would fail


def test_an_estimator_without_a_model_takes_that_of_load(tmp_path):
    estimator = Estimator.from_keras()
    frame = frame_of(x=DoubleType(), y=DoubleType())
    for ask in (
        lambda: estimator.fit(frame, feature_cols="x", label_cols="y"),
        lambda: estimator.evaluate(frame, feature_cols="x", label_cols="y"),
        lambda: estimator.predict(frame, "x"),
        estimator.get_model,
    ):
        with pytest.raises(SettingsError, match=r"this estimator has no model: call load\(path\)"):
            ask()
    (tmp_path / "m.keras").write_bytes(COMPILED)
    estimator.load(str(tmp_path / "m.keras"))
    assert estimator._trained().content == COMPILED


def test_what_orca_has_and_this_has_not_is_refused_with_what_to_do():
    estimator: Any = Estimator(ONE_INPUT, {}, FitSettings(), None)
    frame = frame_of(x=DoubleType())
    for call, given, text in (
        (
            Estimator.from_keras,
            {"workers_per_node": 2},
            r"from_keras\(workers_per_node=.*num_ps",
        ),
        (lambda **orca: estimator.fit(frame, **orca), {"steps_per_epoch": 3}, r"df\.limit\(n\)"),
        (lambda **orca: estimator.evaluate(frame, **orca), {"num_steps": 3}, r"evaluate\(num_st"),
        (lambda **orca: estimator.predict(frame, "x", **orca), {"verbose": 1}, r"verbose=False"),
        (lambda **orca: estimator.save("m.keras", **orca), {"save_format": "h5"}, r"Keras 3 "),
        (lambda **orca: estimator.load("m.keras", **orca), {"custom_objects": {}}, "register"),
    ):
        with pytest.raises(SettingsError, match=text):
            call(**given)
        with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
            call(nonsense=1)  # type: ignore[arg-type]  # mypy sees it, too
    with pytest.raises(AttributeError, match="'fti'"):
        Estimator.from_keras().fti()  # type: ignore[attr-defined]  # mypy sees it, too
    text = r"from_keras\(model_dir=path\), then load_latest_checkpoint\(\)"
    with pytest.raises(AttributeError, match=text):
        estimator.load_latest_orca_checkpoint("/runs/7")
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        _ = estimator.nonsense


def test_no_name_is_refused_that_this_has():
    assert not set(METHODS) & set(dir(Estimator))
    for call, own in (
        (Estimator.from_keras, {"verbose"}),
        (Estimator.fit, {"callbacks"}),
        (Estimator.evaluate, set()),
        (Estimator.predict, set()),
        (Estimator.save, set()),
        (Estimator.load, set()),
    ):
        assert set(ARGUMENTS) & set(inspect.signature(call).parameters) == own


def test_floats_for_ids_are_refused_before_an_evaluation_starts_a_node(monkeypatch):
    """Of a model of model_creator, which the driver has as bytes alone."""
    signature = ModelSignature(
        source=ModelSource(content=b"m"),
        digest="d",
        inputs={"id": TensorInfo("int64", (), is_id=True)},
        outputs={"y": TensorInfo("float32", (1,))},
    )
    monkeypatch.setattr("tfos.orca.estimator.read_signature", lambda *_: signature)
    recipe = ModelRecipe(content=COMPILED, has_trained=True)
    estimator = Estimator(recipe, {}, FitSettings(), None)
    frame = frame_of(x=DoubleType(), y=DoubleType())
    with pytest.raises(SettingsError, match=r"column x: double: the model takes ids of int64"):
        estimator.evaluate(frame, feature_cols="x", label_cols="y")


def test_predict_takes_rows_as_predict_column_does_and_refuses_what_are_none(monkeypatch):
    taken: list[Any] = []
    signature = ModelSignature(
        source=ModelSource(content=b"m"), digest="d", inputs=ONE_INPUT.inputs, outputs={"y": FLOATS}
    )
    monkeypatch.setattr("tfos.orca.estimator.read_signature", lambda *_: signature)
    monkeypatch.setattr("tfos.orca.estimator.predicted", lambda _, made: taken.append(made))
    estimator = Estimator(ONE_INPUT, {}, FitSettings(), None)
    frame = frame_of(x=DoubleType())
    for batch_size in (None, 9):
        estimator.predict(frame, "x", batch_size=batch_size)
    assert [each.batch_size for each in taken] == [1024, 9]
    monkeypatch.setattr("tfos.orca.estimator.read_signature", _refused)
    estimator._signature = None
    with pytest.raises(SettingsError, match="batch_size must be an int >= 1, got -1"):
        estimator.predict(frame, "x", batch_size=-1)


def test_outputs_are_columns_by_their_names_unless_there_is_one_or_they_get_others(monkeypatch):
    taken: list[Any] = []
    monkeypatch.setattr("tfos.orca.estimator.predicted", lambda _, made: taken.append(made))
    frame = frame_of(x=DoubleType())

    def names(outputs: str, given: Any = None) -> list[tuple[str, str]]:
        signature = ModelSignature(
            source=ModelSource(content=b"m"),
            digest="d",
            inputs=ONE_INPUT.inputs,
            outputs=dict.fromkeys(outputs, FLOATS),
        )
        monkeypatch.setattr("tfos.orca.estimator.read_signature", lambda *_: signature)
        Estimator(ONE_INPUT, {}, FitSettings(), None).predict(frame, "x", given)
        return [(each.output, each.column) for each in taken[-1].outputs]

    assert names("y") == [("y", "prediction")]
    assert names("yz") == [("y", "y"), ("z", "z")]
    assert names("y", "score") == [("y", "score")]
    assert names("yz", ["a", "b"]) == [("y", "a"), ("z", "b")]
    with pytest.raises(SettingsError, match=r"output_cols=\['a'\], but the model has the outputs"):
        names("yz", "a")


def test_all_that_a_program_says_reaches_the_fit(monkeypatch):
    taken: list[FitSettings] = []

    def fit(sc: Any, make: Any, recipe: ModelRecipe, settings: FitSettings, held: Any) -> FitResult:
        taken.append(settings)
        return FitResult(COMPILED, {"loss": [1.0]})

    monkeypatch.setattr("tfos.orca.estimator.active_context", lambda: None)
    monkeypatch.setattr("tfos.orca.estimator.fit_made", fit)
    of_cluster: dict[str, Any] = {
        "cluster_size": 4,
        "num_ps": 2,
        "consistency": "ssp",
        "staleness_bound": 3,
        "seed": 7,
        "exactly_once": True,
        "verbose": False,
    }
    config = ClusterConfig(abort_s=99.0)
    make: Any = Estimator.from_keras
    estimator = make(model_creator=lambda config: None, cluster_config=config, **of_cluster)
    of_fit: dict[str, Any] = {"epochs": 5, "callbacks": [object()], "class_weight": {0: 2.0}}
    assert estimator.fit(made, batch_size=8, **of_fit) == {"loss": [1.0]}
    assert taken == [
        FitSettings(batch_size=4, resume_epochs=False, config=config, **of_cluster, **of_fit)
    ]
    assert estimator.history == {"loss": [1.0]}
    recipe = estimator._trained()
    assert (recipe.content, recipe.model_fn, recipe.has_trained) == (COMPILED, None, True)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cluster_size": 3, "num_ps": 0}, "cluster_size=3 with num_ps=0: .*set num_ps=1, or clus"),
        ({"cluster_size": 1, "num_ps": 1}, "cluster_size=1 with num_ps=1 leaves .* raise cluster_"),
        ({"num_ps": -1}, "num_ps=-1; it must be 0 or more"),
        ({"consistency": "ssp"}, "consistency='ssp' with staleness_bound=None"),
        ({"seed": -1}, "seed=-1 with 1 workers: .* or None for rows in their own order"),
        (
            {"config": ClusterConfig()},
            "config must be a dict, .*got ClusterConfig.*cluster_config=",
        ),
    ],
)
def test_what_is_refused_has_the_names_of_orcas_arguments(given, text):
    with pytest.raises(SettingsError, match=text):
        Estimator.from_keras(model_creator=lambda config: None, **given)


def test_what_a_repeated_task_fed_before_is_skipped_if_asked_for():
    settings = Estimator.from_keras(model_creator=lambda config: None, exactly_once=True)._settings
    assert settings.exactly_once
    assert settings._word("exactlyOnce") == "exactly_once"


def test_columns_that_are_refused_have_the_names_of_orcas_arguments():
    estimator = Estimator(ONE_INPUT, {}, FitSettings(), None)
    frame = frame_of(x=DoubleType(), y=DoubleType())
    for given, text in (
        ({"label_cols": "y"}, "feature_cols names no column"),
        ({"feature_cols": "x", "label_cols": ["y", "y"]}, r"label_cols=\['y', 'y'\] has a column"),
        ({"feature_cols": "z", "label_cols": "y"}, "feature_cols: 'z': the DataFrame has no such"),
        ({"feature_cols": 3, "label_cols": "y"}, "feature_cols must be a name or a list"),
        ({"feature_cols": "x", "label_cols": [3]}, "label_cols must be a name or a list"),
    ):
        with pytest.raises(SettingsError, match=text):
            estimator.fit(frame, **given)
        with pytest.raises(SettingsError, match=text):
            estimator.evaluate(frame, **given)


def test_columns_that_do_not_fit_the_model_have_the_names_of_orcas_arguments():
    both = {"a": TensorInfo("float32", (1,)), "b": TensorInfo("float32", (1,))}
    recipe = dataclasses.replace(ONE_INPUT, inputs=both, outputs=("c", "d"))
    estimator = Estimator(recipe, {}, FitSettings(), None)
    frame = frame_of(x=DoubleType(), y=DoubleType())
    with pytest.raises(SettingsError, match=r"has 2 inputs, feature_cols is \['x'\]. Name one"):
        estimator.fit(frame, feature_cols="x", label_cols="y")
    with pytest.raises(SettingsError, match=r"has 2 outputs, label_cols is \['y'\]. Name one"):
        estimator.fit(frame, feature_cols=["x", "y"], label_cols="y")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": 3, "model_creator": made}, "pass either model=, .*, or model_creator="),
        ({"model_creator": 3}, "model_creator must be a function"),
    ],
)
def test_a_model_that_is_refused_has_the_name_of_orcas_argument(given, text):
    with pytest.raises(SettingsError, match=text):
        Estimator.from_keras(**given)


def test_data_of_another_kind_is_refused_by_its_own_name(monkeypatch):
    """A function is data of fit and evaluate, and of nothing else."""
    monkeypatch.setattr("tfos.orca.estimator.active_context", lambda: None)
    estimator: Any = Estimator(ONE_INPUT, {}, FitSettings(), None)
    frame = frame_of(x=DoubleType(), y=DoubleType())
    of_pandas = type("DataFrame", (), {"__module__": "pandas.core.frame"})()
    columns = {"feature_cols": "x", "label_cols": "y"}
    for ask, text in (
        (
            lambda: estimator.fit(frame, validation_data=made, **columns),
            "^validation_data must be a DataFrame or a path, because data is one; got function",
        ),
        (
            lambda: estimator.fit(made, validation_data=frame),
            r"^validation_data must be a function of \(config, batch_size\), because data is one",
        ),
        (lambda: estimator.predict(made, "x"), "^data must be a DataFrame or a path; got func"),
        (
            lambda: estimator.evaluate([1], **columns),
            r"^data must be a DataFrame, a path or a function of \(config, batch_size\); got list",
        ),
        (
            lambda: estimator.fit(of_pandas, **columns),
            r"; got DataFrame of pandas\.core\.frame; use spark\.createDataFrame\(data\)",
        ),
    ):
        with pytest.raises(SettingsError, match=text):
            ask()


def test_a_frame_of_spark_connect_is_refused_before_its_session_reads_the_model(monkeypatch):
    monkeypatch.setattr("tfos.orca.estimator.read_signature", _refused)
    recipe = ModelRecipe(content=COMPILED, has_trained=True)
    estimator = Estimator(recipe, {}, FitSettings(), None)
    own = {"__module__": "pyspark.sql.connect.dataframe", **vars(frame_of(x=DoubleType()))}
    frame: Any = type("DataFrame", (), own)()
    for ask in (
        lambda: estimator.predict(frame, "x"),
        lambda: estimator.evaluate(frame, feature_cols="x", label_cols="y"),
    ):
        with pytest.raises(SettingsError, match="this DataFrame belongs to Spark Connect"):
            ask()


def frame_of(**columns: DataType) -> Any:
    """Return what is asked of a DataFrame before any of its rows is."""
    schema = StructType([StructField(name, kind) for name, kind in columns.items()])
    return SimpleNamespace(schema=schema, sparkSession=None, mapInArrow=None)


def test_a_fit_goes_on_with_what_is_known_of_its_model():
    known = dataclasses.replace(ONE_INPUT, content=b"trained", has_trained=True)
    estimator = Estimator(known, {}, FitSettings(), None)
    assert estimator._described(frame_of(x=DoubleType())) is known


def test_a_batch_of_all_workers_that_does_not_divide_is_told_with_what_a_step_has():
    estimator = Estimator(ONE_INPUT, {}, FitSettings(cluster_size=4, num_ps=1), None)
    with pytest.warns(UserWarning, match=r"batch_size=50 is for all 3 workers.* 16 rows.* has 48"):
        assert estimator._of_fit(0, 1, 50, (), None).batch_size == 16
    assert estimator._of_fit(0, 1, 51, (), None).batch_size == 17
    with pytest.raises(SettingsError, match=r"batch_size=2 is for all 3 workers.*Pass 3 or more"):
        estimator._of_fit(0, 1, 2, (), None)


def test_what_a_model_loses_is_told_at_the_line_that_asked_for_the_fit(monkeypatch):
    monkeypatch.setattr("tfos.orca.estimator.active_context", lambda: None)
    monkeypatch.setattr("tfos.estimators.training._trained", lambda *_: FitResult(COMPILED, {}))
    monkeypatch.setattr("tfos.estimators.training._check_frame", _refused)
    recipe = dataclasses.replace(ONE_INPUT, has_trained=True)
    for data in (made, frame_of(x=DoubleType())):
        estimator = Estimator(recipe, {}, FitSettings(cluster_size=2), None)
        with (
            pytest.warns(UserWarning, match="this model has trained before") as told,
            contextlib.suppress(SettingsError),
        ):
            estimator.fit(data, feature_cols="x", label_cols="x")
        assert [each.filename for each in told] == [__file__]


def _refused(*_: object) -> None:
    raise SettingsError("no columns that fit")


def test_rows_are_shuffled_by_the_seed_that_a_program_names():
    made = Estimator.from_keras(model_creator=lambda config: None, seed=None)
    assert made._settings.seed is None
    made.shutdown()
