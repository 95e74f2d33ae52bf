"""Train on handwritten digits that Spark feeds from an RDD, through parameter servers.

    spark-submit --master local-cluster[3,1,1024] examples/mnist/mnist_spark.py --tensorboard

Each executor becomes one node. Rows go from Spark's tasks to the workers, gradients from the
workers to the PS; the driver sees neither. With --mode inference the exported model labels digits.
"""

from __future__ import annotations

import sys
from pathlib import Path

import digits

from tfos import InputMode, TFCluster


def main_fun(args, ctx):
    import keras
    from digits import build_model

    keras.utils.set_random_seed(args.seed)
    model = build_model()
    ctx.distribute(model)  # from here on the parameters live on the PS
    model.fit(
        ctx.dataset(batch_size=args.batch_size),
        epochs=args.epochs,
        callbacks=ctx.callbacks(),
        verbose=0,
    )
    if ctx.is_chief:
        ctx.export(model, args.model_file)


def train(sc, args, data):
    phase = digits.Phases()
    with phase("starting the cluster"):
        cluster = TFCluster.reserve(
            sc,
            args.cluster_size,
            num_ps=args.num_ps,
            tensorboard=args.tensorboard,
            log_dir=f"{args.model_dir}/logs",
            config=digits.saving(args),
            input_mode=InputMode.SPARK,
        )
        cluster.start(main_fun, args)
    with cluster:
        if url := cluster.tensorboard_url():
            print(f"TensorBoard: {url}", flush=True)
        with phase(f"training {args.epochs} epochs"):
            cluster.train(data, num_epochs=args.epochs)
        with phase("export and shutdown"):
            cluster.shutdown()
    return phase


def main(argv=None):
    more = "epochs", "images_labels", "mode", "output"
    args = digits.arguments(__doc__, *digits.CLUSTER, *more).parse_args(argv)
    from pyspark import SparkContext

    with SparkContext.getOrCreate() as sc:
        sc.addPyFile(str(Path(digits.__file__)))
        digits.locate(sc, args)
        data, held_out = digits.rows(sc, args, num_partitions=2 * args.cluster_size)
        if args.mode == "inference":
            digits.predict(sc, args, held_out)
            return
        phase = train(sc, args, data)
        with phase("testing the exported model"):
            accuracy = digits.held_out_accuracy(args, held_out)
        print(f"test accuracy: {accuracy:.4f}")
        print(f"model saved: {args.model_file}")
        phase.total()


if __name__ == "__main__":
    sys.exit(main())
