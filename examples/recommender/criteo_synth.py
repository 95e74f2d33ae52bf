r"""A DeepFM-like model on made-up rows of Criteo's shape: 13 numbers, 26 ids, any number of rows.

    spark-submit --master local-cluster[3,1,1024] examples/recommender/criteo_synth.py \
        --rows 100000000 --num_ids 10000000 --data hdfs://nn:8020/criteo --no_baseline

Spark's tasks make the rows and write TFRecord files, which the workers then read by themselves. See
criteo_rows.py for the rows. Without --no_baseline plain Keras trains on the same rows in the
driver's process, which holds all of them and all ids.
"""

from __future__ import annotations

import os
import re
import sys

import criteo_rows
import numpy as np
import recommender

from tfos import InputMode, TFCluster

HELD_OUT = 20_000
DIM = 16


def build_model(embedding):
    """First order, pairs and a perceptron on rows of 16, with the numbers."""
    import keras
    from keras import layers, ops

    ids = keras.Input((criteo_rows.NUM_COLUMNS,), name="ids", dtype="int64")
    numbers = keras.Input((criteo_rows.NUM_NUMBERS,), name="numbers")
    rows, first = embedding("ids", DIM)(ids), embedding("ids", 1)(ids)
    squared = ops.square(ops.sum(rows, axis=1))
    pairs = 0.5 * ops.sum(squared - ops.sum(ops.square(rows), axis=1), axis=1, keepdims=True)
    deep = layers.Concatenate()([layers.Flatten()(rows), numbers])
    for width in (128, 64):
        deep = layers.Dense(width, activation="relu")(deep)
    parts = [ops.sum(first, axis=1), pairs, layers.Dense(1)(numbers), layers.Dense(1)(deep)]
    logit = layers.Add()(parts)
    model = keras.Model({"ids": ids, "numbers": numbers}, layers.Activation("sigmoid")(logit))
    model.compile(keras.optimizers.Adagrad(0.02), loss="binary_crossentropy")
    return model


def held_out(args):
    """Return inputs and labels of the rows after those to train with."""
    made = criteo_rows.CriteoRows(args.num_ids, args.seed).rows(args.rows, args.rows + HELD_OUT)
    return {name: made[name] for name in ("ids", "numbers")}, made[criteo_rows.LABEL]


def main_fun(args, ctx):
    import keras

    from feeding import Feature

    keras.utils.set_random_seed(args.seed)
    model = build_model(recommender.distributed)
    ctx.distribute(model)
    columns = {
        "ids": Feature("int64", (criteo_rows.NUM_COLUMNS,)),
        "numbers": Feature("float32", (criteo_rows.NUM_NUMBERS,)),
        criteo_rows.LABEL: Feature("float32"),
    }
    data = ctx.read.tfrecord(args.data, columns).dataset(
        args.batch_size,
        feature_cols={"ids": "ids", "numbers": "numbers"},
        label_cols=criteo_rows.LABEL,
    )
    model.fit(data, epochs=args.epochs, callbacks=ctx.callbacks(), verbose=0)
    return recommender.scores(ctx, model, held_out(args)[0] if ctx.is_chief else None)


def write(sc, args):
    """Make the rows in Spark's tasks and write one file for each."""

    def write_part(number):
        criteo_rows.save_part(
            criteo_rows.CriteoRows(args.num_ids, args.seed),
            f"{args.data}/part-{number:05d}.tfrecord",
            range(int(ends[number]), int(ends[number + 1])),
        )

    num_files = 2 * args.cluster_size
    ends = np.linspace(0, args.rows, num_files + 1).astype(int).tolist()
    sc.parallelize(range(num_files), num_files).foreach(write_part)
    remove_others(args.data, num_files)


def remove_others(directory, num_files):
    """Remove parts that an earlier run left: the workers would train on its rows too."""
    from feeding import filesystem_for

    filesystem = filesystem_for(directory)
    for entry in filesystem.entries(directory):
        part = re.fullmatch(r"part-(\d+)\.tfrecord", entry.name)
        if part and int(part[1]) >= num_files:
            filesystem.delete(entry.path)


def located(sc, path):
    """Return a path on Spark's default file system, where ctx.read looks; URLs stay as they are."""
    if "://" in path:
        return path
    default = sc._jsc.hadoopConfiguration().get("fs.defaultFS")
    root = "" if default.startswith("file:") else default.rstrip("/")
    return f"{root}{os.path.abspath(path)}"


def baseline(args, inputs):
    """Return what plain Keras in this process predicts after the same rows."""
    import keras

    keras.utils.set_random_seed(args.seed)
    made = criteo_rows.CriteoRows(args.num_ids, args.seed).rows(0, args.rows)
    model = build_model(lambda _, dim: recommender.plain(dim, args.num_ids))
    features = {name: made[name] for name in inputs}
    labels = made[criteo_rows.LABEL]
    model.fit(features, labels, batch_size=args.batch_size, epochs=args.epochs, verbose=0)
    return model.predict(inputs, batch_size=4096, verbose=0)


def main(argv=None):
    parser = recommender.arguments(__doc__, epochs=1)
    parser.add_argument("--rows", type=int, default=200_000, help="to train with")
    parser.add_argument("--num_ids", type=int, default=100_000, help="of all columns together")
    parser.add_argument("--data", default="criteo_data", help="directory for the files")
    parser.add_argument("--no_baseline", action="store_true", help="train on the cluster alone")
    args = parser.parse_args(argv)
    from pyspark import SparkContext

    with SparkContext.getOrCreate() as sc:
        for module in (recommender, criteo_rows):
            sc.addPyFile(module.__file__)
        args.data = located(sc, args.data)
        write(sc, args)
        with TFCluster.reserve(
            sc, args.cluster_size, num_ps=args.num_ps, input_mode=InputMode.TENSORFLOW
        ) as cluster:
            cluster.start(main_fun, args)
    inputs, labels = held_out(args)
    alone = None if args.no_baseline else baseline(args, inputs)
    recommender.report_auc(labels, cluster.results()[0], alone)


if __name__ == "__main__":
    sys.exit(main())
