"""KerasEstimator on executors: fits, pipelines, persistence, cross validation; nothing is left."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import wait_until
from tfos.estimators.columns import ColumnPlan
from tfos.estimators.split import divided
from tfos.spark.facts import running_tasks

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300, func_only=True),
    # One executor: the Python workers of each further one would load TensorFlow for its answers.
    pytest.mark.parametrize("spark", ["local-cluster[1,3,1024]"], indirect=True),
]

WEIGHTS = np.array([2.0, -1.0, 0.5])
NUM_ROWS = 600


def linear():
    """Return a compiled linear model, in a worker."""
    import keras

    x = keras.Input((3,), name="x")
    y = keras.layers.Dense(1, kernel_initializer="zeros", name="y")(x)
    model = keras.Model(x, y)
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return model


def two_towers():
    """Return a compiled model of two inputs and two outputs."""
    import keras

    a, b = keras.Input((2,), name="a"), keras.Input((1,), name="b")
    both = keras.layers.Concatenate()([a, b])
    model = keras.Model(
        [a, b],
        [
            keras.layers.Dense(1, name="total")(both),
            keras.layers.Dense(2, "softmax", name="side")(both),
        ],
    )
    model.compile("sgd", ["mse", "sparse_categorical_crossentropy"])
    return model


def stops_early():
    """Return callbacks that end a fit after its second epoch: its loss does not grow."""
    import keras

    return [keras.callbacks.EarlyStopping("loss", patience=0, mode="max")]


@pytest.fixture(scope="module")
def frame(spark):
    from pyspark.ml.linalg import Vectors
    from pyspark.sql import SparkSession

    x = np.random.default_rng(0).random((NUM_ROWS, 3))
    rows = [
        (
            Vectors.dense(*each),
            each[:2].tolist(),
            float(each[2]),
            float(each @ WEIGHTS + 1),
            n % 5 == 0,
        )
        for n, each in enumerate(x)
    ]
    names = ["features", "two", "one", "label", "held"]
    return SparkSession(spark).createDataFrame(rows, names).repartition(3).cache()


@pytest.fixture(scope="module")
def fitted(frame):
    from tfos.ml import KerasEstimator

    estimator = KerasEstimator(
        model_fn=linear, epochs=4, batchSize=20, validationCol="held", seed=-1
    )
    return estimator.fit(frame.coalesce(1))


def test_a_fit_has_keras_own_metrics_and_the_model_its_history(frame, fitted):
    """The reference is Keras on the same rows in memory, in the same order."""
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(fitted.history)
    assert [len(each) for each in fitted.history.values()] == [4] * len(fitted.history)
    rows = sorted(frame.coalesce(1).collect(), key=lambda row: row.held)
    x, y = np.array([row.features.toArray() for row in rows]), [row.label for row in rows]
    num_held = sum(row.held for row in rows)
    code = (
        "import json, sys, numpy as np\n"
        f"{inspect.getsource(linear)}\n"
        "data = np.load(sys.argv[1])\n"
        f"x, y, n = data['x'], data['y'], {NUM_ROWS - num_held}\n"
        "found = linear().fit(x[:n], y[:n], epochs=4, batch_size=20, verbose=0, shuffle=False, "
        "validation_data=(x[n:], y[n:]), validation_batch_size=20)\n"
        "print(json.dumps(found.history))\n"
    )
    with tempfile.NamedTemporaryFile(suffix=".npz") as file:
        np.savez(file, x=x, y=y)
        file.flush()
        run = subprocess.run(
            [sys.executable, "-c", code, file.name],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    expected = json.loads(run.stdout)
    for name, values in expected.items():
        np.testing.assert_allclose(fitted.history[name], values, rtol=1e-4)


@pytest.mark.long
def test_what_was_saved_answers_bit_for_bit(frame, fitted, tmp_path):
    from pyspark.ml import PipelineModel
    from pyspark.ml.evaluation import RegressionEvaluator

    from tfos.ml import KerasModel

    frame = frame.coalesce(1)
    answered = fitted.transform(frame)
    assert answered.dtypes[-1] == ("prediction", "double")
    path = str(tmp_path / "model")
    fitted.write().overwrite().save(path)
    loaded = KerasModel.load(path)
    assert loaded.history == fitted.history
    assert (loaded.uid, loaded.content) == (fitted.uid, fitted.content)
    PipelineModel([fitted]).write().save(str(tmp_path / "pipeline"))
    piped = PipelineModel.load(str(tmp_path / "pipeline"))
    first = answered.orderBy("one").collect()
    for each in (loaded, piped):
        assert each.transform(frame).orderBy("one").collect() == first
    assert fitted.copy({fitted.weightCol: "one"}).column_plan().weight == "one"
    found = fitted.evaluate(frame)
    error = RegressionEvaluator(metricName="mae").evaluate(answered)
    assert found["mae"] == pytest.approx(error, rel=1e-4)
    copied = fitted.copy({fitted.predictionCol: "other"})
    assert copied.transform(frame).columns[-1] == "other"


def test_workers_with_a_server_train_one_model_and_stop_together(frame):
    from tfos import ClusterConfig, Restarts
    from tfos.ml import KerasEstimator

    estimator = KerasEstimator(
        model_fn=linear,
        featuresCols=["two", "one"],  # side by side, here and in transform
        callbacks=stops_early,
        config=ClusterConfig(security="tls", restarts=Restarts(workers=1)),
        clusterSize=3,
        consistency="sync",
        epochs=3,
        weightCol="one",
        validationSplit=0.2,
        learningRate=0.01,
    )
    model = estimator.fit(frame)
    assert [len(model.history[name]) for name in ("loss", "val_loss")] == [2, 2]
    # The model has the servers' parameters: an untrained one answers 0 everywhere.
    squares = ("avg(pow(label - prediction, 2))", "avg(pow(label, 2))")
    error, untrained = model.transform(frame.coalesce(1)).selectExpr(*squares).first()
    assert error < 0.8 * untrained


@pytest.mark.long
def test_several_inputs_and_outputs_have_a_column_each(frame):
    from pyspark.sql import functions as f

    from tfos.ml import KerasEstimator

    sides = frame.withColumn("side", f.col("held").cast("int"))
    model = KerasEstimator(
        model_fn=two_towers,
        featuresCols=["two", "one"],
        labelCols=["label", "side"],
        predictionCols=["sum", "sides"],
    ).fit(sides)
    answered = model.transform(sides)
    assert answered.dtypes[-2:] == [("sum", "array<float>"), ("sides", "array<float>")]
    assert len(answered.first().sides) == 2


class ClosedPool(ThreadPool):
    """pyspark leaves its threads to the garbage collector."""

    def imap_unordered(self, *given, **options):
        yield from super().imap_unordered(*given, **options)
        self.terminate()
        self.join()


def test_tuning_fits_side_by_side_and_keeps_the_best(frame, monkeypatch):
    """What fits and answers is played: the parameters and models of parallel fits stay apart."""
    from pyspark.ml import tuning
    from pyspark.ml.evaluation import Evaluator

    from tfos.estimators.training import FitResult
    from tfos.ml import KerasEstimator, KerasModel

    class OfTheLoss(Evaluator):  # type: ignore[misc]  # pyspark is not checked
        def _evaluate(self, dataset):
            return float(dataset.columns[-1].removeprefix("loss "))

    side_by_side, fits = threading.Barrier(2), itertools.count()

    def fit(frame, plan, recipe, settings):
        if next(fits) < 2:
            side_by_side.wait(60)
        return FitResult(b"", {"loss": [float(settings.epochs)]})

    def transform(model, dataset):
        return dataset.withColumn(f"loss {model.history['loss'][0]}", dataset.label)

    monkeypatch.setattr(tuning, "ThreadPool", ClosedPool)
    monkeypatch.setattr("tfos.ml.estimator.fit", fit)
    monkeypatch.setattr(KerasModel, "_transform", transform)
    estimator = KerasEstimator(model_fn=linear)
    tuned = tuning.TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=tuning.ParamGridBuilder().addGrid(estimator.epochs, [3, 5]).build(),
        evaluator=OfTheLoss(),
        parallelism=2,
    ).fit(frame)
    assert tuned.validationMetrics == [3.0, 5.0]
    assert tuned.bestModel.history == {"loss": [5.0]}
    assert tuned.bestModel.getEpochs() == 5
    assert next(fits) == 3


@pytest.mark.long
def test_tuning_runs_within_the_slots_and_leaves_nothing(frame, monkeypatch):
    """Two fits of two nodes begin at once on three slots. CrossValidator runs them the same way."""
    from pyspark.ml import tuning
    from pyspark.ml.evaluation import RegressionEvaluator

    from tfos.ml import KerasEstimator

    monkeypatch.setattr(tuning, "ThreadPool", ClosedPool)
    estimator = KerasEstimator(model_fn=linear, clusterSize=2, batchSize=20)
    rates = tuning.ParamGridBuilder().addGrid(estimator.learningRate, [0.0001, 0.2]).build()
    tuned = tuning.TrainValidationSplit(
        estimator=estimator,
        estimatorParamMaps=rates,
        evaluator=RegressionEvaluator(),
        parallelism=2,
    ).fit(frame)
    assert tuned.validationMetrics[0] > tuned.validationMetrics[1]
    assert tuned.bestModel.history["loss"]
    assert not frame.sparkSession.sparkContext._jsc.sc().statusTracker().getActiveJobIds()


@pytest.mark.long
def test_a_fit_waits_for_slots_that_other_tasks_of_the_program_hold(frame, monkeypatch, tmp_path):
    """As a tuner's next fit does behind the tasks that feed the one beside it."""
    from tfos.estimators import training
    from tfos.ml import KerasEstimator
    from tfos.slots import awaiting, reading

    sc, free = frame.sparkSession.sparkContext, tmp_path / "free"
    looks, config_of, read_offer = itertools.count(1), training._config, reading.read_offer
    holder = threading.Thread(
        target=lambda: sc.parallelize(range(3), 3).foreach(functools.partial(_holds, str(free)))
    )

    def config(settings):
        holder.start()
        wait_until(lambda: running_tasks(sc._jsc.sc()) == {"0": 3}, "three tasks run")
        return dataclasses.replace(config_of(settings), slot_settle_s=0.1, slot_wait_s=0.1)

    def offer(*given):
        if next(looks) == 20:
            free.touch()
        return read_offer(*given)

    monkeypatch.setattr(training, "_config", config)
    monkeypatch.setattr(awaiting, "read_offer", offer)
    try:
        fitted = KerasEstimator(model_fn=linear, batchSize=20).fit(frame)
    finally:
        free.touch()
        holder.join(60)
    assert next(looks) > 20
    assert fitted.history["loss"]


