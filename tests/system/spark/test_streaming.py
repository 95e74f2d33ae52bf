"""Structured Streams: each row once in the saved parameters, whatever stops when."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ps.cli.main import main as checkpoint_command
from tests.support.feed import eventually
from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster
from tfos.control import messages
from tfos.errors import FeedJobError, NodeFailedError, PhaseError, SettingsError
from tfos.watch import ticket
from tfos.watch.operator import Operator, choose

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(500, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]

WAIT_S = 180.0
POISON = -1.0
BROKEN = -2.0


def add_up(args, ctx):
    """Train one weight to which every row adds itself: it tells which rows it has seen."""
    import threading

    import keras

    pause = threading.Event()

    def grow(_, predicted):
        return -keras.ops.sum(predicted)

    class Signs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        """Let the test stop in the middle of a batch, or fail in it."""

        def on_train_batch_end(self, batch, logs=None):
            directory = Path(args)
            if (directory / "stand").exists():
                (directory / f"stands-{ctx.rank}").touch()
                while (directory / "stand").exists():
                    pause.wait(0.01)

    def check(x, y):
        if (x == POISON).any():
            raise ValueError("a poisoned row")
        return x, y

    model = keras.Sequential(
        [
            keras.Input((1,)),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
        ]
    )
    model.compile(optimizer=keras.optimizers.SGD(1.0), loss=grow)
    ctx.distribute(model, staleness_aware=False)
    rows = ctx.dataset(4, feature_cols="x", label_cols="y", map_fn=check)
    model.fit(rows, epochs=ctx.all_epochs, callbacks=[*ctx.callbacks(), Signs()], verbose=0)


class Bed:
    """A directory of files as a stream, the same checkpoint for every query."""

    files_per_batch = 1

    def __init__(self, sc: Any, root: Path) -> None:
        from pyspark.sql import SparkSession

        self.session = SparkSession(sc)
        self.sc = sc
        self.source, self.progress, self.saves = root / "in", root / "query", root / "saves"
        self.signs = root / "signs"
        for path in (self.source, self.signs):
            path.mkdir()
        self._files = 0

    def put(self, *values: float) -> None:
        """Add a file, which becomes a micro-batch."""
        self._files += 1
        text = "".join(f"{value}\n" for value in values)
        hidden = self.source / f".{self._files}"
        hidden.write_text(text)
        hidden.rename(self.source / f"{self._files:03d}.csv")

    def rows(self) -> Any:
        """Return the stream of rows {x: [number], y: 0}; numbers that are 0 are left out."""
        lines = self.session.readStream.schema("value double")
        lines = lines.option("maxFilesPerTrigger", self.files_per_batch)
        found = lines.csv(str(self.source)).where("value != 0")
        broken = f"if(value = {BROKEN}, double(raise_error('a broken row')), value)"
        return found.selectExpr(f"array({broken}) as x", "0D as y")

    def start(self, cluster: TFCluster) -> Any:
        return cluster.stream(self.rows().writeStream, str(self.progress))

    def start_epochs(self, cluster: TFCluster) -> Any:
        """Start a query whose batches would be epochs."""
        writer = self.rows().writeStream.foreachBatch(lambda rows, _: cluster.train(rows, 1))
        return writer.option("checkpointLocation", f"{self.progress}-epochs").start()

    def cluster(self, size: int = 3) -> TFCluster:
        saves = Checkpoints(directory=str(self.saves), every_s=3600, resume=True)
        config = ClusterConfig(checkpoints=saves)
        made = TFCluster.reserve(self.sc, size, 1, input_mode=InputMode.SPARK, config=config)
        made.start(add_up, str(self.signs))
        return made

    def saved_weight(self) -> float:
        """Return the weight in the newest save."""
        import numpy as np

        path = self.saves.parent / "weight.npz"
        path.unlink(missing_ok=True)
        assert checkpoint_command(["export", str(self.saves), "--npz", str(path)]) == 0
        with np.load(path) as arrays:
            (name,) = [name for name in arrays.files if "kernel" in name]
            return float(arrays[name].sum())

    def forget(self, batch_id: int, *logs: str) -> None:
        """Take a batch out of Spark's own notes, as if it had died before it wrote them."""
        for log in logs:
            (self.progress / log / str(batch_id)).unlink()
            (self.progress / log / f".{batch_id}.crc").unlink(missing_ok=True)


