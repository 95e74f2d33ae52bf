"""A slow training of a Keras model on fed rows, while parts of a YARN end around it.

survives_on_yarn.py DIRECTORY MARKS [VICTIM [EPOCHS]]
    DIRECTORY  on HDFS: checkpoints, and TOLD with what was counted, as JSON
    MARKS      on this host: files that say how far it is
    VICTIM     a node whose executor the program kills, or `memory`: a Spark task that takes more
               than its container has; empty: none
    EPOCHS     how many, if others than the usual
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JJavaError

from feeding.filesystem.registry import filesystem_for
from tests.support.node_children import java_of
from tests.support.waiting import wait_until
from tfos import Checkpoints, ClusterConfig, InputMode, Restarts, TFCluster

NUM_ROWS = 1600
EPOCHS = 6
STEP_S = 0.05
TOO_MUCH_MIB = 1500
TOLD = "told.json"


def main_fun(args: dict[str, Any], ctx: Any) -> dict[str, Any]:
    """Train a line, mark the beginning of each epoch, and tell the longest time between steps."""
    import keras

    marks, begun = Path(args["marks"]), [time.monotonic()]
    pauses = [0.0]

    def stepped(batch: int, logs: Any = None) -> None:
        pauses.append(time.monotonic() - begun[-1])
        (marks / f"stepped-{ctx.rank}-{ctx.attempt}").touch()
        time.sleep(STEP_S)
        begun.append(time.monotonic())

    notes = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs=None: (marks / f"epoch-{ctx.rank}-{epoch}").touch(),
        on_train_batch_end=stepped,
    )
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    ctx.distribute(model, consistency="sync")
    epochs = args["epochs"]
    fitted = model.fit(ctx.dataset(batch_size=32), epochs=epochs, callbacks=[notes], verbose=0)
    return {"attempt": ctx.attempt, "epochs": fitted.epoch, "pause_s": max(pauses[1:], default=0.0)}


def take_memory(_: int) -> int:
    """Use more than the container has until somebody ends the process, or fail."""
    held = b"x" * (TOO_MUCH_MIB << 20)
    time.sleep(30)
    return len(held)


class Loss:
    """Loses a node once it trains; measures how long it takes to be back."""

    def __init__(self, cluster: TFCluster, victim: str, marks: Path) -> None:
        self._cluster, self._victim, self._marks = cluster, victim, marks
        self.back_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rank = self._victim.partition(":")[2] if self._victim.startswith("worker") else "0"
        wait_until((self._marks / f"epoch-{rank}-1").exists, "epoch 1")
        if self._victim == "memory":
            sc = self._cluster._reserved.sc
            with contextlib.suppress(Py4JJavaError):
                sc.parallelize([0], 1).map(take_memory).collect()
            return
        java_of(self._cluster, self._victim).kill()
        killed_s = time.time()
        if self._victim.startswith("worker"):
            back = [self._marks / f"stepped-{rank}-{attempt}" for attempt in (1, 100, 101)]
            wait_until(lambda: any(mark.exists() for mark in back), "the new attempt's steps")
            self.back_s = time.time() - killed_s

    def end(self) -> float:
        """Wait for it; return the seconds until the lost worker's first step."""
        self._thread.join()
        return self.back_s


def main() -> None:
    """Train, and tell the counts on HDFS."""
    from pyspark.sql import SparkSession

    directory, marks, victim, epochs = (*sys.argv[1:], "", "")[:4]
    num_epochs = int(epochs or EPOCHS)
    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        numbers = [([float(i % 3), float(i % 5), 1.0, 0.5], float(i % 7)) for i in range(NUM_ROWS)]
        saves = Checkpoints(directory=f"{directory}/saves", every_s=0.5, resume=True)
        config = ClusterConfig(checkpoints=saves, restarts=Restarts(workers=1, ps=1))
        (Path(marks) / "reserving").touch()
        with TFCluster.reserve(sc, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
            cluster.start(main_fun, {"marks": marks, "epochs": num_epochs})
            loss = Loss(cluster, victim, Path(marks)) if victim else None
            report = cluster.train(sc.parallelize(numbers, 4), num_epochs=num_epochs)
            back_s = loss.end() if loss else 0.0
        assert report is not None
        told = json.dumps(
            {
                "fed": report.fed_rows,
                "trained": report.trained_rows,
                "dropped": report.dropped_rows,
                "workers": cluster.results(),
                "failures": [f"{each.node.name}: {each.message}" for each in cluster.failures],
                "back_s": back_s,
            }
        )
        path = f"{directory}/{TOLD}"
        filesystem_for(path).write(path, told.encode())


if __name__ == "__main__":
    main()
