"""A worker that trains on files, and stops after some batches until it is told to go on.

Run by test_hdfs_training, as a process of its own because of TensorFlow: `DIRECTORY ROWS`. There
are files of two formats; it trains on one after the other, but reads both from the beginning.
"""

from __future__ import annotations

import sys

import keras

from feeding.formats.tfrecord.example import Feature
from tests.support.keras_training import serving
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.fit.distribute import distribute
from tfos.reading.file_rows import FileRows
from tfos.reading.reading import Reading
from tfos.worker.reports.seen_progress import SeenProgress

STOPS_AFTER = 3
UNTRAINED_LOSS = 8.0
"""Variance of the labels, sums of 8 numbers."""


class Place:
    """What ctx.read asks of a context."""

    rank = 0
    num_workers = 1
    seen_progress = SeenProgress(lambda _: None)

    def absolute_path(self, path: str) -> str:
        return path

    def check_servers_used(self, what: str) -> None:
        """The model is distributed."""


class StopOnce(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.batches += 1
        if self.batches == STOPS_AFTER:
            sys.stdout.write("reading\n")
            sys.stdout.flush()
            sys.stdin.readline()


def rows_in(file_format: str, directory: str) -> FileRows:
    reading = Reading(Place())  # type: ignore[arg-type]
    if file_format == "parquet":
        return reading.parquet(directory, ["x", "y"])
    columns = {"x": Feature("float32", (256,)), "y": Feature("float32", (1,))}
    return reading.tfrecord(directory, columns)


def train(data: BatchDataset, num_rows: int, stop: StopOnce) -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    with serving(num_workers=1) as cluster:
        model = distribute(model, cluster.contexts[0])
        loss = model.fit(data, verbose=0, callbacks=[stop]).history["loss"][0]
        if cluster.rows(0) != num_rows:
            raise RuntimeError(f"trained on {cluster.rows(0)} rows, not on {num_rows}")
    if not loss < UNTRAINED_LOSS / 2:
        raise RuntimeError(f"loss {loss}")


def main() -> None:
    directory, num_rows = sys.argv[1], int(sys.argv[2])
    sets = [
        rows_in(file_format, f"{directory}/{file_format}").dataset(
            512, feature_cols="x", label_cols="y"
        )
        for file_format in ("parquet", "tfrecord")
    ]
    sets[1].start_epoch()  # both are being read when training stops
    stop = StopOnce()
    for data in sets:
        train(data, num_rows, stop)
    sys.stdout.write("trained\n")


if __name__ == "__main__":
    main()
