"""Programs as TensorFlowOnSpark's users write them, on executors: import tensorflowonspark."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.spark_masters import REPO
from tfos.native import legacy_keras

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240, func_only=True)]
ON_EXECUTORS = pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True)
FORWARDS = str(REPO / "compat" / "tensorflowonspark")
WEIGHTS = (3.14, 1.618)


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.syspath_prepend(FORWARDS)
    monkeypatch.setenv(legacy_keras.VARIABLE, "0")  # test_keras_2_programs.py has the other one
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "tensorflowonspark"]:
        del sys.modules[name]


def squares(args, ctx):
    sys.path.insert(0, args["path"])
    from tensorflowonspark import TFNode  # type: ignore[import-not-found]

    assert ctx.tmp_socket is None
    tf_feed = TFNode.DataFeed(ctx.mgr, False)
    while not tf_feed.should_stop():
        batch = tf_feed.next_batch(batch_size=10)
        if len(batch) > 0:
            tf_feed.batch_results(np.square(batch))


def holds_port(args, ctx):
    import socket

    port = ctx.tmp_socket.getsockname()[1]
    assert ctx.cluster_spec[ctx.job_name][ctx.task_index].endswith(f":{port}")
    with socket.socket() as other:
        try:
            other.bind(("", port))
        except OSError:
            ctx.release_port()
        else:
            raise AssertionError("the port was free")
        other.bind(("", port))
    assert ctx.tmp_socket is None
    Path(args[1], f"port-{ctx.task_index}-{sys.argv[0]}").write_text(str(port))


def write_share(args, ctx):
    import os

    share = range(ctx.worker_num, 10, ctx.num_workers)
    assert "TF_CONFIG" not in os.environ
    Path(ctx.absolute_path(args.output).removeprefix("file:"), f"part-{ctx.worker_num}").write_text(
        " ".join(map(str, share))
    )


def linear(args, ctx):
    """Fit a line with TensorFlowOnSpark's own shape of a pipeline's train_fn."""
    import tensorflow as tf

    from tfos import TFNode, compat

    model = tf.keras.Sequential()
    model.add(tf.keras.Input((2,)))
    model.add(tf.keras.layers.Dense(1, name="dense", activation="linear"))
    model.compile(tf.keras.optimizers.Adam(0.1), "mse")
    tf_feed = TFNode.DataFeed(ctx.mgr, input_mapping=args.input_mapping)
    while not tf_feed.should_stop():
        batch = tf_feed.next_batch(args.batch_size)
        if len(batch["x"]) > 0:
            model.train_on_batch(np.array(batch["x"], "f4"), np.array(batch["y_"], "f4"))
    model.layers[-1].set_weights([np.array(args.weights, "f4").reshape(2, 1), np.zeros(1, "f4")])
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")


def parsed_rate(args, ctx):
    """Read arguments in each way that programs with a list have."""
    import argparse

    from tfos import TFNode

    tf_feed = TFNode.DataFeed(ctx.mgr, input_mapping={"x": "x"})
    while not tf_feed.should_stop():
        tf_feed.next_batch(10)
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--rate", type=float, default=0.1)
    found = [parser.parse_args(each).rate for each in (None, args[1:], sys.argv[1:])]
    Path(parser.parse_args().directory, "trained").write_text(repr([sys.argv[0], *found]))


def exported_rate(args):
    Path(args[1], "exported").write_text(repr([sys.argv == args, *args[2:]]))


@ON_EXECUTORS
def test_rows_are_fed_and_answered_and_ports_are_held(spark, tmp_path):
    from tensorflowonspark import TFCluster

    args = {"path": FORWARDS}
    cluster = TFCluster.run(
        spark, squares, args, 2, 0, input_mode=TFCluster.InputMode.SPARK, reservation_timeout=120
    )
    rows = spark.parallelize([[x] for x in range(100)], 4)
    assert cluster.inference(rows).sum() == sum(x * x for x in range(100))
    assert [each["job_name"] for each in cluster.cluster_info] == ["worker", "worker"]
    cluster.shutdown()
    cluster = TFCluster.run(spark, holds_port, ["prog", str(tmp_path)], 2, 0, release_port=False)
    cluster.shutdown()
    assert {path.name for path in tmp_path.iterdir()} == {"port-0-prog", "port-1-prog"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:DStream is deprecated:FutureWarning")
@ON_EXECUTORS
def test_a_stream_is_answered_until_another_process_stops_it(spark, tmp_path, monkeypatch):
    from pyspark.streaming import StreamingContext
    from tensorflowonspark import TFCluster, reservation

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # has the ticket
    stream_context = StreamingContext(spark, 0.5)
    batches = [spark.parallelize([[x, x] for x in range(n, n + 10)], 2) for n in (0, 10)]
    args, mode = {"path": FORWARDS}, TFCluster.InputMode.SPARK
    cluster = TFCluster.run(spark, squares, args, 2, 0, input_mode=mode)
    stop = reservation.Client(cluster.cluster_meta["server_addr"]).request_stop
    answers = []

    def keep(rdd):
        answers.append([row.tolist() for row in rdd.collect()])
        if not answers[-1]:  # both batches are answered
            stop()

    cluster.inference(stream_context.queueStream(batches)).foreachRDD(keep)
    stream_context.start()
    cluster.shutdown(stream_context, timeout=120)
    assert answers[:2] == [[[x * x, x * x] for x in range(n, n + 10)] for n in (0, 10)]


@ON_EXECUTORS
def test_parallel_runs_share_the_work(spark, tmp_path):
    import argparse

    from tensorflowonspark import TFParallel

    args = argparse.Namespace(output=str(tmp_path))
    assert TFParallel.run(spark, write_share, args, 2) is None
    parts = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert parts == {"part-0": "0 2 4 6 8", "part-1": "1 3 5 7 9"}


@ON_EXECUTORS
def test_a_pipeline_fits_and_transforms(spark, tmp_path):
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.sql import SparkSession
    from tensorflowonspark import pipeline

    from tfos.errors import SettingsError

    session = SparkSession(spark)
    features = np.random.default_rng(0).random((200, 2))
    rows = [(each.tolist(), [float(each @ WEIGHTS)]) for each in features]
    frame = session.createDataFrame(rows, ["col.1", "col2"])
    export = str(tmp_path / "export")
    estimator: Any = (
        pipeline.TFEstimator(linear, {"weights": list(WEIGHTS)})
        .setInputMapping({"col.1": "x", "col2": "y_"})
        .setExportDir(export)
        .setClusterSize(1)
        .setBatchSize(20)
        .setEpochs(1)
        .setGraceSecs(0)
    )
    with pytest.raises(SettingsError, match="the DataFrame has"):
        estimator.copy({estimator.input_mapping: {"col3": "x"}}).fit(frame)
    (model,) = Pipeline(stages=[estimator]).fit(frame).stages
    (
        model.setInputMapping({"c.1": "dense_input"})
        .setOutputMapping({"dense": "cout"})
        .setSignatureDefKey("serving_default")
        .setTagSet("serve")
        .setBatchSize(7)
    )
    stored = str(tmp_path / "stored")
    PipelineModel([model]).write().save(stored)
    loaded = PipelineModel.load(stored)
    asked = session.createDataFrame([(each.tolist(),) for each in features], ["c.1"]).coalesce(1)
    answers = loaded.transform(asked)
    assert answers.dtypes == [("cout", "array<double>")]
    found = [row.cout[0] for row in answers.collect()]
    np.testing.assert_allclose(found, features @ WEIGHTS, rtol=1e-5)


@pytest.mark.long
@ON_EXECUTORS
def test_a_list_of_arguments_reaches_a_pipelines_functions(spark, tmp_path):
    """`parse_args()` found none of them, and the training ran with the parser's defaults."""
    from pyspark.sql import SparkSession
    from tensorflowonspark import pipeline

    argv = ["prog", str(tmp_path), "--rate", "0.5"]
    frame = SparkSession(spark).createDataFrame([(1.0,)] * 10, ["x"])
    estimator = pipeline.TFEstimator(parsed_rate, argv, exported_rate)
    model = estimator.setInputMapping({"x": "x"}).setGraceSecs(0).fit(frame)
    assert (tmp_path / "trained").read_text() == "['prog', 0.5, 0.5, 0.5]"
    assert (tmp_path / "exported").read_text() == "[True, '--rate', '0.5']"
    assert model.args == argv
