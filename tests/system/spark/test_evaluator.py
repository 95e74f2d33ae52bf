"""An evaluator beside a training: what it tells, and that its end costs nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.feed import eventually
from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
DEADLINE_S = 60.0


def consume(out, ctx):
    """Take rows on the worker; on the evaluator wait for the end of the training."""
    if ctx.job_name == "evaluator":
        config = json.loads(os.environ["TF_CONFIG"])
        Path(out, "evaluator.pid").write_text(str(os.getpid()))
        while not ctx.stop_asked:
            time.sleep(0.05)
        ended = {"ended": True, "rank": ctx.rank, "workers": ctx.num_workers, "config": config}
        Path(out, "evaluator.json").write_text(json.dumps(ended))
        return "evaluator"
    eventually(Path(out, "evaluator.pid").exists, "the evaluator runs", DEADLINE_S)
    ctx.ps_client()
    feed, rows = ctx.get_data_feed(), 0
    while not feed.should_stop():
        rows += len(feed.next_batch(16))
    return rows


def test_the_evaluator_has_no_rows_and_ends_after_the_workers(spark, tmp_path):
    with TFCluster.reserve(
        spark, 3, 1, eval_node=True, input_mode=InputMode.SPARK, config=ClusterConfig(verbose=False)
    ) as cluster:
        cluster.start(consume, str(tmp_path))
        report = cluster.train(spark.parallelize(range(100), 2), num_epochs=2)
        assert report is not None
        assert report.trained_rows == 200
        assert not Path(tmp_path, "evaluator.json").exists()
    told = json.loads(Path(tmp_path, "evaluator.json").read_text())
    assert (told["ended"], told["rank"], told["workers"]) == (True, 0, 1)
    assert told["config"]["task"] == {"type": "evaluator", "index": 0}
    assert set(told["config"]["cluster"]) == {"worker"}
    assert cluster.results() == [200]
    assert cluster.failures == ()


def build():
    """Return the model of worker and evaluator; from zeros it learns enough, whatever is drawn."""
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def learn(args, ctx):
    """Train on the worker, and kill the evaluator if so told; evaluate checkpoints beside it."""
    import numpy as np

    random = np.random.default_rng(0)
    x = random.normal(size=(64, 4)).astype("float32")
    y = x.sum(axis=1)
    pid = Path(args["out"], "evaluator.pid")
    if ctx.job_name == "evaluator":
        pid.write_text(str(os.getpid()))
        return ctx.evaluate_checkpoints(build(), x, y, poll_s=0.1)
    model = ctx.distribute(build(), consistency="sync")
    eventually(pid.exists, "the evaluator runs", DEADLINE_S)
    model.fit(x, y, batch_size=16, epochs=args["epochs"] // 2, verbose=0)
    if args["kills"]:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    model.fit(x, y, batch_size=16, epochs=args["epochs"] // 2, verbose=0)
    return model.evaluate(x, y, verbose=0, return_dict=True)


@pytest.mark.long
@pytest.mark.parametrize("kills", [False, True])
def test_checkpoints_are_evaluated_and_a_killed_evaluator_costs_nothing(
    spark, tmp_path, kills, capfd
):
    saves = Checkpoints(directory=str(tmp_path / "saves"), every_s=0.3)
    args = {"out": str(tmp_path), "epochs": 60, "kills": kills}
    with TFCluster.reserve(
        spark, 3, 1, eval_node=True, config=ClusterConfig(checkpoints=saves)
    ) as cluster:
        cluster.start(learn, args)
    (result,) = cluster.results()
    assert result["loss"] < 10.0
    found, output = cluster.evaluations(), capfd.readouterr().err
    if kills:
        assert [each.node.name for each in cluster.failures] == ["evaluator:0"]
        assert "evaluator:0@" in output
        assert "the training goes on without it" in output
        return
    assert cluster.failures == ()
    assert found[-1].metrics == {f"val_{name}": value for name, value in result.items()}
    assert found[-1].step == 240
    assert f"evaluator:0: checkpoint of step 240: val_loss {result['loss']:.4g}" in output
