"""Predict late arrivals from a Spark DataFrame of texts, numbers and holes, fed by Arrow.

    spark-submit --master local-cluster[3,1,1024] examples/flights/flights_dataframe.py

Spark prepares the table: flights without an arrival are left out, holes are filled, the day becomes
a day of the week. Its columns travel as Arrow batches straight to the workers, and the layers of
the model turn texts into embeddings. See flights.py for the data and the model.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import flights

from tfos import InputMode, TFCluster


def main_fun(args, ctx):
    import keras
    from flights import INPUTS, LABEL, build_model

    keras.utils.set_random_seed(args.seed)
    model = build_model(args.known)
    ctx.distribute(model)  # from here on the parameters live on the PS
    data = ctx.dataset(args.batch_size, feature_cols=INPUTS, label_cols=LABEL)
    model.fit(data, epochs=ctx.all_epochs, callbacks=ctx.callbacks(), verbose=0)
    return ctx.export(model, args.model_file) if ctx.is_chief else None


def main(argv=None):
    args = flights.parse(flights.arguments(__doc__), argv)
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        sc.addPyFile(str(Path(flights.__file__)))
        training, testing = flights.split(flights.table(spark, args), args)
        args.known = flights.describe(training)
        started = time.monotonic()
        with TFCluster.reserve(
            sc, args.cluster_size, num_ps=args.num_ps, input_mode=InputMode.SPARK
        ) as cluster:
            cluster.start(main_fun, args)
            fed = cluster.train(training, args.epochs, seed=args.seed)
        print(f"rows trained: {fed.trained_rows} in {len(fed.epochs)} epochs")
        print(f"training, with start and export of the cluster: {time.monotonic() - started:.1f} s")
        exported = cluster.results()[0]  # on Spark's default file system, unless it is a URL
        flights.report(exported, training, testing)
        print(f"model saved: {exported}")


if __name__ == "__main__":
    sys.exit(main())
