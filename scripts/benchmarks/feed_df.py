"""How fast do rows of a DataFrame arrive as numpy batches, beside a query that counts them?

Figures: P09 for 784 floats, 784 doubles and 39 narrow columns.
Method: cached DataFrames in 8 partitions, two executors of one core: one column of arrays of 784
    floats (doubles), and 39 columns of ints, floats and doubles. Ours: `cluster.train` of one epoch
    into two workers that read full batches of 256 rows (4096 of the narrow ones), make them float32
    and drop them; it ends when every row was read. The reference is a `mapInArrow` that counts the
    rows of its batches. Both take turns on the same executors.
Caveats: feed tasks and workers share the cores of one machine; with more cores they do not.
Bar: at least 0.7 of the counting query.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.local_spark import executors

NUM_WORKERS = 2
NUM_PARTITIONS = 8
WIDTH = 784
NUM_NARROW = 39
NAME = "DataFrame of {} into float32 batches"


def main_fun(feeds: list[str], ctx: Any) -> None:
    """Read every batch of every feed, make it float32 and drop it."""
    import threading

    sizes = {"wide": 256, "double": 256, "narrow": 4096}

    def read(feed: str, batch_rows: int) -> None:
        import numpy as np

        from feeding.columnar.batch import Batch, FeedEnd
        from feeding.receiver.batch_reader import BatchReader

        reader = BatchReader(ctx.feed_channel, feed)
        while not isinstance(item := reader.next_batch(batch_rows), FeedEnd):
            if isinstance(item, Batch):
                for column in item.arrays:
                    if not isinstance(column, np.ndarray):
                        raise TypeError(f"expected columns of numbers, got {item.schema}")
                    column.astype(np.float32, copy=False)

    readers = [threading.Thread(target=read, args=(feed, sizes[feed])) for feed in feeds]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def count(batches: Iterator[Any]) -> Iterator[Any]:
    """Do what any Arrow function does at least: look at every batch."""
    import pyarrow as pa

    yield pa.record_batch({"rows": [sum(batch.num_rows for batch in batches)]})


def wide(session: Any, num_rows: int, num_partitions: int, kind: str) -> Any:
    """Return rows of one array of numbers from 0 to 255."""
    from pyspark.sql import functions as f

    item = f"transform(sequence(1, {WIDTH}), i -> cast((id * 31 + i * 7) % 256 as {kind}))"
    return session.range(0, num_rows, 1, num_partitions).select(f.expr(item).alias("pixels"))


def narrow(session: Any, num_rows: int, num_partitions: int) -> Any:
    """Return rows of 13 ints, 13 floats and 13 doubles, as of tables of clicks."""
    from pyspark.sql import functions as f

    kinds = ("int", "float", "double")
    columns = [
        f.expr(f"cast((id * {i + 3}) % 1000 as {kinds[i % 3]})").alias(f"c{i}")
        for i in range(NUM_NARROW)
    ]
    return session.range(0, num_rows, 1, num_partitions).select(*columns)


def main() -> None:
    args = parse_arguments(__doc__, repeats=5)
    from pyspark.sql import SparkSession

    from tfos import InputMode, TFCluster

    scale, parts = (1, NUM_WORKERS) if args.toy else (100, NUM_PARTITIONS)
    with executors(NUM_WORKERS, "feed_df") as sc:
        session = SparkSession(sc)
        frames = {
            "wide": (wide(session, 480 * scale, parts, "float"), f"{WIDTH} floats"),
            "double": (wide(session, 320 * scale, parts, "double"), f"{WIDTH} doubles"),
            "narrow": (narrow(session, 8000 * scale, parts), f"{NUM_NARROW} columns"),
        }
        if args.toy:  # Spark compiles a plan per frame: most of what the toy costs
            frames = {"wide": frames["wide"]}
        with TFCluster.reserve(
            sc, NUM_WORKERS, num_ps=0, input_mode=InputMode.SPARK, queues=list(frames)
        ) as cluster:
            cluster.start(main_fun, list(frames))
            for feed, (frame, what) in frames.items():
                measure(cluster, feed, frame.cache(), NAME.format(what), args)
                frame.unpersist()


def measure(cluster: Any, feed: str, frame: Any, name: str, args: argparse.Namespace) -> None:
    """Print the figure of one DataFrame."""
    num_rows = frame.count()

    def ours() -> None:
        done = cluster.train(frame, num_epochs=1, qname=feed)
        if done is None or done.epochs[0].trained_rows != num_rows:
            raise RuntimeError(f"not all of {num_rows} rows arrived: {done}")

    def reference() -> None:
        found = sum(row[0] for row in frame.mapInArrow(count, "rows long").collect())
        if found != num_rows:
            raise RuntimeError(f"{found} rows counted of {num_rows}")

    if not args.toy:
        ours()
        reference()
    mine, counted = interleave(
        args.repeats, lambda: num_rows / timed(ours), lambda: num_rows / timed(reference)
    )
    figure = Figure("P09", name, "rows/s", "higher")
    report(figure, mine, counted, "Spark mapInArrow that counts rows", rows=num_rows)


if __name__ == "__main__":
    main()
