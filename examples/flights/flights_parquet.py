r"""Predict late arrivals from Parquet files that every worker reads itself.

    spark-submit --master local-cluster[3,1,1024] examples/flights/flights_parquet.py \
        --parquet hdfs://nn:8020/flights

Spark prepares the table as in flights_dataframe.py and writes it once, to a place that all nodes
see; it takes no part in the training after that. Workers have equally many rows, in another order
in each epoch. See flights.py for the data and the model.
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
    ctx.distribute(model)
    rows = ctx.read.parquet(args.parquet).shuffled(args.seed)
    data = rows.dataset(args.batch_size, feature_cols=INPUTS, label_cols=LABEL)
    model.fit(data, epochs=args.epochs, callbacks=ctx.callbacks(), verbose=0)
    return ctx.export(model, args.model_file) if ctx.is_chief else None


def main(argv=None):
    parser = flights.arguments(__doc__)
    parser.add_argument("--parquet", default="flights_parquet", help="directory for the table")
    args = flights.parse(parser, argv)
    args.parquet = flights.absolute(args.parquet)
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        sc.addPyFile(str(Path(flights.__file__)))
        training, testing = flights.split(flights.table(spark, args), args)
        args.known = flights.describe(training)
        training.write.mode("overwrite").parquet(args.parquet)
        started = time.monotonic()
        with TFCluster.reserve(
            sc, args.cluster_size, num_ps=args.num_ps, input_mode=InputMode.TENSORFLOW
        ) as cluster:
            cluster.start(main_fun, args)
        print(f"training, with start and export of the cluster: {time.monotonic() - started:.1f} s")
        exported = cluster.results()[0]  # on Spark's default file system, unless it is a URL
        flights.report(exported, training, testing)
        print(f"model saved: {exported}")


if __name__ == "__main__":
    sys.exit(main())
