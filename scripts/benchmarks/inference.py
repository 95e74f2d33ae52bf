"""How fast does a model answer the rows of a DataFrame, beside a query that only counts them?

Figures: P20, once against the counting query and once against Spark's predict_batch_udf.
Method: a cached DataFrame of arrays of 784 floats and an id in 8 partitions, two executors of one
    core, an MLP 784-128-10. Ours: `cluster.inference`, answered by two workers in batches of 1024;
    predict_batch_udf: batches of 1024, one model per executor. Both call the model by
    `predict_on_batch`, and Spark takes every row with its id and its answer. The counting query is
    a `mapInArrow`. All take turns on the same executors; answers are compared once before.
Caveats: feed tasks and workers share the cores of one machine; with more cores they do not.
    TensorFlowOnSpark's TFModel.transform, which P20 names too, is not among them.
Bars: at least 0.6 of the counting query, at least 1.4 times predict_batch_udf.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.benchmarks.feed_df import count
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.local_spark import executors
from scripts.benchmarks.reference.batch_udf import predictions

NUM_WORKERS = 2
NUM_PARTITIONS = 8
BATCH_ROWS = 1024
WIDTH = 784
NAME = "MLP 784-128-10 over a DataFrame"


def main_fun(path: str, ctx: Any) -> None:
    """Answer every batch by a model."""
    import keras

    model = keras.models.load_model(path)
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_arrays(BATCH_ROWS)
        if batch is not None:
            feed.batch_results(model.predict_on_batch(batch["pixels"]))


def rows(session: Any, num_rows: int) -> Any:
    """Return rows of an id and an array of numbers from 0 to 255."""
    from pyspark.sql import functions as f

    item = f"transform(sequence(1, {WIDTH}), i -> cast((id * 31 + i * 7) % 256 as float))"
    ids = session.range(0, num_rows, 1, NUM_PARTITIONS)
    return ids.select("id", f.expr(item).alias("pixels"))


def save_model(path: str) -> None:
    """Write the model, with weights of a fixed seed."""
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            layers.Rescaling(1 / 255),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.save(path)


def take(frame: Any) -> None:
    """Have Spark make every row with its columns, and drop them."""
    frame.write.format("noop").mode("overwrite").save()


def compare(ours: Any, reference: Any) -> None:
    """Check that both give the same answers, a few in all partitions."""
    import numpy as np

    found, wanted = (
        np.array([row.prediction for row in frame.filter("id % 97 = 0").orderBy("id").collect()])
        for frame in (ours, reference)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def main() -> None:
    args = parse_arguments(__doc__, repeats=7)
    from pyspark.sql import SparkSession

    from tfos import InputMode, TFCluster

    # TensorFlow is imported once per worker and reference: most of what the toy costs.
    num_rows, num_workers = (480, 1) if args.toy else (96_000, NUM_WORKERS)
    with tempfile.TemporaryDirectory() as directory, executors(num_workers, "inference") as sc:
        path = str(Path(directory) / "model.keras")
        save_model(path)
        frame = rows(SparkSession(sc), num_rows).cache()
        # Python workers of its own: each task ends with a garbage collection, which is slow in a
        # process that has imported TensorFlow.
        sc.environment["BATCH_UDF"] = "1"
        by_udf = predictions(frame, path, WIDTH, BATCH_ROWS)
        del sc.environment["BATCH_UDF"]
        with TFCluster.reserve(sc, num_workers, num_ps=0, input_mode=InputMode.SPARK) as cluster:
            cluster.start(main_fun, path)
            answered = cluster.inference(frame, columns=["pixels"])
            compare(answered, by_udf)

            def counted() -> None:
                found = sum(row[0] for row in frame.mapInArrow(count, "rows long").collect())
                if found != num_rows:
                    raise RuntimeError(f"{found} rows counted of {num_rows}")

            def rate(work: Callable[[], None]) -> Callable[[], float]:
                return lambda: num_rows / timed(work)

            measures = [rate(lambda: take(answered)), rate(counted), rate(lambda: take(by_udf))]
            for measure in measures:
                measure()
            ours, sink, udf = interleave(args.repeats, *measures)
    figure = Figure("P20", NAME, "rows/s", "higher")
    report(figure, ours, sink, "Spark mapInArrow that counts rows", rows=num_rows)
    report(figure, ours, udf, "Spark predict_batch_udf", rows=num_rows)


if __name__ == "__main__":
    main()
