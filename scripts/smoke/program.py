"""Train on Parquet files that workers read and on a DataFrame; write and read TFRecord files.

    spark-submit --master local[4] program.py DIRECTORY

Short, and through every interface of Spark, Arrow and Keras that has changed between versions.
Prints `place: FILE` for each package of tfos, as the driver and a worker import them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tfos import InputMode, TFCluster

ROWS = 2048
BATCH = 64


def places() -> list[str]:
    import feeding
    import ps
    import pyspark_tfrecord
    import rpc
    import tfos

    return [str(package.__file__) for package in (feeding, ps, pyspark_tfrecord, rpc, tfos)]


def check(is_right: bool, text: str) -> None:
    if not is_right:
        raise SystemExit(text)


def line_model() -> Any:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
    return model


def train_fun(args: dict[str, str], ctx: Any) -> None:
    """Train on Parquet files that the worker reads, then on the DataFrame that Spark feeds."""
    model = line_model()
    ctx.distribute(model)
    columns = {"feature_cols": ["a", "b"], "label_cols": "y"}
    read = ctx.read.parquet(args["parquet"]).shuffled(1).dataset(BATCH, **columns)
    model.fit(read, epochs=4, callbacks=ctx.callbacks(), verbose=0)
    model.fit(ctx.dataset(BATCH, **columns), epochs=2, callbacks=ctx.callbacks(), verbose=0)
    ctx.export(model, args["model"])
    Path(args["places"]).write_text("\n".join(places()))


def answer_fun(args: dict[str, str], ctx: Any) -> None:
    """The exported model answers each row of a DataFrame."""
    import keras
    import numpy as np

    model = keras.models.load_model(args["model"])
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        batch = feed.next_arrays(BATCH)
        if batch is not None:
            features = np.stack([batch["a"], batch["b"]], axis=1)
            feed.batch_results(model.predict_on_batch(features)[:, 0])


def train(sc: Any, args: dict[str, str], frame: Any) -> None:
    with TFCluster.reserve(sc, 2, num_ps=1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(train_fun, args)
        cluster.train(frame, num_epochs=2)


def answer_frame(sc: Any, args: dict[str, str], frame: Any) -> float:
    """Return the largest error of the answers, next to 2a - b."""
    with TFCluster.reserve(sc, 1, num_ps=0, input_mode=InputMode.SPARK) as cluster:
        cluster.start(answer_fun, args)
        scored = cluster.inference(frame, columns=["a", "b"], output="prediction float").collect()
    check(len(scored) == ROWS, f"{len(scored)} answers for {ROWS} rows")
    return float(max(abs(row["prediction"] - row["y"]) for row in scored))


def main() -> None:
    from pyspark.sql import SparkSession

    directory = Path(sys.argv[1])
    names = ("parquet", "model.keras", "places.txt", "tfrecord")
    parquet, model, told, tfrecord = (str(directory / name) for name in names)
    args = {"parquet": parquet, "model": model, "places": told}
    directory.mkdir()
    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        columns = ("cast(id % 3 - 1 as float) a", "cast(id % 5 - 2 as float) b")
        frame = spark.range(ROWS).selectExpr(*columns).selectExpr("a", "b", "2 * a - b as y")
        frame.write.parquet(parquet)
        frame.write.format("tfrecord").mode("append").save(tfrecord)
        back = spark.read.format("tfrecord").load(tfrecord)
        check(sorted(back.collect()) == sorted(frame.collect()), "TFRecord files differ")
        train(sc, args, frame)
        worst = answer_frame(sc, args, frame)
        check(worst < 1.0, f"an answer is wrong by {worst}")
    for place in (*places(), *Path(told).read_text().splitlines()):
        print("place:", place)


if __name__ == "__main__":
    main()
