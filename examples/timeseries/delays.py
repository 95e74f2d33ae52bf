"""Forecast each plane's next delays from its last ones: one forecaster per plane, or one for all.

    spark-submit --master local-cluster[3,1,1024] examples/timeseries/delays.py
    spark-submit --master local-cluster[3,1,1024] examples/timeseries/delays.py --one_for_all

The data: the flights of examples/flights/flights.py, 4,000 planes with some 80 flights each; a
plane's series is the delay of its arrivals, in minutes, flight by flight. `tfos.timeseries.windows`
makes windows of them. Their first part in time is for training, the rest for testing. One
forecaster per plane is a ridge regression, trained by `map_train`; one for all is a small network
in Keras, trained by a cluster. Both are compared with the plane's mean delay in the window.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "flights"))  # beside this one on executors

import flights

MOST_MINUTES = 180.0
"""Longer delays count as this."""
SPLIT = "2013-10-01"
RIDGE = 100.0


def series(spark, args):
    """Return a DataFrame of plane, time and delay."""
    import pandas
    import pyarrow
    from pyspark.sql import functions as F

    table = flights.read_flights().dropna(subset=["tailnum", "arr_delay"])
    if args.planes:
        table = table[table["tailnum"].isin(sorted(set(table["tailnum"]))[: args.planes])]
    table = table.assign(leaves=pandas.to_datetime(table["time_hour"]))
    columns = ["tailnum", "leaves", "minute", "arr_delay"]
    rows = spark.createDataFrame(pyarrow.Table.from_pandas(table[columns], preserve_index=False))
    minutes = F.make_dt_interval(mins=F.col("minute").cast("int"))
    return rows.select(
        "tailnum",
        (F.col("leaves") + minutes).alias("leaves"),
        F.least("arr_delay", F.lit(MOST_MINUTES)).alias("delay"),
    )


def errors_of(predicted, past, future):
    """Return the sums of absolute errors, ours and of the window's mean, and their number."""
    import numpy as np

    mean = np.repeat(past.mean(axis=1, keepdims=True), future.shape[1], axis=1)
    return {
        "ours": float(np.abs(predicted - future).sum()),
        "mean": float(np.abs(mean - future).sum()),
        "count": future.size,
    }


def forecaster(plane, rows):
    """Train and test one plane's ridge regression of what its window's mean leaves."""
    import numpy as np

    past, future = (np.stack(rows[name].to_numpy()) for name in ("past", "future"))
    is_test = rows["is_test"].to_numpy()
    scale = np.float32(60)
    mean = past.mean(axis=1, keepdims=True)
    inputs = np.column_stack([past / scale, mean / scale, np.ones(len(past))])
    known, targets = inputs[~is_test], (future - mean)[~is_test] / scale
    weights = np.linalg.solve(known.T @ known + RIDGE * np.eye(inputs.shape[1]), known.T @ targets)
    predicted = mean[is_test] + inputs[is_test] @ weights * scale
    found = errors_of(predicted, past[is_test], future[is_test])
    return {"weights": weights, "plane": plane, **found}


def one_per_plane(windows, args):
    """Return the errors of all planes' forecasters."""
    import tfos

    trainings = tfos.map_train(
        windows.groupBy("tailnum"),
        forecaster,
        slots=args.slots,
        timeout_s=60,
        results_dir=args.results_dir,
    )
    trainings.raise_failed()
    rows = [row.metrics for row in trainings.table()]
    print(f"forecasters: {len(rows)}, slots busy {trainings.busy_share:.0%}")
    return {name: sum(row[name] for row in rows) for name in ("ours", "mean", "count")}


def main_fun(args, ctx):
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((args.lookback,)),
            keras.layers.Rescaling(1 / 60),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(args.horizon),
            keras.layers.Rescaling(60),
        ]
    )
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="mae")
    ctx.distribute(model)
    data = ctx.dataset(256, feature_cols="past", label_cols="future")
    model.fit(data, epochs=ctx.all_epochs, callbacks=ctx.callbacks(), verbose=0)
    if ctx.is_chief:
        return model.get_weights()
    return None


def one_for_all(windows, args):
    """Return the errors of one network for all planes."""
    import numpy as np
    from pyspark.sql import functions as F

    from tfos import InputMode, TFCluster

    training = windows.where("not is_test").select("past", "future")
    training = training.orderBy(F.rand(1)).repartition(2 * args.cluster_size).cache()
    with TFCluster.reserve(
        windows.sparkSession, args.cluster_size, num_ps=1, input_mode=InputMode.SPARK
    ) as cluster:
        cluster.start(main_fun, args)
        cluster.train(training, args.epochs, seed=1)
    kernel, bias, last, last_bias = cluster.results()[0]
    test = windows.where("is_test").select("past", "future").toPandas()
    past, future = np.stack(test["past"]), np.stack(test["future"])
    hidden = np.maximum(past / 60 @ kernel + bias, 0)
    return errors_of((hidden @ last + last_bias) * 60, past, future)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--planes", type=int, help="number of planes to use; default: all")
    parser.add_argument("--lookback", type=int, default=8, help="delays that are known")
    parser.add_argument("--horizon", type=int, default=2, help="delays to forecast")
    parser.add_argument("--slots", type=int, help="forecasters at the same time; default: all")
    parser.add_argument("--results_dir", help="keep results here, and go on from them")
    parser.add_argument("--one_for_all", action="store_true", help="one network for all planes")
    parser.add_argument("--cluster_size", type=int, default=3, help="of one_for_all")
    parser.add_argument("--epochs", type=int, default=3, help="of one_for_all")
    args = parser.parse_args(argv)
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F

    from tfos import timeseries

    with SparkSession.builder.getOrCreate() as spark:
        spark.sparkContext.addPyFile(str(Path(flights.__file__)))
        found = timeseries.windows(
            series(spark, args),
            id="tailnum",
            time="leaves",
            value="delay",
            lookback=args.lookback,
            horizon=args.horizon,
            duplicates="mean",
        )
        windows = found.withColumn("is_test", F.col("leaves") >= F.lit(SPLIT).cast("timestamp"))
        windows = windows.cache()
        num_planes = windows.select("tailnum").distinct().count()
        print(f"windows: {windows.count()}, of planes: {num_planes}")
        errors = (one_for_all if args.one_for_all else one_per_plane)(windows, args)
        print(f"mean absolute error: {errors['ours'] / errors['count']:.2f} minutes")
        print(f"of the window's mean: {errors['mean'] / errors['count']:.2f} minutes")


if __name__ == "__main__":
    sys.exit(main())
