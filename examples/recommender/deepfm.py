"""DeepFM on real flights, fed from a Spark DataFrame; its embeddings live on parameter servers.

    spark-submit --master local-cluster[3,1,1024] examples/recommender/deepfm.py
    … deepfm.py --model_dir /tmp/late/run --export_dir /tmp/late/model   # saved, exported, served

Tail numbers, carriers and airports are ids as they stand in the table. See flight_models.py for the
model, and wide_deep.py for the same rows as Parquet. With --model_dir the servers save while they
train, and a second run goes on from what they saved. With --export_dir the driver loads the export
as a service would, and answers the held-out flights.
"""

from __future__ import annotations

import sys

import flight_models
import flights
import recommender

from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster


def main_fun(args, ctx):
    import keras

    keras.utils.set_random_seed(args.seed)
    model = flight_models.deepfm(recommender.distributed, args.known)
    ctx.distribute(model)  # from here on rows and dense parameters live on the PS
    data = ctx.dataset(args.batch_size, feature_cols=flights.INPUTS, label_cols=flights.LABEL)
    model.fit(data, epochs=ctx.all_epochs, callbacks=ctx.callbacks(), verbose=0)
    if ctx.is_chief and args.export_dir:
        ctx.export(model, args.export_dir, tables="beside")
    return recommender.scores(ctx, model, recommender.tensors(args.testing, flights.FEATURES))


def saving(args):
    """The settings of a cluster that saves to --model_dir and continues from what is there."""
    if not args.model_dir:
        return None
    saves = Checkpoints(directory=args.model_dir, every_s=10, resume=True)
    return ClusterConfig(checkpoints=saves)


def report_served(args, found):
    """Answer the held-out flights from the export, as a service without Spark would."""
    import numpy as np

    from tfos.serving import load

    served = load(args.export_dir)
    inputs = recommender.tensors(args.testing, flights.FEATURES)
    batches = [
        served.predict({name: column[start : start + 4096] for name, column in inputs.items()})
        for start in range(0, len(args.testing), 4096)
    ]
    apart = np.abs(np.concatenate(batches) - found).max()
    print(f"served from {args.export_dir}: at most {apart:.1e} from the cluster's predictions")


def main(argv=None):
    parser = flight_models.arguments(__doc__)
    parser.add_argument("--model_dir", help="absolute path or URL for checkpoints")
    parser.add_argument("--export_dir", help="absolute path or URL for the model and its rows")
    args = parser.parse_args(argv)
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        for module in flight_models.modules():
            sc.addPyFile(module)
        training, testing = flights.split(flights.table(spark, args), args)
        args.known, args.testing = flights.describe(training), testing.toPandas()
        with TFCluster.reserve(
            sc,
            args.cluster_size,
            num_ps=args.num_ps,
            input_mode=InputMode.SPARK,
            config=saving(args),
        ) as cluster:
            cluster.start(main_fun, args)
            fed = cluster.train(training, args.epochs, seed=args.seed)
        print(f"rows trained: {fed.trained_rows} in {len(fed.epochs)} epochs")
        alone = flight_models.baseline(
            args, flight_models.deepfm, training.toPandas(), args.testing
        )
        recommender.report_auc(args.testing[flights.LABEL], cluster.results()[0], alone)
        if args.export_dir:
            report_served(args, cluster.results()[0])


if __name__ == "__main__":
    sys.exit(main())