def _holds(path, _row):
    import os
    import time

    deadline_s = time.monotonic() + 120
    while not os.path.exists(path) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def test_what_cannot_be_fitted_is_refused_before_any_node_starts(frame, monkeypatch):
    from tfos.errors import SettingsError
    from tfos.ml import KerasEstimator

    monkeypatch.setattr("tfos.estimators.training.TFCluster", None)
    texts = frame.selectExpr(
        "features", "'a' as label", "map(1, 2) as m", "struct(one) as s", "one"
    )
    for given, asked, text in (
        (
            frame,
            {"featuresCol": "x"},
            r"featuresCol: 'x': the DataFrame has no such column: it has",
        ),
        (texts, {}, "label column label: string; it must be numbers"),
        (
            texts,
            {"featuresCol": "m", "labelCol": "one"},
            "column 'm' is map<int,int>, which a feed",
        ),
        (
            texts,
            {"featuresCol": "s", "labelCol": "one"},
            "column 's' is struct<one:double>; select",
        ),
        (
            frame,
            {"weightCol": "two"},
            "weight column two: array<double>; it must be numbers, one",
        ),
        (frame, {"validationCol": "one"}, "validationCol 'one' is double; it must be boolean"),
        (
            frame.filter("one > 2"),
            {},
            r"the DataFrame with the columns \[.*\] has no rows to train",
        ),
        (frame.filter("not held"), {"validationCol": "held"}, "has no rows that validate"),
        (frame, {"validationCol": "held", "validationSplit": 0.1}, "set one of them"),
        (frame, {"featuresCol": "one", "featuresCols": ["two"]}, "set one of them"),
        (frame, {"featuresCols": ["two", "two"]}, "has a column twice"),
        (frame, {"batchSize": 0}, "batchSize must be an int >= 1, got 0"),
        (frame, {"epochs": 0}, "epochs must be an int >= 1, got 0"),
        (frame, {"clusterSize": 3, "numPS": 0}, "clusterSize=3 with numPS=0: several workers"),
        (frame, {"clusterSize": 1, "numPS": 1}, "clusterSize=1 with numPS=1 leaves no worker"),
        (frame, {"checkpointDir": "/tmp/c"}, "needs parameter servers, which write it"),
    ):
        with pytest.raises(SettingsError, match=text):
            KerasEstimator(model_fn=linear, **asked).fit(given)
    conf, name = frame.sparkSession.sparkContext._jsc.sc().conf(), "spark.driver.maxResultSize"
    conf.set(name, "1m")
    try:
        with pytest.raises(SettingsError, match=f"{name} is 1048576 bytes, but the trained model"):
            KerasEstimator(model_fn=linear).fit(frame)
    finally:
        conf.remove(name)


