"""How fast does an RDD of many small partitions arrive, beside Spark walking the same partitions?

Figure: P28.
Method: a cached RDD of 1,000 partitions of 100 rows of 20 numbers; four executors of one core, of
    which two run tasks and the others are held by a job that only waits. Ours: `cluster.train` of
    one epoch into four workers that read batches of 256 rows and drop them; it ends when every row
    was read. The reference is `foreachPartition` that walks the rows. Both take turns on the same
    executors.
    `cpu_ms_per_partition` is the processor time of all processes, driver, executors and workers.
Caveats: nearly all of the time is Spark's own for starting a task. Feed tasks and workers share the
    cores of one machine; with more cores they do not.
Bar: at least 0.87 of Spark's own walk.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from scripts.benchmarks.feed_rdd import walk
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.local_spark import executors

NUM_WORKERS = 4
NUM_FEED_SLOTS = 2
NUM_PARTITIONS = 1000
PARTITION_ROWS = 100
WIDTH = 20
BATCH_ROWS = 256
HOLD_TIMEOUT_S = 120.0
MARK = ("TFOS_BENCHMARK_OF", str(os.getpid()))
"""Mark in the environment of all processes of this run, also those that outlive their parent."""


def main_fun(_: Any, ctx: Any) -> None:
    """Read every batch and drop it."""
    import numpy as np

    from feeding.columnar.batch import Batch, FeedEnd
    from feeding.receiver.batch_reader import BatchReader

    reader = BatchReader(ctx.feed_channel)
    while not isinstance(item := reader.next_batch(BATCH_ROWS), FeedEnd):
        if isinstance(item, Batch):
            (numbers,) = item.arrays
            if not isinstance(numbers, np.ndarray) or numbers.shape != (item.num_rows, WIDTH):
                raise TypeError(f"expected rows of {WIDTH} numbers, got {item.schema}")


def numbers(partition: int) -> Iterator[list[int]]:
    """Rows as a user has them: lists of Python ints."""
    import numpy as np

    return iter(
        np.random.default_rng(partition).integers(0, 1000, (PARTITION_ROWS, WIDTH)).tolist()
    )


def cpu_s() -> float:
    """Return the processor time that all processes of this run have used, those alive now."""
    total = 0.0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid == os.getpid() or process.environ().get(MARK[0]) == MARK[1]:
                used = process.cpu_times()
                total += used.user + used.system
    return total


def measured(work: Callable[[], object], used_s: list[float]) -> float:
    """Return how many seconds `work` took; append its processor time."""
    before_s = cpu_s()
    seconds = timed(work)
    used_s.append(cpu_s() - before_s)
    return seconds


@contextlib.contextmanager
def held_slots(sc: Any, count: int) -> Iterator[None]:
    """Keep `count` executors of one core busy with tasks that only wait."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def hold(rows: Iterator[int]) -> None:
            (directory / f"held-{next(iter(rows))}").touch()
            while directory.exists() and not (directory / "free").exists():
                time.sleep(0.2)

        job = threading.Thread(
            target=lambda: sc.parallelize(range(count), count).foreachPartition(hold)
        )
        job.start()
        try:
            deadline_s = time.monotonic() + HOLD_TIMEOUT_S
            while len(list(directory.glob("held-*"))) < count:
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"no {count} free slots in {HOLD_TIMEOUT_S:.0f} s")
                time.sleep(0.05)
            yield
        finally:
            (directory / "free").touch()
            job.join()


def main() -> None:
    args = parse_arguments(__doc__, repeats=5)
    from tfos import InputMode, TFCluster

    num_partitions = 20 if args.toy else NUM_PARTITIONS
    num_rows = num_partitions * PARTITION_ROWS
    os.environ[MARK[0]] = MARK[1]
    our_cpu_s: list[float] = []
    walk_cpu_s: list[float] = []
    with (
        executors(NUM_WORKERS, "feed_parts") as sc,
        TFCluster.reserve(sc, NUM_WORKERS, num_ps=0, input_mode=InputMode.SPARK) as cluster,
    ):
        cluster.start(main_fun)
        with held_slots(sc, NUM_WORKERS - NUM_FEED_SLOTS):
            # Cached after the slots are held, so that every partition is where it is read.
            rows = sc.parallelize(range(num_partitions), num_partitions).flatMap(numbers).cache()
            rows.foreachPartition(walk)

            def feed() -> None:
                done = cluster.train(rows, num_epochs=1)
                if done is None or done.epochs[0].trained_rows != num_rows:
                    raise RuntimeError(f"not all of {num_rows} rows arrived: {done}")

            feed()
            ours, reference = interleave(
                args.repeats,
                lambda: num_rows / measured(feed, our_cpu_s),
                lambda: num_rows / measured(lambda: rows.foreachPartition(walk), walk_cpu_s),
            )
    ratios = [mine / walked for mine, walked in zip(ours, reference, strict=True)]
    figure = Figure("P28", "RDD of 1,000 small partitions into batches", "rows/s", "higher")
    report(
        figure,
        ours,
        reference,
        "Spark foreachPartition over the same RDD",
        rows=num_rows,
        partitions=num_partitions,
        workers=NUM_WORKERS,
        cpu_ms_per_partition={
            "ours": round(1e3 * statistics.median(our_cpu_s) / num_partitions, 2),
            "reference": round(1e3 * statistics.median(walk_cpu_s) / num_partitions, 2),
        },
        ratios=sorted(round(ratio, 3) for ratio in ratios),
    )


if __name__ == "__main__":
    main()
