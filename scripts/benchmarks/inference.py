"""How fast does a model answer the rows of a DataFrame, beside a query that only counts them?

Figures: P20 for each of ours against each reference; P20c: rows per second of processor time of all
    processes, predict_column against predict_batch_udf.
Method: a cached DataFrame of arrays of 784 floats and an id in 8 partitions, two executors of one
    core, an MLP 784-128-10. Ours: predict_column, KerasModel.transform, inference(df, model=) and
    TFModel.transform, which Spark's Python workers compute; inference(df), which two workers
    answer by a traced function. References: a `mapInArrow` that counts rows; predict_batch_udf
    with a traced function; a pandas_udf that calls model.predict. Batches of 1024, models read
    once. Spark takes every row with its answer. All take turns on the same executors; answers are
    compared once before.
Caveats: feed tasks and workers share the cores of one machine; with more cores they do not.
    TensorFlowOnSpark's TFModel.transform, which P20 names too, is not among them; the last
    result has it.
Bars: 0.7 of the counting query, 1.2 times predict_batch_udf, twice the pandas_udf; P20c 1.5.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.feed_df import count
from scripts.benchmarks.harness import Figure, interleave, parse_arguments, report, timed
from scripts.benchmarks.local_spark import executors
from scripts.benchmarks.reference.batch_udf import naive_predictions, predictions

NUM_WORKERS = 2
NUM_PARTITIONS = 8
BATCH_ROWS = 1024
WIDTH = 784
NAME = "MLP 784-128-10 over a DataFrame"


def main_fun(path: str, ctx: Any) -> None:
    """Answer every batch by a model's traced function."""
    import keras
    import tensorflow as tf

    model = keras.models.load_model(path)
    run = tf.function(
        lambda x: model(x, training=False),
        input_signature=[tf.TensorSpec((None, WIDTH), tf.float32)],
    )
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_arrays(BATCH_ROWS)
        if batch is not None:
            feed.batch_results(run(tf.constant(batch["pixels"])).numpy())


def rows(session: Any, num_rows: int, num_partitions: int) -> Any:
    """Return rows of an id and an array of numbers from 0 to 255."""
    from pyspark.sql import functions as f

    item = f"transform(sequence(1, {WIDTH}), i -> cast((id * 31 + i * 7) % 256 as float))"
    ids = session.range(0, num_rows, 1, num_partitions)
    return ids.select("id", f.expr(item).alias("pixels"))


def save_model(path: str, directory: str) -> None:
    """Write the model, with weights of a fixed seed, as a `.keras` file and as a SavedModel."""
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
    model.export(directory, verbose=False)


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


def ways(frame: Any, path: str, directory: str) -> dict[str, Any]:
    """Return the DataFrame answered in each way that needs no cluster."""
    from tfos import pipeline, predict_column
    from tfos.ml import KerasModel

    keras_model = KerasModel(Path(path).read_bytes()).setFeaturesCol("pixels")
    answered = {
        "predict_column": frame.select("*", predict_column(path)("pixels")),
        "KerasModel.transform": keras_model.transform(frame),
    }
    old: Any = pipeline.TFModel({}).setExportDir(directory).setBatchSize(BATCH_ROWS)
    signature = predict_column(directory).signature
    old.setInputMapping({"pixels": next(iter(signature.inputs))})
    old.setOutputMapping({next(iter(signature.outputs)): "prediction"})
    return {**answered, "TFModel.transform": old.transform(frame)}


def cpu_s(nodes: Sequence[int] = ()) -> float:
    """Return the processor time of this process, of nodes, and of all below them, in seconds.

    A process that has ended counts too, once its parent has waited for it: in the parent's time of
    its children. So an end between two readings takes nothing away.

    Args:
        nodes: process numbers of the nodes' supervisors, which are nobody's children.
    """
    import psutil

    total = 0.0
    for pid in (os.getpid(), *nodes):
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(pid)
            for process in [top, *top.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):
                    total += sum(process.cpu_times()[:4])
    return total


