"""How long does a small training take as a whole, beside plain Keras in a fresh process?

Figure: P29.
Method: 60,000 rows of 784 floats and a label in a cached RDD of lists, 8 partitions, three
    executors of one core that are up already. Ours: from the call of `TFCluster.run` to the end of
    `shutdown`, 1 PS + 2 asynchronous workers, MLP 784-128-10, Adam, batches of 64, one epoch. The
    reference is from the start to the end of a process that imports Keras and fits the same model
    on the same rows, which it maps from a file. Both take turns. The line also has the median
    seconds of the three calls.
Caveats: the import of Keras, 5 s of processor time, is once in the reference and twice in ours, on
    the same two cores; the feed tasks share these cores too.
Bar: at least 0.65 of plain Keras' rows per second.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from scripts.benchmarks.harness import ROOT, Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.local_spark import executors
from scripts.benchmarks.reference import plain_keras

NUM_WORKERS = 2
NUM_PARTITIONS = 8


def main_fun(_: Any, ctx: Any) -> None:
    """Train one epoch of what is fed."""
    import keras  # noqa: F401 - as a user's main_fun has it

    model = ctx.distribute(plain_keras.compiled_model())
    rows = ctx.dataset(
        plain_keras.BATCH_ROWS,
        feature_cols=slice(0, plain_keras.WIDTH),
        label_cols=plain_keras.WIDTH,
    )
    model.fit(rows, epochs=1, verbose=0, callbacks=ctx.callbacks())


def rows_of(partition: int, num_rows: int) -> Iterator[list[float]]:
    """Rows as a user has them: lists of floats, the label last."""
    for row in plain_keras.rows(partition, num_rows):
        yield row.tolist()


def ours(sc: Any, data: Any, num_workers: int, took_s: dict[str, list[float]]) -> float:
    """Start a cluster, train and end it; return the seconds of all that."""
    from tfos import InputMode, TFCluster

    begun = time.perf_counter()
    cluster = TFCluster.run(
        sc, main_fun, None, num_workers + 1, num_ps=1, input_mode=InputMode.SPARK
    )
    took_s["start_s"].append(time.perf_counter() - begun)
    took_s["train_s"].append(timed(lambda: cluster.train(data, num_epochs=1)))
    took_s["shutdown_s"].append(timed(cluster.shutdown))
    return time.perf_counter() - begun


def alone(path: Path, *, here: bool) -> float:
    """Return the seconds of the same training by one process.

    Args:
        path: path of the rows.
        here: whether it runs in this process, without a start and an import of its own.
    """
    if here:
        return timed(lambda: plain_keras.fit(path))
    command = [sys.executable, "-m", plain_keras.__name__, str(path)]
    return timed(lambda: subprocess.run(command, cwd=ROOT, check=True, timeout=600))


def main() -> None:
    args = parse_arguments(__doc__, repeats=3)
    num_workers = 1 if args.toy else NUM_WORKERS  # each imports Keras
    per_partition = 16 if args.toy else 7500
    num_rows = per_partition * NUM_PARTITIONS
    took_s: dict[str, list[float]] = {"start_s": [], "train_s": [], "shutdown_s": []}
    with (
        tempfile.TemporaryDirectory(prefix="tfos-bench-") as directory,
        executors(NUM_WORKERS + 1, "end_to_end") as sc,
    ):
        path = Path(directory) / "rows.npy"
        plain_keras.save(path, NUM_PARTITIONS, per_partition)
        data = (
            sc.parallelize(range(NUM_PARTITIONS), NUM_PARTITIONS)
            .flatMap(lambda partition: rows_of(partition, per_partition))
            .cache()
        )
        data.count()
        if not args.toy:
            ours(sc, data, num_workers, {name: [] for name in took_s})  # fills the kernel cache
        mine, theirs = interleave(
            args.repeats,
            lambda: num_rows / ours(sc, data, num_workers, took_s),
            lambda: num_rows / alone(path, here=args.toy),
        )
    report(
        Figure("P29", "training of 60,000 rows from run() to shutdown()", "rows/s", "higher"),
        mine,
        theirs,
        "one fresh process with plain Keras",
        **{name: round(median(seconds), 2) for name, seconds in took_s.items()},
    )


if __name__ == "__main__":
    main()
