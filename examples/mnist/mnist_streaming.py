r"""Train on handwritten digits that arrive as files until a stop file exists; then resume later.

    python examples/mnist/mnist_streaming.py --write digits_in --num_files 20      # in one terminal
    spark-submit --master local-cluster[3,1,1024] examples/mnist/mnist_streaming.py \
        --images_labels digits_in --stop_file stop --export_dir mnist_export       # in another
    touch stop

Spark makes a micro-batch of new files of CSV lines (label, 784 pixels), and the cluster, which
stays up, trains it. Its number is saved with the parameters in --model_dir, so after an end of any
kind the next run continues: no row is trained twice, none is left out. With --batches it stops on
its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import digits

from tfos import Checkpoints, ClusterConfig, InputMode, TFCluster


def main_fun(args, ctx):
    import keras
    from digits import build_model

    keras.utils.set_random_seed(args.seed)
    model = build_model()
    ctx.distribute(model)
    data = ctx.dataset(args.batch_size, feature_cols="pixels", label_cols="label", dtypes="uint8")
    model.fit(data, epochs=ctx.all_epochs, callbacks=ctx.callbacks(), verbose=0)
    if ctx.is_chief:
        ctx.export(model, args.model_file)


def stream(spark, args):
    """Return the lines of new files as a stream of pixels and label."""
    from pyspark.sql import functions as F

    lines = spark.readStream.option("maxFilesPerTrigger", args.files_per_batch)
    numbers = F.split("value", ",").cast("array<short>")
    return lines.text(args.images_labels).select(
        F.slice(numbers, 2, 784).alias("pixels"), F.element_at(numbers, 1).alias("label")
    )


def follow(training, args):
    """Show how training goes until it is time to stop."""
    shown = 0
    while not training.await_end(0.5):
        if training.num_batches > shown:
            shown = training.num_batches
            print(training, flush=True)
        if shown >= args.batches or os.path.exists(args.stop_file):
            return


def parse(argv):
    parser = digits.arguments(__doc__, *digits.CLUSTER, "images_labels")
    parser.add_argument(
        "--stop_file", default="stop", help="stop once this file exists, which the start removes"
    )
    parser.add_argument("--batches", type=int, default=1 << 62, help="stop after this many batches")
    parser.add_argument("--files_per_batch", type=int, default=1)
    parser.add_argument("--write", help="only write the bundled digits as files to this directory")
    parser.add_argument("--num_files", type=int, default=20)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    images, labels = digits.bundled_digits(args.seed)
    held_out, rest = slice(digits.HELD_OUT), slice(digits.HELD_OUT, None)
    if args.write:
        digits.write_csv(args.write, images[rest], labels[rest], args.num_files)
        return
    from pyspark.sql import SparkSession

    Path(args.stop_file).unlink(missing_ok=True)  # the previous run's
    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        sc.addPyFile(str(Path(digits.__file__)))
        digits.locate(sc, args)
        saves = Checkpoints(directory=f"{args.model_dir}/checkpoints", resume=True)
        with TFCluster.reserve(
            sc,
            args.cluster_size,
            num_ps=args.num_ps,
            tensorboard=args.tensorboard,
            log_dir=f"{args.model_dir}/logs",
            input_mode=InputMode.SPARK,
            config=ClusterConfig(checkpoints=saves),
        ) as cluster:
            cluster.start(main_fun, args)
            writer = stream(spark, args).writeStream.trigger(processingTime="1 second")
            training = cluster.stream(writer, f"{args.model_dir}/query")
            follow(training, args)
            training.stop()  # the current batch is trained and saved
            print(f"stopped after batch {training.last_batch_id}: {training.rows} rows trained")
        accuracy = digits.held_out_accuracy(args, (images[held_out], labels[held_out]))
    print(f"test accuracy: {accuracy:.4f}")
    print(f"model saved: {args.model_file}")


if __name__ == "__main__":
    sys.exit(main())
