"""Train on handwritten digits in a Spark DataFrame: a column of 784 pixels and a label.

    spark-submit --master local-cluster[3,1,1024] examples/mnist/mnist_dataframe.py --tensorboard

Columns travel as Arrow batches from Spark's JVM to the workers; no row becomes a Python object. A
tenth of the digits is fed as a second DataFrame after each epoch, to validate it.
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
    ctx.distribute(model)
    columns = {"feature_cols": "pixels", "label_cols": "label", "dtypes": "uint8"}
    fitted = model.fit(
        ctx.dataset(args.batch_size, **columns),
        epochs=args.epochs,
        validation_data=ctx.dataset(args.batch_size, feed="validation", **columns),
        callbacks=ctx.callbacks(),
        verbose=0,
    )
    if ctx.is_chief:
        for epoch, accuracy in enumerate(fitted.history["val_accuracy"], 1):
            print(f"epoch {epoch}: val_accuracy {accuracy:.4f}")
        ctx.export(model, args.model_file)


def frame(spark, args):
    """Return a DataFrame of the digits to train on, and held-out images and labels."""
    import pyarrow as pa

    images, labels = digits.bundled_digits(args.seed)
    training = images[digits.HELD_OUT :].astype("int16")  # Spark has no unsigned bytes
    pixels = pa.FixedSizeListArray.from_arrays(training.reshape(-1), training.shape[1])
    columns = {"pixels": pixels.cast(pa.list_(pa.int16())), "label": labels[digits.HELD_OUT :]}
    return spark.createDataFrame(pa.table(columns)), (
        images[: digits.HELD_OUT],
        labels[: digits.HELD_OUT],
    )


def main(argv=None):
    flags = [name for name in digits.CLUSTER if name != "model_dir"]
    parser = digits.arguments(__doc__, *flags, "epochs")
    parser.add_argument("--log_dir", default="mnist_logs", help="TensorBoard logs; path or URL")
    args = parser.parse_args(argv)
    from pyspark.sql import SparkSession

    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        sc.addPyFile(str(Path(digits.__file__)))
        digits.locate(sc, args)
        df, held_out = frame(spark, args)
        training, validation = df.randomSplit([0.9, 0.1], args.seed)
        phase = digits.Phases()
        with TFCluster.reserve(
            sc,
            args.cluster_size,
            num_ps=args.num_ps,
            tensorboard=args.tensorboard,
            log_dir=args.log_dir,
            input_mode=InputMode.SPARK,
        ) as cluster:
            cluster.start(main_fun, args)
            if url := cluster.tensorboard_url():
                print(f"TensorBoard: {url}", flush=True)
            with phase(f"training {args.epochs} epochs"):
                cluster.train(
                    training.repartition(2 * args.cluster_size).cache(),
                    num_epochs=args.epochs,
                    validation=validation,
                )
            with phase("export and shutdown"):
                cluster.shutdown()
        print(f"test accuracy: {digits.held_out_accuracy(args, held_out):.4f}")
        print(f"model saved: {args.model_file}")


if __name__ == "__main__":
    sys.exit(main())
