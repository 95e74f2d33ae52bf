"""A worker that is killed while it trains is started again, or the others go on without it."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ps.checkpoint.inspect import inspect
from tests.support.node_children import child_of, java_of
from tests.support.waiting import wait_until
from tfos import Checkpoints, ClusterConfig, InputMode, Restarts, TFCluster
from tfos.errors import TFOSError
from tfos.fit_place import METADATA_NAME
from tfos.phases import ClusterPhase

NUM_ROWS = 1600
EPOCHS = 3
pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]


def slow_training(args: dict[str, Any], ctx: Any, seen: list[int], since: int = 0) -> Any:
    """Return a distributed model and a callback; `seen` gets the epochs of this attempt."""
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    ctx.distribute(model, consistency=args["consistency"])

    def note(batch: int, logs: Any = None) -> None:
        if seen[-1] >= since:
            Path(args["out"], f"stepped-{ctx.rank}-{ctx.attempt}").touch()
        time.sleep(args["step_s"])

    return model, keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs=None: seen.append(epoch), on_train_batch_end=note
    )


def fit_slowly(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train a line; tell which epochs this attempt has seen."""
    seen: list[int] = []
    model, notes = slow_training(args, ctx, seen)
    model.fit(ctx.dataset(batch_size=32), epochs=EPOCHS, callbacks=[notes], verbose=0)
    return {"attempt": ctx.attempt, "epochs": seen}


def read_slowly(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train on arrays of this worker's own."""
    import numpy as np

    seen: list[int] = []
    model, notes = slow_training(args, ctx, seen, since=1)
    x = np.random.default_rng(ctx.rank).normal(size=(1280, 4))
    model.fit(x, x.sum(axis=1), batch_size=32, epochs=6, callbacks=[notes, *ctx.callbacks()])
    return {"attempt": ctx.attempt, "epochs": seen}


def lose(cluster: TFCluster, name: str, stepped: Path, *, executor: bool = False) -> None:
    """Kill a node, or the executor under it, once there is this file."""
    wait_until(stepped.exists, f"{stepped.name}")
    (java_of if executor else child_of)(cluster, name).send_signal(signal.SIGKILL)


@pytest.mark.fault("F01")
@pytest.mark.parametrize(
    ("victim", "consistency"),
    [
        ("worker:1", "sync"),
        pytest.param("worker:1", "async", marks=pytest.mark.long),
        pytest.param("worker:0", "sync", marks=pytest.mark.long),
        pytest.param("worker:0", "async", marks=pytest.mark.long),
    ],
)
def test_a_killed_worker_is_started_again_and_every_row_is_trained(
    spark: Any, tmp_path: Path, consistency: str, victim: str
) -> None:
    numbers = [([float(i % 3), float(i % 5), 1.0, 0.5], float(i % 7)) for i in range(NUM_ROWS)]
    rows = spark.parallelize(numbers, 4)
    config = ClusterConfig(restarts=Restarts(workers=1))
    args = {"out": str(tmp_path), "consistency": consistency, "step_s": 0.05}
    rank = int(victim[-1])
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(fit_slowly, args)
        first = cluster.train(rows, num_epochs=1)
        stepped = tmp_path / f"stepped-{rank}-0"
        stepped.unlink()
        killer = threading.Thread(target=lose, args=(cluster, victim, stepped))
        killer.start()
        report = cluster.train(rows, num_epochs=EPOCHS - 1)
        killer.join()
        assert cluster.phase is ClusterPhase.RUNNING, cluster.failures
    assert first is not None
    assert report is not None
    assert report.fed_rows == report.trained_rows == (EPOCHS - 1) * NUM_ROWS
    assert report.dropped_rows == 0
    told = cluster.results()
    assert told[rank]["attempt"] == 100
    assert told[1 - rank]["epochs"] == list(range(EPOCHS))
    assert told[rank]["epochs"] == list(range(told[rank]["epochs"][0], EPOCHS))
    assert told[rank]["epochs"][0] in (1, 2)
    assert [failure.node.name for failure in cluster.failures] == [victim]


def fit_and_die_early(args: dict[str, Any], ctx: Any) -> list[int]:
    """Train a line; return the steps of each epoch. Worker 1 is killed early in epoch 1."""
    import os

    import keras

    steps: list[int] = []
    model, notes = slow_training(args, ctx, [])

    def count(batch: int, logs: Any = None) -> None:
        steps[-1] += 1
        if (ctx.rank, len(steps), steps[-1]) == (1, 2, 3):
            os.kill(os.getpid(), signal.SIGKILL)

    counts = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs=None: steps.append(0), on_train_batch_end=count
    )
    model.fit(ctx.dataset(batch_size=32), epochs=EPOCHS, callbacks=[notes, counts], verbose=0)
    return steps


