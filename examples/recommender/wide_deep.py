r"""Wide & Deep on real flights, from Parquet files that every worker reads itself.

    spark-submit --master local-cluster[3,1,1024] examples/recommender/wide_deep.py \
        --parquet hdfs://nn:8020/flights

Tail numbers, carriers and airports are ids as they stand in the files. See flight_models.py for the
model, and deepfm.py for the same rows fed from a DataFrame.
"""

from __future__ import annotations

import os
import sys

import flight_models
import flights
import recommender

from tfos import InputMode, TFCluster


def main_fun(args, ctx):
    import keras

    keras.utils.set_random_seed(args.seed)
    model = flight_models.wide_deep(recommender.distributed, args.known)
    ctx.distribute(model)
    rows = ctx.read.parquet(args.parquet).shuffled(args.seed)
    data = rows.dataset(args.batch_size, feature_cols=flights.INPUTS, label_cols=flights.LABEL)
    model.fit(data, epochs=args.epochs, callbacks=ctx.callbacks(), verbose=0)
    return recommender.scores(ctx, model, recommender.tensors(args.testing, flights.FEATURES))


def main(argv=None):
    parser = flight_models.arguments(__doc__)
    parser.add_argument("--parquet", default="flights_parquet", help="directory for the table")
    args = parser.parse_args(argv)
    if "://" not in args.parquet:
        args.parquet = os.path.abspath(args.parquet)
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        for module in flight_models.modules():
            sc.addPyFile(module)
        training, testing = flights.split(flights.table(spark, args), args)
        args.known, args.testing = flights.describe(training), testing.toPandas()
        training.write.mode("overwrite").parquet(args.parquet)
        with TFCluster.reserve(
            sc, args.cluster_size, num_ps=args.num_ps, input_mode=InputMode.TENSORFLOW
        ) as cluster:
            cluster.start(main_fun, args)
        alone = flight_models.baseline(
            args, flight_models.wide_deep, training.toPandas(), args.testing
        )
        recommender.report_auc(args.testing[flights.LABEL], cluster.results()[0], alone)


if __name__ == "__main__":
    sys.exit(main())
