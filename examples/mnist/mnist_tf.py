"""Train on handwritten digits that every worker reads itself with tf.data.

    spark-submit --master local-cluster[3,1,1024] examples/mnist/mnist_tf.py --tensorboard

Spark only starts the nodes. Reads CSV lines of label and pixels from --images_labels (a pattern, or
a directory that all nodes see); without it the bundled digits are written there first. Every worker
takes every n-th line.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import digits

from tfos import InputMode, TFCluster


def read_lines(pattern, args, ctx):
    """This worker's share of the lines as a dataset of (pixels, label) batches."""
    import tensorflow as tf

    def parse(lines):
        table = tf.strings.to_number(tf.strings.split(lines, ",").to_tensor(), tf.int32)
        return tf.cast(table[:, 1:], tf.uint8), table[:, 0]

    lines = tf.data.TextLineDataset(sorted(tf.io.gfile.glob(pattern)))
    mine = lines.shard(ctx.num_workers, ctx.worker_num)
    num_batches = math.ceil(sum(1 for _ in mine) / args.batch_size)
    batches = mine.shuffle(4096, seed=args.seed).batch(args.batch_size).map(parse).prefetch(2)
    return batches.apply(tf.data.experimental.assert_cardinality(num_batches))


def main_fun(args, ctx):
    import keras
    from digits import build_model

    keras.utils.set_random_seed(args.seed)
    model = build_model()
    ctx.distribute(model)
    model.fit(
        read_lines(args.images_labels, args, ctx),
        epochs=args.epochs,
        shuffle=False,
        callbacks=ctx.callbacks(),
        verbose=0,
    )
    if ctx.is_chief:
        ctx.export(model, args.model_file)


def prepare(args):
    """Make sure there are files to read, and return held-out digits."""
    images, labels = digits.bundled_digits(args.seed)
    held_out = images[: digits.HELD_OUT], labels[: digits.HELD_OUT]
    if args.images_labels is None:
        is_local = "://" not in args.model_dir  # tf.data reads no HDFS; mnist_tf_ds.py does
        args.images_labels = f"{args.model_dir}/digits" if is_local else "mnist_digits"
        digits.write_csv(
            args.images_labels, images[digits.HELD_OUT :], labels[digits.HELD_OUT :], 4
        )
    if Path(args.images_labels).is_dir():
        args.images_labels = os.path.join(args.images_labels, "*.csv")
    args.images_labels = os.path.abspath(args.images_labels)
    return held_out


def train(sc, args, phase):
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


def main(argv=None):
    more = "epochs", "images_labels", "mode", "output"
    args = digits.arguments(__doc__, *digits.CLUSTER, *more).parse_args(argv)
    from pyspark import SparkContext

    phase = digits.Phases()
    with SparkContext.getOrCreate() as sc:
        sc.addPyFile(str(Path(digits.__file__)))
        digits.locate(sc, args)
        held_out = prepare(args)
        if args.mode == "inference":
            digits.predict(sc, args, held_out)
            return
        train(sc, args, phase)
        with phase("testing the exported model"):
            accuracy = digits.held_out_accuracy(args, held_out)
        print(f"test accuracy: {accuracy:.4f}")
        print(f"model saved: {args.model_file}")


if __name__ == "__main__":
    sys.exit(main())
