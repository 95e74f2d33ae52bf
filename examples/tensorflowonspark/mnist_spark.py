r"""RDD feed: Spark reads lines, TFNode.DataFeed gives their rows to the workers.

    spark-submit --master local-cluster[2,1,1024] examples/tensorflowonspark/mnist_spark.py \
        --images_labels data/csv/train

Needs the distribution tfos-tensorflowonspark; with tfos alone `from tfos import TFNode, ...` is the
same.
"""

from __future__ import annotations

import sys

import shared


def main_fun(args, ctx):
    from shared import build_model, fed_dataset
    from tensorflowonspark import TFNode, compat

    model = build_model()
    ctx.distribute(model)  # the line that is new: parameters live on the PS from here on
    feed = TFNode.DataFeed(ctx.mgr)
    # The feed holds every epoch that Spark sends, so fit has one.
    history = model.fit(fed_dataset(feed, args.batch_size), verbose=0)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    return history.history["accuracy"][-1]


def main():
    args = shared.arguments(__doc__).parse_args()
    from tensorflowonspark import TFCluster

    sc = shared.spark_context()
    cluster = TFCluster.run(
        sc,
        main_fun,
        args,
        args.cluster_size,
        args.num_ps,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.SPARK,
        master_node="chief",
    )
    cluster.train(sc.textFile(args.images_labels).map(shared.parse_line), args.epochs)
    cluster.shutdown()
    print(f"accuracy while training: {cluster.results()[0]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