@pytest.mark.fault("F02")
def test_without_restarts_the_others_go_on_in_sync_and_train_the_rows_of_a_killed_worker(
    spark: Any, tmp_path: Path, capsys: Any
) -> None:
    numbers = [([float(i % 3), float(i % 5), 1.0, 0.5], float(i % 7)) for i in range(NUM_ROWS)]
    rows = spark.parallelize(numbers, 4)
    args = {"out": str(tmp_path), "consistency": "sync", "step_s": 0.05}
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(fit_and_die_early, args)
        report = cluster.train(rows, num_epochs=EPOCHS)
    assert report is not None
    assert report.fed_rows == report.trained_rows == EPOCHS * NUM_ROWS
    assert report.dropped_rows == 0
    assert re.search(
        r"worker:1@\S+ was lost: worker:1 killed by SIGKILL.*; worker:0 goes on",
        capsys.readouterr().err,
    )
    assert [failure.node.name for failure in cluster.failures] == ["worker:1"]
    history, (steps, lost) = report.history, cluster.results(default=None)
    assert lost is None
    assert history["steps"][1:] == steps[1:]  # of those that were there at the epoch's end
    assert history["rows"][0] == history["rows"][2] == NUM_ROWS
    assert NUM_ROWS - 3 * 32 <= history["rows"][1] <= NUM_ROWS


def fit_and_die_last(args: dict[str, Any], ctx: Any) -> list[int]:
    """Train a line; worker 1 is killed in epoch 1 once the chief waits for it alone."""
    import os

    seen: list[int] = []
    model, notes = slow_training(args, ctx, seen)

    def the_chief_waits() -> bool:
        opened = ctx.ps_client().stats()[0].open_rendezvous
        return any(each.key.endswith("/1/metrics") and each.missing == (1,) for each in opened)

    def die(batch: int, logs: Any = None) -> None:
        if (ctx.rank, ctx.attempt, seen[-1]) == (1, 0, 1):
            wait_until(the_chief_waits, "the chief at the end of the epoch")
            os.kill(os.getpid(), signal.SIGKILL)

    import keras

    dies = keras.callbacks.LambdaCallback(on_train_batch_end=die)
    model.fit(ctx.dataset(batch_size=32), epochs=EPOCHS, callbacks=[notes, dies], verbose=0)
    return seen


@pytest.mark.long
@pytest.mark.fault("F01")
def test_rows_lost_when_the_chief_has_ended_the_epoch_are_trained_by_the_next_attempt(
    spark: Any, tmp_path: Path
) -> None:
    numbers = [([float(i % 3), float(i % 5), 1.0, 0.5], float(i % 7)) for i in range(NUM_ROWS)]
    rows = spark.parallelize(numbers, 4)
    config = ClusterConfig(restarts=Restarts(workers=1))
    args = {"out": str(tmp_path), "consistency": "async", "step_s": 0.01}
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(fit_and_die_last, args)
        report = cluster.train(rows, num_epochs=EPOCHS)
    assert report is not None
    assert (report.trained_rows, report.dropped_rows) == (EPOCHS * NUM_ROWS, 0)
    assert cluster.results() == [[0, 1, 2], [1, 2]]


@pytest.mark.long
@pytest.mark.fault("F01")
@pytest.mark.parametrize("executor", [False, True], ids=["process", "executor"])
@pytest.mark.parametrize("victim", ["worker:1", "worker:0"])
def test_a_worker_with_data_of_its_own_goes_on_in_the_epoch_of_the_others(
    spark: Any, tmp_path: Path, victim: str, executor: bool
) -> None:
    saves = Checkpoints(directory=str(tmp_path / "saves"), every_s=0.5, keep_best="loss")
    config = ClusterConfig(restarts=Restarts(workers=1), checkpoints=saves)
    args = {"out": str(tmp_path), "consistency": "sync", "step_s": 0.05}
    rank = int(victim[-1])
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW, config=config) as cluster:
        cluster.start(read_slowly, args)
        lose(cluster, victim, tmp_path / f"stepped-{rank}-0", executor=executor)
    told = cluster.results()
    assert told[rank]["attempt"] > 0
    assert told[rank]["epochs"] == list(range(told[rank]["epochs"][0], 6))
    assert told[rank]["epochs"][0] > 0
    assert told[1 - rank]["epochs"] == list(range(6))
    assert [failure.node.name for failure in cluster.failures] == [victim]
    losses = cluster.history()["loss"]
    assert len(losses) == 6
    assert cluster.best_checkpoint().value == min(losses)


