"""How fast do rows of an RDD arrive as numpy batches, beside Spark walking the same rows?

Figure: P08.
Method: a cached RDD of lists of 784 small ints in 8 partitions, two executors of one core. Ours:
    `cluster.train` of one epoch into two workers that read full batches of 256 rows, make them
    float32 and drop them; it ends when every row was read. The reference is `foreachPartition` that
    walks the rows. Both take turns on the same executors.
Caveats: feed tasks and workers share the cores of one machine; with more cores they do not.
Bar: at least 0.5 of Spark's own walk.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.local_spark import executors

NUM_WORKERS = 2
NUM_PARTITIONS = 8
BATCH_ROWS = 256
WIDTH = 784


def main_fun(_: Any, ctx: Any) -> None:
    """Read every batch, make it float32 and drop it."""
    import numpy as np

    from feeding.columnar.batch import Batch, FeedEnd
    from feeding.receiver.batch_reader import BatchReader

    reader = BatchReader(ctx.feed_channel)
    while not isinstance(item := reader.next_batch(BATCH_ROWS), FeedEnd):
        if isinstance(item, Batch):
            (pixels,) = item.arrays
            if not isinstance(pixels, np.ndarray) or pixels.shape != (item.num_rows, WIDTH):
                raise TypeError(f"expected rows of {WIDTH} numbers, got {item.schema}")
            pixels.astype(np.float32)


def digits_like(partition: int, num_rows: int) -> Iterator[list[int]]:
    """Rows as a user has them: lists of Python ints from 0 to 255, mostly 0."""
    import numpy as np

    random = np.random.default_rng(partition)
    for _ in range(num_rows):
        pixels = random.integers(0, 256, WIDTH)
        pixels[random.random(WIDTH) < 0.8] = 0
        yield pixels.tolist()


def walk(rows: Iterator[Any]) -> None:
    """Do what any Spark program does at least: look at every row."""
    for _ in rows:
        pass


def main() -> None:
    args = parse_arguments(__doc__, repeats=5)
    from tfos import InputMode, TFCluster

    per_partition = 100 if args.toy else 6000
    num_rows = per_partition * NUM_PARTITIONS
    with executors(NUM_WORKERS, "feed_rdd") as sc:
        rows = (
            sc.parallelize(range(NUM_PARTITIONS), NUM_PARTITIONS)
            .flatMap(lambda partition: digits_like(partition, per_partition))
            .cache()
        )
        rows.foreachPartition(walk)
        with TFCluster.reserve(sc, NUM_WORKERS, num_ps=0, input_mode=InputMode.SPARK) as cluster:
            cluster.start(main_fun)

            def feed() -> None:
                done = cluster.train(rows, num_epochs=1)
                if done is None or done.epochs[0].trained_rows != num_rows:
                    raise RuntimeError(f"not all of {num_rows} rows arrived: {done}")

            feed()
            ours, reference = interleave(
                args.repeats,
                lambda: num_rows / timed(feed),
                lambda: num_rows / timed(lambda: rows.foreachPartition(walk)),
            )
    figure = Figure("P08", "RDD of 784-int lists into float32 batches", "rows/s", "higher")
    report(figure, ours, reference, "Spark foreachPartition over the same RDD", rows=num_rows)


if __name__ == "__main__":
    main()