def test_each_row_of_a_stream_is_once_in_the_saved_parameters(spark, tmp_path, capfd):
    bed = Bed(spark, tmp_path)
    with bed.cluster() as cluster:
        bed.put(*range(1, 30))
        bed.put(100.0)
        training = bed.start(cluster)
        eventually(lambda: training.last_batch_id == 1, "two batches", WAIT_S)
        assert training.rows == 30
        eventually(lambda: training.lag is not None, "Spark's progress", WAIT_S)

        # The program dies in the middle of batch 2; Spark had no time to mark batch 1 as done.
        (bed.signs / "stand").touch()
        bed.put(*range(1000, 1009))
        eventually(lambda: any(bed.signs.glob("stands-*")), "a batch under way", WAIT_S)
        cluster.abort()
        (bed.signs / "stand").unlink()
        stopped = r"was stopped while it trained|became \w+ while it was fed"
        with pytest.raises(PhaseError, match=stopped):
            training.await_end(WAIT_S)
    bed.forget(1, "commits")
    bed.forget(2, "offsets")
    assert bed.saved_weight() == sum(range(1, 30)) + 100

    with bed.cluster(size=2) as cluster:
        training = bed.start(cluster)
        bed.put(20_000.0)
        eventually(lambda: training.rows == 9 + 1, "the other rows", WAIT_S)
        last = training.last_batch_id
        bed.put(0.0)  # a batch without rows is no epoch
        eventually(lambda: training.last_batch_id == last + 1, "the empty batch", WAIT_S)
        assert training.rows == 9 + 1
        training.stop()
        assert not training.is_active
        assert training.error is None
        assert sum(training.history["rows"]) == 9 + 1
        assert len(training.history["loss"]) == training.num_batches
        total = sum(range(1, 30)) + 100 + sum(range(1000, 1009)) + 20_000
        assert bed.saved_weight() == total

        # The cluster goes on: the same query again, started by Spark's own call.
        bed.put(7.0)
        writer = bed.rows().writeStream.foreachBatch(cluster.train_batch)
        training = cluster.stream(writer.option("checkpointLocation", str(bed.progress)).start())
        eventually(lambda: training.last_batch_id == last + 2, "one more batch", WAIT_S)
        assert f"batch {last + 2}, 11 rows" in str(training)
    assert not training.is_active  # shutdown() has stopped it
    assert bed.saved_weight() == total + 7
    shown = capfd.readouterr().err
    assert "ValueError" not in shown
    assert shown.count("is in the parameters already: skipped") == 1
    assert "batch 1 is in the parameters already: skipped" in shown
    assert "FeedEndedWarning" not in shown
    assert "terminated with error" not in shown


def ask_to_stop(cluster: TFCluster) -> None:
    """As `tfos stop` does."""
    with Operator(choose(ticket.read_all(), cluster.cluster_id)) as operator:
        assert operator.ask(messages.Ask("stop"))["is_done"]


@pytest.mark.long
def test_a_stop_that_was_asked_for_ends_a_stream_in_order(spark, tmp_path, capfd):
    bed = Bed(spark, tmp_path)
    with bed.cluster() as cluster:
        bed.put(1.0, 2.0)
        training = bed.start(cluster)
        eventually(lambda: training.last_batch_id == 0, "a batch", WAIT_S)
        (bed.signs / "stand").touch()
        bed.put(*range(10, 19))
        eventually(lambda: any(bed.signs.glob("stands-*")), "a batch under way", WAIT_S)
        bed.put(1000.0)  # it would be the next batch
        ask_to_stop(cluster)
        (bed.signs / "stand").unlink()
        assert training.await_end(WAIT_S)
        assert (training.error, training.last_batch_id) == (None, 1)
    total = 3 + sum(range(10, 19))
    assert bed.saved_weight() == total

    with bed.cluster(size=2) as cluster:
        training = bed.start(cluster)
        eventually(lambda: training.last_batch_id == 2, "the batch that was held back", WAIT_S)
        ask_to_stop(cluster)  # no data comes
        assert training.await_end(WAIT_S)
        assert training.error is None
        with pytest.raises(PhaseError, match=r"stream\(\) comes after a stop"):
            bed.start(cluster)
    assert bed.saved_weight() == total + 1000
    assert "terminated with error" not in capfd.readouterr().err


@pytest.mark.long
def test_a_batch_of_which_a_part_could_not_be_read_comes_again_whole(spark, tmp_path):
    bed = Bed(spark, tmp_path)
    bed.files_per_batch = 2
    bed.put(1.0)
    bed.put(2.0)
    with bed.cluster() as cluster:
        training = bed.start(cluster)
        eventually(lambda: training.last_batch_id == 0, "a batch", WAIT_S)
        training.stop()
        bed.put(5.0)  # is trained while the other file is read
        bed.put(*[0.0] * 300_000, BROKEN)
        training = bed.start(cluster)
        with pytest.raises(FeedJobError, match="a broken row"):
            training.await_end(WAIT_S)
        assert training.last_batch_id == 0
        cluster.abort()
    assert bed.saved_weight() == 1 + 2
    (bed.source / "004.csv").write_text("6.0\n")
    with bed.cluster() as cluster:
        training = bed.start(cluster)
        eventually(lambda: training.last_batch_id == 1, "the batch again", WAIT_S)
        training.stop()
    assert bed.saved_weight() == 1 + 2 + 5 + 6


@pytest.mark.long
def test_a_cluster_that_fails_ends_the_stream_with_its_own_error(spark, tmp_path):
    from pyspark.errors import StreamingQueryException

    bed = Bed(spark, tmp_path)
    with bed.cluster() as cluster:
        with pytest.raises(SettingsError, match=r"takes a streaming DataFrame.*got int"):
            cluster.stream(7)
        training = bed.start(cluster)
        bed.put(1.0, 2.0)
        eventually(lambda: training.last_batch_id == 0, "a batch", WAIT_S)
        training.stop()
        query = bed.start_epochs(cluster)
        with pytest.raises(StreamingQueryException, match=r"foreachBatch\(cluster\.train_batch\)"):
            query.awaitTermination()
        training = bed.start(cluster)
        bed.put(POISON)
        with pytest.raises(NodeFailedError, match="ValueError: a poisoned row") as caught:
            training.await_end(WAIT_S)
        assert "poisoned row" in str(caught.value.__cause__)
        assert training.last_batch_id == 0
        assert "NodeFailedError: ValueError: a poisoned row" in str(training.query.exception())
    shutil.rmtree(bed.progress)