@pytest.mark.long
@pytest.mark.fault("F08")
def test_a_server_whose_executor_is_lost_goes_on_elsewhere_from_the_last_checkpoint(
    spark: Any, tmp_path: Path, capsys: Any
) -> None:
    saves = Checkpoints(directory=str(tmp_path / "saves"), every_s=0.5)
    config = ClusterConfig(restarts=Restarts(workers=0, ps=1), checkpoints=saves)
    args = {"out": str(tmp_path), "consistency": "sync", "step_s": 0.05}
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.TENSORFLOW, config=config) as cluster:
        cluster.start(read_slowly, args)
        lose(cluster, "ps:0", tmp_path / "stepped-1-0", executor=True)
    told = cluster.results()
    assert [each["epochs"] for each in told] == [list(range(6))] * 2
    assert [failure.node.name for failure in cluster.failures] == ["ps:0"]
    assert "ps:0@" in capsys.readouterr().err


def fit_all_epochs(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train the three epochs that the program asks for."""
    seen: list[int] = []
    model, notes = slow_training(args, ctx, seen)
    fitted = model.fit(ctx.dataset(batch_size=32), epochs=EPOCHS, callbacks=[notes], verbose=0)
    return {"epochs": fitted.epoch, "steps": int(model.optimizer.iterations.numpy())}


@pytest.mark.long
@pytest.mark.fault("F14")
def test_a_program_that_is_run_again_feeds_the_epochs_that_the_first_run_had_not_trained(
    spark: Any, tmp_path: Path, capsys: Any
) -> None:
    """The first run fails after one of three epochs, the second ends, the third begins anew."""
    numbers = [([float(i % 3), float(i % 5), 1.0, 0.5], float(i % 7)) for i in range(NUM_ROWS)]
    rows = spark.parallelize(numbers, 4)
    saves = Checkpoints(directory=str(tmp_path / "saves"), every_s=0.5, resume=True)
    config = ClusterConfig(checkpoints=saves)
    args = {"out": str(tmp_path), "consistency": "sync", "step_s": 0.01}

    def run(epochs: int) -> tuple[Any, list[Any]]:
        with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
            cluster.start(fit_all_epochs, args)
            report = cluster.train(rows, num_epochs=epochs)
            if epochs < EPOCHS:
                wait_until(lambda: _is_recorded(tmp_path / "saves"), "a save of the epoch")
                raise RuntimeError("of the program")
        return report, cluster.results()

    with pytest.raises(RuntimeError, match="of the program"):
        run(1)
    report, told = run(EPOCHS)
    assert report.fed_rows == report.trained_rows == 2 * NUM_ROWS
    assert [each["epochs"] for each in told] == [[1, 2]] * 2
    assert "had trained 1 of 3 epochs; they are not fed again" in capsys.readouterr().err
    report, told = run(EPOCHS)
    assert report.fed_rows == report.trained_rows == 3 * NUM_ROWS
    assert [each["epochs"] for each in told] == [[0, 1, 2]] * 2


def _is_recorded(directory: Path) -> bool:
    return any(METADATA_NAME in step.metadata for step in inspect(str(directory)).steps)


@pytest.mark.fault("F01")
def test_a_new_attempt_gets_a_slot_while_tasks_that_feed_wait_for_one(
    spark: Any, tmp_path: Path
) -> None:
    numbers = [([float(i % 3), float(i % 5), 1.0, 0.5], float(i % 7)) for i in range(100 * 640)]
    rows = spark.parallelize(numbers, 100)  # for minutes of training, on two slots that feed
    config = ClusterConfig(
        restarts=Restarts(workers=1), max_inflight_bytes=4096, reservation_timeout_s=60
    )
    args = {"out": str(tmp_path), "consistency": "async", "step_s": 0.05}
    reports: list[Any] = []

    def feed() -> None:
        with contextlib.suppress(TFOSError):  # it is aborted
            reports.append(cluster.train(rows, num_epochs=1))

    def is_back() -> bool:
        assert cluster.phase is ClusterPhase.RUNNING, cluster.failures
        nodes = {node.name: node for node in cluster.status().nodes}
        return nodes["worker:1"].attempt == 100 and nodes["worker:1"].status == "running"

    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(fit_slowly, args)
        feeding = threading.Thread(target=feed)
        feeding.start()
        lose(cluster, "worker:1", tmp_path / "stepped-1-0")
        wait_until(is_back, "attempt 100 of worker:1", timeout_s=90)
        assert not reports
        cluster.abort()
        feeding.join()
