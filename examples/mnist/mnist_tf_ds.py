r"""Train on handwritten digits in TFRecord or Parquet files that every worker reads itself.

    spark-submit --master local-cluster[3,1,1024] examples/mnist/mnist_tf_ds.py \
        --format parquet --images_labels hdfs://nn:8020/digits

mnist_data_setup.py writes such files; without --images_labels this program does so first. The
workers share the files to the row, so that all have equally many steps, decode them without
TensorFlow, and see the rows in another order in each epoch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import digits
import mnist_data_setup

from tfos import InputMode, TFCluster


def main_fun(args, ctx):
    import keras
    from digits import build_model

    from feeding import Feature

    keras.utils.set_random_seed(args.seed)
    if args.format == "parquet":
        rows = ctx.read.parquet(args.images_labels, ["pixels", "label"])
    else:
        columns = {"pixels": Feature("uint8", (784,)), "label": Feature("int64")}
        rows = ctx.read.tfrecord(args.images_labels, columns)
    rows = rows.equal_steps().shuffled(args.seed)  # TFRecord files are counted for it
    model = build_model()
    ctx.distribute(model)
    model.fit(
        rows.dataset(args.batch_size, feature_cols="pixels", label_cols="label"),
        epochs=args.epochs,
        callbacks=ctx.callbacks(),
        verbose=0,
    )
    if ctx.is_chief:
        ctx.export(model, args.model_file)


def main(argv=None):
    parser = digits.arguments(__doc__, *digits.CLUSTER, "epochs")
    parser.add_argument("--format", choices=("tfrecord", "parquet"), default="tfrecord")
    parser.add_argument("--images_labels", help="directory of such files; default: 4,000 digits")
    args = parser.parse_args(argv)
    from pyspark import SparkContext

    phase = digits.Phases()
    with SparkContext.getOrCreate() as sc:
        for module in (digits, mnist_data_setup):
            sc.addPyFile(str(Path(module.__file__)))
        digits.locate(sc, args)
        if args.images_labels is None:
            args.images_labels = f"{args.model_dir}/digits"
            mnist_data_setup.write(sc, args.images_labels, args.format, seed=args.seed)
        args.images_labels = digits.located(sc, args.images_labels)
        with (
            phase("cluster, training, export"),
            TFCluster.reserve(
                sc,
                args.cluster_size,
                num_ps=args.num_ps,
                tensorboard=args.tensorboard,
                log_dir=f"{args.model_dir}/logs",
                config=digits.saving(args),
                input_mode=InputMode.TENSORFLOW,
            ) as cluster,
        ):
            cluster.start(main_fun, args)
            if url := cluster.tensorboard_url():
                print(f"TensorBoard: {url}", flush=True)
        images, labels = digits.bundled_digits(args.seed)
        held_out = images[: digits.HELD_OUT], labels[: digits.HELD_OUT]
        with phase("testing the exported model"):
            accuracy = digits.held_out_accuracy(args, held_out)
        print(f"test accuracy: {accuracy:.4f}")
        print(f"model saved: {args.model_file}")


if __name__ == "__main__":
    sys.exit(main())
