"""Estimators of models with tables: one worker, what was saved, lost processes."""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[1,3,1024]"], indirect=True),
]

NUM_ROWS, NUM_IDS = 240, 40
FAR = 1 << 53
"""From here on doubles have no odd number."""


def recommender():
    """Return a compiled model of integers, strings and lists of strings."""
    import keras

    from tfos.keras import Embedding

    keras.utils.set_random_seed(3)
    user = keras.Input((), dtype="int64", name="user")
    site = keras.Input((), dtype="string", name="site")
    items = keras.Input((2,), dtype="int64", name="items")
    tags = keras.Input((None,), dtype="string", ragged=True, name="tags")
    vectors = [
        Embedding(4, table="user")(user),
        Embedding(4, table="site")(site),
        Embedding(4, table="item", combiner="mean")(items),
        Embedding(4, table="tag", combiner="sum")(tags),
    ]
    rating = keras.layers.Dense(1, name="rating")(keras.layers.Concatenate()(vectors))
    model = keras.Model([user, site, items, tags], rating)
    model.compile(keras.optimizers.Adagrad(0.5), "mse")
    return model


COLUMNS = ["user", "site", "items", "tags"]


@pytest.fixture(scope="module")
def frame(spark):
    from pyspark.sql import SparkSession

    rows = [
        (
            FAR + 1 + 2 * int(user),
            f"site {user % 7}",
            [int(user), int(user) + 1],
            [f"tag {each}" for each in range(user % 4)],
            float(user % 5),
            bool(user % 8 == 0),
        )
        for user in np.random.default_rng(0).integers(0, NUM_IDS, NUM_ROWS)
    ]
    types = "user long, site string, items array<long>, tags array<string>, label double"
    session = SparkSession(spark)
    frame = session.createDataFrame(rows, types + ", held boolean")
    return frame.coalesce(1).cache()


def inputs(rows):
    """Return what the model takes of rows."""
    import tensorflow as tf

    return [
        np.array([row["user"] for row in rows]),
        tf.constant([row["site"] for row in rows]),
        np.array([row["items"] for row in rows]),
        tf.ragged.constant([row["tags"] for row in rows], dtype=tf.string, ragged_rank=1),
    ]


def alone(file, fed, held, asked):
    """Train in one process; return metrics and answers. Its model before that goes to a file."""
    import tensorflow as tf

    from tfos.estimators.recipe import recipe_of

    model = recommender()
    with open(file, "wb") as out:
        pickle.dump(recipe_of(model, None), out)
    data = []
    for rows in (fed, held):
        labels = np.array([[row["label"]] for row in rows])
        parts = (tuple(inputs(rows)), labels)
        data.append(tf.data.Dataset.from_tensor_slices(parts).batch(40))
    history = model.fit(data[0], epochs=2, validation_data=data[1], verbose=0).history
    return history, model.predict(inputs(asked), verbose=0)[:, 0].tolist()


@pytest.mark.long
def test_one_worker_has_the_history_and_the_answers_of_one_process(frame, tmp_path):
    """Unseen ids included. The worker imports Embedding for the model's file alone."""
    from pyspark.sql import functions as f

    from tfos.ml import KerasEstimator, KerasModel

    unseen = frame.limit(5).withColumn("user", f.col("user") + 10**9)
    asked = frame.unionAll(unseen.withColumn("site", f.lit("new"))).coalesce(1)
    rows = [row.asDict() for row in frame.collect()]
    held, fed = ([row for row in rows if row["held"] is each] for each in (True, False))
    given = (fed, held, [row.asDict() for row in asked.collect()])
    code = "import json, pickle, sys\nimport numpy as np\n"
    code += "\n".join(inspect.getsource(each) for each in (recommender, inputs, alone))
    code += "\nprint(json.dumps(alone(sys.argv[1], *json.load(sys.stdin))))"
    file = tmp_path / "recipe"
    run = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        input=json.dumps(given),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=200,
    )
    history, answers = json.loads(run.stdout)
    estimator = KerasEstimator(
        model_fn=recommender,
        featuresCols=COLUMNS,
        epochs=2,
        batchSize=40,
        validationCol="held",
        seed=-1,
    )
    estimator.recipe = pickle.loads(file.read_bytes())
    trained = estimator.fit(frame)
    assert sorted(trained.history) == ["loss", "val_loss"]
    for name, values in history.items():
        np.testing.assert_allclose(trained.history[name], values, rtol=1e-5)
    found = [row.prediction for row in trained.transform(asked).collect()]
    np.testing.assert_allclose(found, answers, rtol=1e-5, atol=1e-6)
    trained.write().save(str(tmp_path / "m"))
    again = KerasModel.load(str(tmp_path / "m")).transform(asked).collect()
    assert [row.prediction for row in again] == found


def train_in_turns(args, ctx):
    """Train four epochs; the first run of two is lost within the third. Return all numbers."""
    import keras

    model = recommender()
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 7, 0.9)
    model.compile(keras.optimizers.Adam(rate), "mse")
    ctx.distribute(model, consistency="sync")

    class Lost(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        epoch = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if args["is_lost"] and (self.epoch, batch) == (2, 3):
                raise InterruptedError("lost in the third epoch")

    data = ctx.dataset(40, feature_cols={name: name for name in COLUMNS}, label_cols="label")
    history = model.fit(data, epochs=4, callbacks=[Lost()], verbose=0)
    numbers = {weight.path: weight.numpy().tolist() for weight in model.weights}
    for table in ("user", "site", "item", "tag"):
        found: dict[int, list[float]] = {}
        for ids, rows in ctx.ps_client().tables.scan(table):
            found.update(zip(ids.tolist(), rows.tolist(), strict=True))
        numbers[table] = sorted(found.items())
    numbers["steps"] = int(model.optimizer.iterations)
    Path(args["out"]).write_text(json.dumps([history.history["loss"], numbers]))


@pytest.mark.long
@pytest.mark.fault("F14")
def test_a_run_that_resumes_has_the_numbers_of_one_that_was_never_lost(frame, tmp_path):
    """Rows, their slots, parameters, the rate of a schedule: bit for bit, from an epoch's end."""
    from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster
    from tfos.errors import NodeFailedError

    fed = frame.select(*COLUMNS, "label")

    def run(name, *, is_lost=False):
        saves = str(tmp_path / f"saves of {name}")
        plan = Checkpoints(directory=saves, every_s=3600.0, keep_best="loss", resume=True)
        out = tmp_path / name
        with TFCluster.reserve(
            frame.sparkSession.sparkContext,
            2,
            1,
            input_mode=InputMode.SPARK,
            config=ClusterConfig(checkpoints=plan),
        ) as cluster:
            cluster.start(train_in_turns, {"out": str(out), "is_lost": is_lost})
            cluster.train(fed, 4)
        return json.loads(out.read_text())

    losses, numbers = run("one run")
    with pytest.raises(NodeFailedError, match="lost in the third epoch"):
        run("two runs", is_lost=True)
    assert run("two runs") == [losses[2:], numbers]
    assert numbers["steps"] == 4 * NUM_ROWS // 40
    assert all(len(numbers[table]) > 2 for table in ("user", "site", "item", "tag"))
