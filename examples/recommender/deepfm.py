"""DeepFM on real flights, fed from a Spark DataFrame; its embeddings live on parameter servers.

    spark-submit --master local-cluster[3,1,1024] examples/recommender/deepfm.py

Tail numbers, carriers and airports are ids as they stand in the table. See flight_models.py for the
model, and wide_deep.py for the same rows as Parquet.
"""

from __future__ import annotations

import sys

import flight_models
import flights
import recommender

from tfos import InputMode, TFCluster


def main_fun(args, ctx):
    import keras

    keras.utils.set_random_seed(args.seed)
    model = flight_models.deepfm(recommender.distributed, args.known)
    ctx.distribute(model)  # from here on rows and dense parameters live on the PS
    data = ctx.dataset(args.batch_size, feature_cols=flights.INPUTS, label_cols=flights.LABEL)
    model.fit(data, epochs=ctx.all_epochs, callbacks=ctx.callbacks(), verbose=0)
    return recommender.scores(ctx, model, recommender.tensors(args.testing, flights.FEATURES))


def main(argv=None):
    args = flight_models.arguments(__doc__).parse_args(argv)
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        for module in flight_models.modules():
            sc.addPyFile(module)
        training, testing = flights.split(flights.table(spark, args), args)
        args.known, args.testing = flights.describe(training), testing.toPandas()
        with TFCluster.reserve(
            sc, args.cluster_size, num_ps=args.num_ps, input_mode=InputMode.SPARK
        ) as cluster:
            cluster.start(main_fun, args)
            fed = cluster.train(training, args.epochs, seed=args.seed)
        print(f"rows trained: {fed.trained_rows} in {len(fed.epochs)} epochs")
        alone = flight_models.baseline(
            args, flight_models.deepfm, training.toPandas(), args.testing
        )
        recommender.report_auc(args.testing[flights.LABEL], cluster.results()[0], alone)


if __name__ == "__main__":
    sys.exit(main())
