"""Training really goes through the parameter server, and ends with it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ps.checkpoint.choice import latest, read_manifest
from ps.checkpoint.score import Score
from tests.support.node_children import child_of
from tests.support.plain_steps import PlainSteps
from tests.support.waiting import JVM_PAUSE_S, wait_until
from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster
from tfos.errors import NodeFailedError
from tfos.phases import ClusterPhase

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]


NUM_ROWS = 3000


def learn_digits(args, ctx):
    """Train, then return what this worker and the servers counted."""
    import keras

    keras.utils.set_random_seed(7)
    model = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ctx.distribute(model)
    steps = [0]
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs=None: steps.__setitem__(0, steps[0] + 1)
    )
    data = ctx.dataset(batch_size=64)
    history = model.fit(data, epochs=args["epochs"], callbacks=[count], verbose=0)
    client = ctx.ps_client()
    client.rendezvous("trained", b"", timeout_s=60)
    told: dict[str, Any] = {"steps": steps[0], "fit": history}
    if ctx.is_chief:
        path = os.path.join(args["out"], "model.keras")
        ctx.export(model, path)
        exported = keras.models.load_model(path)
        flat = np.zeros(exported.count_params(), np.float32)
        client.pull({"trainable": flat})
        expected = np.concatenate([v.numpy().ravel() for v in exported.trainable_variables])
        told["exported_equals_server"] = bool((expected == flat).all())
        workers = client.stats()[0].workers
        told["pushes"] = {worker.worker: worker.pushes for worker in workers}
        told["rows"] = {worker.worker: worker.rows for worker in workers}
    return told


def fit_in_step(args, ctx):
    """Train synchronously; write how many batches each epoch had."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    ctx.distribute(model, consistency="sync")
    batches: list[int] = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs=None: batches.append(0),
        on_train_batch_end=lambda batch, logs=None: batches.__setitem__(-1, batches[-1] + 1),
    )
    model.fit(ctx.dataset(batch_size=32), epochs=2, callbacks=[count], verbose=0)
    told = {"batches": batches, "weights": [w.tolist() for w in model.get_weights()]}
    Path(args["out"], f"{ctx.task_index}.json").write_text(json.dumps(told))


def push_for_ever(args, ctx):
    """Step until the servers are gone."""
    steps = PlainSteps(ctx, 1000)
    while True:
        steps.step()
        Path(args["out"], f"stepped-{ctx.task_index}").touch()


@pytest.mark.long
def test_every_step_is_a_push_and_the_export_is_what_the_server_holds(spark, tmp_path):
    images = np.random.default_rng(1).integers(0, 256, (NUM_ROWS, 784), np.uint8)
    digits = [(image, number % 10) for number, image in enumerate(images)]
    rows = spark.parallelize(digits, 6).cache()
    saves = Checkpoints(directory=str(tmp_path / "saves"), keep=1, keep_best="loss")
    config = ClusterConfig(checkpoints=saves)
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(learn_digits, {"epochs": 3, "out": str(tmp_path)})
        report = cluster.train(rows, num_epochs=3)
    rows.unpersist()
    told = cluster.results()
    assert report is not None
    assert report.fed_rows == report.trained_rows == 3 * NUM_ROWS
    assert report.dropped_rows == 0
    chief = told[0]
    assert chief["pushes"] == {rank: each["steps"] for rank, each in enumerate(told)}
    assert sum(chief["rows"].values()) == 3 * NUM_ROWS
    losses = report.history["loss"]
    assert losses == told[0]["fit"]["loss"] == told[1]["fit"]["loss"]
    assert cluster.history() == report.history
    assert report.history["rows"] == [NUM_ROWS] * 3
    assert sum(report.history["steps"]) == sum(each["steps"] for each in told)
    best = cluster.best_checkpoint()
    assert (best.metric, best.value) == ("loss", min(losses))
    assert read_manifest(saves.directory, best.step).score == Score("loss", min(losses), False)
    assert best.path == str(tmp_path / "saves" / f"step-{best.step}")
    assert min(chief["rows"].values()) > 0.2 * 3 * NUM_ROWS
    assert chief["exported_equals_server"]


@pytest.mark.long
@pytest.mark.fault("F34")
def test_one_feed_task_keeps_two_sync_workers_in_step(spark, tmp_path):
    numbers = [([float(i % 3), float(i % 5), 1.0, 0.5], float(i % 7)) for i in range(1000)]
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(fit_in_step, {"out": str(tmp_path)})
        report = cluster.train(spark.parallelize(numbers, 1), num_epochs=2)
    told = [json.loads(path.read_text()) for path in tmp_path.glob("[01].json")]
    assert len(told) == 2
    assert report is not None
    assert (report.fed_rows, report.trained_rows, report.dropped_rows) == (2000, 2000, 0)
    assert all(sum(each["batches"][epoch] for each in told) >= 1000 // 32 for epoch in (0, 1))
    assert told[0]["weights"] == told[1]["weights"]


@pytest.mark.fault("F08")
@pytest.mark.fault("F12")
def test_a_killed_server_goes_on_from_its_checkpoint_and_once_too_often_stops_the_training(
    spark, tmp_path, capsys
):
    saves = Checkpoints(directory=str(tmp_path / "saves"), every_s=3600.0)
    config = ClusterConfig(checkpoints=saves)
    cluster = TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW, config=config)
    cluster.start(push_for_ever, {"out": str(tmp_path)})
    said: list[str] = []

    def is_told() -> bool:
        said.append(capsys.readouterr().err)
        return "lost since step" in "".join(said)

    _await(lambda: latest(saves.directory) is not None, cluster)
    _await_steps(tmp_path, cluster)
    child_of(cluster, "ps:0").send_signal(signal.SIGKILL)
    _await(is_told, cluster)
    told = "".join(said)
    assert re.search(r"ps:0@.*: ps:0 killed by SIGKILL; started again \(1 of 1\)", told)
    assert re.search(r"ps:0: \d+ s, at least [\d,]+ updates? lost since step \d+", told)
    _await_steps(tmp_path, cluster)
    assert cluster.phase is ClusterPhase.RUNNING
    assert [failure.node.name for failure in cluster.failures] == ["ps:0"]
    started = time.monotonic()
    child_of(cluster, "ps:0").send_signal(signal.SIGKILL)
    with pytest.raises(NodeFailedError, match=r"ps:0 .*SIGKILL.*restarted 1 of 1 times"):
        cluster.shutdown()
    assert time.monotonic() - started < 40


def _await_steps(out, cluster):
    """Wait until both workers have stepped again."""
    for path in out.glob("stepped-*"):
        path.unlink()
    _await(lambda: len(list(out.glob("stepped-*"))) == 2, cluster)


def _await(condition, cluster):
    def is_met() -> bool:
        assert cluster.phase is ClusterPhase.RUNNING, cluster.failures
        return bool(condition())

    wait_until(is_met, cluster.status, pause_s=JVM_PAUSE_S)