def labels_of(frame):
    return [row.label for row in frame.collect()]


def test_a_split_keeps_the_order_of_rows_and_draws_once(frame):
    """Rows in another order on other executors are split as before."""
    plan = ColumnPlan(features=("features", "two"), labels=("label",))
    found = []
    for each in (frame.coalesce(1), frame.repartition(2)):
        with divided(each, plan, 0.25) as parts:
            found.append([labels_of(part) for part in parts])
    labels = labels_of(frame.coalesce(1))
    train, held = found[0]
    assert [sorted(part) for part in found[1]] == [sorted(train), sorted(held)]
    assert sorted(train + held) == sorted(labels)
    assert train == [label for label in labels if label not in set(held)]
    assert 0.18 * NUM_ROWS < len(held) < 0.32 * NUM_ROWS


def noisy(frame):
    """Return rows of which every job of Spark has other labels, and those that validate."""
    from pyspark.sql import functions as f

    numbers = f.udf(lambda label: label + uuid.uuid4().int / 2**128, "double").asNondeterministic()
    labels = frame.withColumn("label", numbers("label"))
    return labels.withColumn("held", f.col("label").cast("string").endswith("1"))


@pytest.mark.parametrize("of_column", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_row_trains_or_validates_whatever_is_computed_again(frame, of_column):
    """A fit beside this one splits the same rows, and ends first."""
    plan = ColumnPlan(
        features=("one",), labels=("label",), validation="held" if of_column else None
    )
    share, rows = 0.0 if of_column else 0.5, noisy(frame)
    kept = frame.sparkSession.sparkContext._jsc.sc().getPersistentRDDs
    before = kept().size()
    with divided(rows, plan, share) as (train, held):
        with divided(rows, plan, share) as other:
            assert [part.count() > 0 for part in other] == [True, True]
        places = [[row.one for row in part.select("one").collect()] for part in (train, held)]
        assert labels_of(train) == labels_of(train)
    assert sorted(itertools.chain(*places)) == sorted(row.one for row in frame.collect())
    assert kept().size() == before


def test_rows_that_are_kept_already_are_kept_once(frame):
    rows = noisy(frame).cache()
    kept = frame.sparkSession.sparkContext._jsc.sc().getPersistentRDDs
    try:
        rows.count()
        before = kept().size()
        with divided(rows, ColumnPlan(features=("one",), labels=("label",)), 0.5) as parts:
            assert sorted(itertools.chain(*map(labels_of, parts))) == sorted(labels_of(rows))
            assert kept().size() == before
    finally:
        rows.unpersist()


def test_a_split_that_fails_keeps_no_rows(frame):
    kept = frame.sparkSession.sparkContext._jsc.sc().getPersistentRDDs
    before = kept().size()
    plan = ColumnPlan(features=("one",), labels=("label",))
    during = []

    def fail() -> None:
        with divided(noisy(frame), plan, 0.5) as (train, _):
            train.count()
            during.append(kept().size())
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fail()
    assert during == [before + 1]
    assert kept().size() == before


@pytest.mark.parametrize(
    "params",
    [
        {"validationCol": "Held"},
        {"featuresCols": ["features", "Features"], "validationSplit": 0.5},
    ],
)
def test_columns_may_differ_in_case_alone(frame, params, monkeypatch):
    """Those of a fit, and others."""
    from tfos.ml import KerasEstimator

    wide = frame.toDF("features", "Features", "LABEL", "label", "Held")
    fed: list[list[float]] = []
    monkeypatch.setattr(
        "tfos.estimators.training._trained",
        lambda sc, program, settings, *given: fed.extend(map(labels_of, given)),
    )
    with pytest.raises(AttributeError, match="content"):  # nothing has trained
        KerasEstimator(model_fn=linear, **params).fit(wide)
    if "validationCol" in params:
        expected = [labels_of(frame.filter(condition)) for condition in ("not held", "held")]
        assert list(map(sorted, fed)) == list(map(sorted, expected))
    assert sorted(itertools.chain(*fed)) == sorted(labels_of(frame))


def test_an_estimator_is_saved_by_the_names_of_its_functions(frame, tmp_path):
    from tests.support.named_models import compiled
    from tfos.errors import SettingsError
    from tfos.ml import KerasEstimator
    from tfos.predict.signature import TensorInfo

    estimator = KerasEstimator(model_fn=compiled, class_weight={0: 1.0, 1: 2.0}, epochs=3)
    estimator.write().save(str(tmp_path / "e"))
    loaded = KerasEstimator.load(str(tmp_path / "e"))
    assert (loaded.recipe.model_fn, loaded.getEpochs()) == (compiled, 3)
    assert loaded.class_weight == {0: 1.0, 1: 2.0}
    inputs = {"id": TensorInfo("int64", (None,), is_id=True), "text": TensorInfo("object", ())}
    estimator.recipe = dataclasses.replace(estimator.recipe, inputs=inputs, has_trained=True)
    estimator.write().overwrite().save(str(tmp_path / "e"))
    assert KerasEstimator.load(str(tmp_path / "e")).recipe == estimator.recipe
    of_numpy: Any = {np.int64(0): np.float32(1.5)}
    estimator.class_weight = of_numpy
    estimator.write().overwrite().save(str(tmp_path / "e"))
    assert KerasEstimator.load(str(tmp_path / "e")).class_weight == {0: 1.5}
    estimator.callbacks = [1]
    with pytest.raises(SettingsError, match=r"callbacks=\[1\] are objects and cannot be saved"):
        estimator.write().overwrite().save(str(tmp_path / "e"))
    assert KerasEstimator.load(str(tmp_path / "e")).getEpochs() == 3  # the older one is still there
    with pytest.raises(SettingsError, match=r"model_fn .*lambda.* cannot be saved"):
        KerasEstimator(model_fn=lambda: None).write().save(str(tmp_path / "f"))
    with pytest.raises(SettingsError, match=r"callbacks=\[1\] are objects and cannot be saved"):
        KerasEstimator(model_fn=compiled, callbacks=[1]).write().save(str(tmp_path / "g"))


def test_a_model_may_be_larger_than_the_largest_result_of_a_job(frame, tmp_path):
    from tfos.errors import SettingsError
    from tfos.ml import KerasModel

    content = np.random.default_rng(0).bytes((9 << 20) + 1)
    path = str(tmp_path / "m")
    model = KerasModel(content, {"linear": print})
    with pytest.raises(SettingsError, match=r"custom_objects.*cannot be saved"):
        KerasModel(content, {"linear": lambda: None}).write()
    model.write().save(path)
    conf, name = frame.sparkSession.sparkContext._jsc.sc().conf(), "spark.driver.maxResultSize"
    conf.set(name, "1m")
    try:
        loaded = KerasModel.load(path)
    finally:
        conf.remove(name)
    assert (loaded.content, loaded.custom_objects) == (content, {"linear": print})
    (tmp_path / "m" / "model.keras").unlink()
    with pytest.raises(SettingsError, match=r"model\.keras does not exist; write\(\)\.save"):
        KerasModel.load(path)


def test_fits_of_a_program_do_not_go_on_from_each_other(frame, monkeypatch):
    """As those of a CrossValidator would, fold after fold."""
    from pyspark.ml import Pipeline

    from tfos.errors import SettingsError
    from tfos.estimators.training import FitResult
    from tfos.ml import KerasEstimator

    estimator = KerasEstimator(model_fn=linear, clusterSize=2, checkpointDir="/c", resume=True)
    directories = []

    def fit(frame, plan, recipe, settings):
        directories.append(settings.checkpoint_dir)
        with pytest.raises(SettingsError, match=": a fit of this program trains there, and this"):
            estimator.copy().fit(frame, {estimator.checkpointDir: settings.checkpoint_dir})
        if len(directories) == 1:
            raise InterruptedError
        return FitResult(b"", {})

    monkeypatch.setattr("tfos.ml.estimator.fit", fit)
    with pytest.raises(InterruptedError):
        estimator.fit(frame)
    maps = [{estimator.epochs: 1}, {estimator.epochs: 2}]
    with pytest.raises(SettingsError, match="'/c': a fit of this program has ended there, and th"):
        Pipeline(stages=[estimator]).fit(frame, maps)
    estimator.fit(frame, {estimator.checkpointDir: "/d"})
    assert directories == ["/c", "/c", "/d"]


def scaled(config):
    """Return a compiled linear model, of Orca's model_creator."""
    model = linear()
    model.optimizer.learning_rate = config["rate"]
    return model


def made(config, batch_size):
    """Return the rows of a formula, of Orca's data creator."""
    import tensorflow as tf

    x = np.random.default_rng(config["seed"]).random((200, 3)).astype("f4")
    return tf.data.Dataset.from_tensor_slices((x, x @ WEIGHTS + 1)).batch(batch_size)


@pytest.mark.long
def test_orcas_estimator_goes_on_where_its_last_fit_ended(frame, tmp_path):
    from tfos.errors import SettingsError
    from tfos.orca import Estimator

    config = {"rate": 0.1, "seed": 0}
    where: dict[str, Any] = {
        "model_creator": scaled,
        "config": config,
        "model_dir": str(tmp_path / "runs"),
    }
    estimator = Estimator.from_keras(**where)
    columns: dict[str, Any] = {"feature_cols": "features", "label_cols": "label"}
    with pytest.raises(SettingsError, match=r"exists only in workers. Call fit\(\) or load"):
        estimator.predict(frame, "features")
    frame.drop("features").write.parquet(str(tmp_path / "rows"))
    first = estimator.fit(frame, 2, 20, **columns, validation_data=frame.limit(50))
    assert sorted(first) == ["loss", "mae", "val_loss", "val_mae"]
    second = estimator.fit(made, batch_size=20)
    assert second["loss"][0] < first["loss"][0] / 4
    assert len(estimator.history["loss"]) == 3
    answered = estimator.predict(frame.coalesce(1), "features", "y")
    assert answered.dtypes[-1] == ("y", "array<float>")
    found = estimator.evaluate(frame, **columns)
    errors = [abs(row.y[0] - row.label) for row in answered.collect()]
    assert found["mae"] == pytest.approx(np.mean(errors), rel=1e-4)
    estimator.save(str(tmp_path / "m.keras"))
    other = Estimator.from_keras(**where)
    other.load_latest_checkpoint()
    assert other._trained().content == estimator._trained().content
    other.load(str(tmp_path / "m.keras"))
    assert other._trained().content == estimator._trained().content
    assert sorted(each.name for each in (tmp_path / "runs").iterdir()) == [
        "fit-00001",
        "fit-00002",
        "model-00001.json",
        "model-00001.keras",
        "model-00002.json",
        "model-00002.keras",
    ]
    with pytest.raises(SettingsError, match="feature_cols: 'x': the DataFrame has no such column"):
        estimator.fit(str(tmp_path / "rows"), feature_cols="x", label_cols="label")
    with pytest.raises(SettingsError, match="has no model and no checkpoint of a fit"):
        Estimator.from_keras(model_creator=scaled, model_dir=str(tmp_path)).load_latest_checkpoint()


@pytest.mark.long
def test_a_fit_whose_model_is_not_written_is_not_trained_again(frame, tmp_path, monkeypatch):
    """A driver that ends between the last save of a fit's servers and the fit's model."""
    from tfos.estimators import model_files
    from tfos.orca import Estimator

    where: dict[str, Any] = {"config": {"rate": 0.1, "seed": 0}, "cluster_size": 2}
    where |= {"model_creator": scaled, "model_dir": str(tmp_path), "consistency": "sync"}
    columns: dict[str, Any] = {"feature_cols": "features", "label_cols": "label"}
    with monkeypatch.context() as patch:
        patch.setattr(model_files, "write_fit", lambda *given: os.kill(os.getpid(), signal.SIGINT))
        estimator = Estimator.from_keras(**where)
        with pytest.raises(KeyboardInterrupt):
            estimator.fit(frame, 2, 20, **columns)
    again = Estimator.from_keras(**where)
    again.load_latest_checkpoint()
    with pytest.warns(UserWarning, match="this fit has trained none of its epochs=2: the interr"):
        assert again.fit(frame, 2, 20, **columns) == {}
    trained = zip(estimator.get_model().weights, again.get_model().weights, strict=True)
    assert all(np.array_equal(one, other) for one, other in trained)
    assert again.fit(frame, 1, 20, **columns)["loss"][0] > 0


def failing(config, batch_size):
    """Fail in the worker, as a data creator can."""
    raise ValueError(f"no rows of {batch_size}")


@pytest.mark.long
def test_a_function_that_fails_in_a_worker_is_the_error(spark):
    from tfos.errors import NodeFailedError
    from tfos.orca import Estimator

    estimator = Estimator.from_keras(model_creator=scaled, config={"rate": 0.1})
    with pytest.raises(NodeFailedError, match="ValueError: no rows of 16"):
        estimator.fit(failing, batch_size=16)
