"""A program of Keras 2's time on executors: TensorFlow's strategy, its checkpoints, `lr`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.support.spark_masters import REPO
from tfos import TFCluster
from tfos.errors import NodeFailedError
from tfos.native import legacy_keras

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(400, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
WEIGHTS = (3.14, 1.618)
NUM_ROWS = 1000


@pytest.fixture
def pipeline(spark, tmp_path, monkeypatch):
    """tensorflowonspark.pipeline, installed in the driver and the executors, with tf-keras."""
    package = REPO / "compat" / "tensorflowonspark"
    monkeypatch.syspath_prepend(str(package))
    zipped = shutil.make_archive(str(tmp_path / "forwarding"), "zip", package, "tensorflowonspark")
    spark.addPyFile(zipped)
    monkeypatch.setenv(legacy_keras.VARIABLE, "1")
    from tensorflowonspark import pipeline  # type: ignore[import-not-found]

    yield pipeline
    for name in [each for each in sys.modules if each.partition(".")[0] == "tensorflowonspark"]:
        del sys.modules[name]


def fits_a_line(args, ctx):
    import tensorflow as tf
    from tensorflow_estimator.python.estimator.export import (  # type: ignore[import-not-found]
        export_lib,
    )
    from tensorflowonspark import TFNode, compat

    strategy = tf.distribute.experimental.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = args.kind()
        assert isinstance(model, tf.keras.Sequential)
        model.add(tf.keras.layers.Dense(1, input_shape=[2]))
        model.compile(optimizer=tf.keras.optimizers.Adam(lr=0.2), loss="mse")
    feed = TFNode.DataFeed(ctx.mgr, input_mapping=args.input_mapping)

    def rows():
        while not feed.should_stop():
            batch = feed.next_batch(1)
            if len(batch["x"]) > 0:
                yield batch["x"][0], batch["y_"][0]

    kinds, shapes = (tf.float32, tf.float32), (tf.TensorShape([2]), tf.TensorShape([1]))
    dataset = tf.data.Dataset.from_generator(rows, kinds, shapes)
    options = tf.data.Options()
    compat.disable_auto_shard(options)
    dataset = dataset.with_options(options).batch(args.batch_size)
    checkpoint = tf.keras.callbacks.ModelCheckpoint(
        filepath=args.model_dir + "/weights-{epoch:04d}",
        load_weights_on_restart=True,
        save_weights_only=True,
    )
    steps = args.num_rows * 0.9 // (args.batch_size * ctx.num_workers)
    model.fit(dataset, epochs=1, steps_per_epoch=steps, callbacks=[checkpoint], verbose=0)
    export_dir = export_lib.get_timestamped_export_dir(args.export_dir)
    compat.export_saved_model(model, export_dir, ctx.job_name == "chief")
    feed.terminate()


def fits_under_a_strategy(args, ctx):
    import tensorflow as tf

    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 2)), np.ones(8), verbose=0)


def test_without_keras_2_the_error_says_what_to_install(spark, monkeypatch):
    monkeypatch.setenv(legacy_keras.VARIABLE, "0")
    with (
        pytest.raises(NodeFailedError, match="install tf-keras, and set TF_USE_LEGACY_KERAS=1"),
        TFCluster.reserve(spark, 2, 0, ps="tensorflow") as cluster,
    ):
        cluster.start(fits_under_a_strategy)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        ("import tensorflow as tf", "tf_keras"),
        ("import tensorflow as tf; tf.keras.Sequential", "keras"),
        ("from tensorflow.keras import Sequential", "keras"),
    ],
)
def test_keras_is_chosen_until_a_program_uses_it(spark, before, kind):
    program = f"{before}\nimport tensorflowonspark, tensorflow as tf\nprint(tf.keras.Sequential)"
    path = os.pathsep.join([str(REPO / "compat" / "tensorflowonspark"), str(REPO)])
    env = {name: text for name, text in os.environ.items() if name != legacy_keras.VARIABLE}
    command = [sys.executable, "-c", program]
    ran = subprocess.run(
        command, env={**env, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200
    )
    assert f"<class '{kind}." in ran.stdout, ran.stderr


def test_it_trains_and_exports_without_a_change(spark, pipeline, tmp_path):
    import tf_keras
    from pyspark.sql import SparkSession

    session = SparkSession(spark)
    features = np.random.default_rng(0).random((NUM_ROWS, 2))
    rows = [(each.tolist(), [float(each @ WEIGHTS)]) for each in features]
    export = tmp_path / "export"
    args: dict[str, Any] = {"num_rows": NUM_ROWS, "kind": tf_keras.Sequential}
    model = (
        pipeline.TFEstimator(fits_a_line, args)
        .setInputMapping({"col1": "x", "col2": "y_"})
        .setModelDir(str(tmp_path / "model"))
        .setExportDir(str(export))
        .setClusterSize(2)
        .setMasterNode("chief")
        .setBatchSize(1)
        .setGraceSecs(0)
        .fit(session.createDataFrame(spark.parallelize(rows, 2), ["col1", "col2"]))
    )
    (exported,) = export.iterdir()
    asked = session.createDataFrame([([1.0, 1.0],)], ["c1"])
    model.setExportDir(str(exported)).setTagSet("serve").setSignatureDefKey("serving_default")
    model.setInputMapping({"c1": "dense_input"}).setOutputMapping({"dense": "cout"})
    (answer,) = model.transform(asked).collect()
    assert answer.cout[0] == pytest.approx(sum(WEIGHTS), abs=0.005)
    assert (tmp_path / "model" / "checkpoint").exists()
