r"""Own files: Spark only starts the nodes, and every worker reads its share of the CSV lines.

    spark-submit --master local-cluster[2,1,1024] examples/tensorflowonspark/mnist_tf.py \
        --images_labels data/csv/train
"""

from __future__ import annotations

import sys

import shared


def main_fun(args, ctx):
    from shared import build_model, read_lines
    from tensorflowonspark import compat

    pattern = ctx.absolute_path(f"{args.images_labels}/part-*")
    images, labels = read_lines(pattern, slice(ctx.worker_num, None, ctx.num_workers))
    model = build_model()
    ctx.distribute(model)
    history = model.fit(images, labels, batch_size=args.batch_size, epochs=args.epochs, verbose=0)
    compat.export_saved_model(model, args.export_dir, ctx.job_name == "chief")
    return history.history["accuracy"][-1]


def main():
    args = shared.arguments(__doc__).parse_args()
    from tensorflowonspark import TFCluster

    cluster = TFCluster.run(
        shared.spark_context(),
        main_fun,
        args,
        args.cluster_size,
        args.num_ps,
        tensorboard=args.tensorboard,
        input_mode=TFCluster.InputMode.TENSORFLOW,
        master_node="chief",
    )
    cluster.shutdown()
    print(f"accuracy while training: {cluster.results()[0]:.3f}")


if __name__ == "__main__":
    sys.exit(main())