def main() -> None:
    args = parse_arguments(__doc__, repeats=7)
    from pyspark.sql import SparkSession

    from tfos import InputMode, TFCluster

    # TensorFlow is imported once per worker and reference: most of what the toy costs.
    num_rows, num_workers, parts = (
        (120, 1, 1) if args.toy else (96_000, NUM_WORKERS, NUM_PARTITIONS)
    )
    with tempfile.TemporaryDirectory() as base, executors(num_workers, "inference") as sc:
        path, directory = str(Path(base) / "model.keras"), str(Path(base) / "saved")
        save_model(path, directory)
        frame = rows(SparkSession(sc), num_rows, parts).cache()
        # Python workers of their own: each task ends with a garbage collection, which is slow in a
        # process that has imported TensorFlow, and quick in one where tfos has left it little.
        theirs, own = ("1", "1") if args.toy else ("1", "2")
        counting = frame.mapInArrow(count, "rows long")
        sc.environment["BATCH_UDF"] = theirs
        references = {
            "Spark predict_batch_udf (traced function)": predictions(
                frame, path, WIDTH, BATCH_ROWS
            ),
            "Spark pandas_udf (model.predict)": naive_predictions(frame, path),
        }
        sc.environment["BATCH_UDF"] = own
        ours = ways(frame, path, directory)
        with TFCluster.reserve(sc, num_workers, num_ps=0, input_mode=InputMode.SPARK) as cluster:
            cluster.start(main_fun, path)
            ours["inference(df, model=path)"] = cluster.inference(
                frame, columns=["pixels"], model=path
            )
            sc.environment["BATCH_UDF"] = "1" if args.toy else "3"
            ours["inference(df), answered by main_fun"] = cluster.inference(
                frame, columns=["pixels"]
            )
            nodes = [node.pid for node in cluster.status().nodes]
            measured(args, counting, num_rows, ours, references, nodes)


def measured(
    args: argparse.Namespace,
    counting: Any,
    num_rows: int,
    ours: dict[str, Any],
    references: dict[str, Any],
    nodes: Sequence[int],
) -> None:
    """Take all in turns and print the figures."""
    for answered in ours.values():
        if "id" in answered.columns:  # TFModel drops other columns
            compare(answered, next(iter(references.values())))

    def counted() -> None:
        found = sum(row[0] for row in counting.collect())
        if found != num_rows:
            raise RuntimeError(f"{found} rows counted of {num_rows}")

    spent: dict[str, list[float]] = {}

    def rate(name: str, work: Callable[[], None]) -> Callable[[], float]:
        def measure() -> float:
            before_s = cpu_s(nodes)
            per_s = num_rows / timed(work)
            spent.setdefault(name, []).append(num_rows / (cpu_s(nodes) - before_s))
            return per_s

        return measure

    works = {"Spark mapInArrow that counts rows": counted}
    works |= {name: partial(take, each) for name, each in {**references, **ours}.items()}
    for work in () if args.toy else works.values():
        work()
    found = dict(
        zip(works, interleave(args.repeats, *(rate(*each) for each in works.items())), strict=True)
    )
    for name in ours:
        figure = Figure("P20", f"{NAME}: {name}", "rows/s", "higher")
        for reference in ("Spark mapInArrow that counts rows", *references):
            report(
                figure,
                found[name],
                found[reference],
                reference,
                rows=num_rows,
                rows_per_cpu_s=round(statistics.median(spent[name])),
                reference_rows_per_cpu_s=round(statistics.median(spent[reference])),
            )
    figure = Figure("P20c", f"{NAME}: predict_column, processor time", "rows/CPU s", "higher")
    udf = next(iter(references))
    report(figure, spent["predict_column"], spent[udf], udf, rows=num_rows)


if __name__ == "__main__":
    main()
