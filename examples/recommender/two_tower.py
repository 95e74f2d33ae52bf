"""A two-tower model on the movie ratings inside pip's pyspark: which films will a user like?

    spark-submit --master local-cluster[3,1,1024] examples/recommender/two_tower.py

A user likes a film with at least three stars. Every fifth rating is held out; the towers learn from
the others. Recall@20: how many of the liked films that were held out are among the 20 with the
highest scores, of those that the user has not rated in the training data.
"""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import numpy as np
import recommender

from tfos import InputMode, TFCluster

DIM = 16
LIKED = 3
TOP = 20


def ratings():
    """Return the users and films of all ratings, int64[n] each, and 1 for a liked one, else 0."""
    package = importlib.metadata.distribution("pyspark")  # spark-submit imports it from a zip
    file = Path(package.locate_file("pyspark/data/mllib/als/sample_movielens_ratings.txt"))
    table = np.array([line.split("::")[:3] for line in file.read_text().split()], np.int64)
    return table[:, 0], table[:, 1], (table[:, 2] >= LIKED).astype(np.float32)


def build_model(embedding):
    """Each tower is an embedding and a layer; their product is the logit."""
    import keras
    from keras import layers

    inputs = {name: keras.Input((1,), name=name, dtype="int64") for name in ("user", "film")}
    towers = [
        layers.Dense(DIM)(layers.Flatten()(embedding(name, DIM)(inputs[name]))) for name in inputs
    ]
    liked = layers.Flatten()(embedding("film", 1)(inputs["film"]))
    logit = layers.Add()([layers.Dot(axes=1)(towers), liked])
    model = keras.Model(inputs, layers.Activation("sigmoid")(logit))
    model.compile(keras.optimizers.Adagrad(0.1), loss="binary_crossentropy")
    return model


def main_fun(args, ctx):
    import keras

    keras.utils.set_random_seed(args.seed)
    model = build_model(recommender.distributed)
    ctx.distribute(model)
    columns = {"user": "user", "film": "film"}
    data = ctx.dataset(args.batch_size, feature_cols=columns, label_cols="label")
    model.fit(data, epochs=ctx.all_epochs, verbose=0)
    return recommender.scores(ctx, model, args.every_pair)


def recall(scores, trained, held_out):
    """Return the share of held-out pairs among each user's TOP films.

    Args:
        scores: [users, films].
        trained: (users, films) of the pairs that are left out of the ranking.
        held_out: (users, films) of the pairs to find.
    """
    scores = scores.copy()
    scores[trained] = -np.inf
    best = np.argsort(-scores, axis=1)[:, :TOP]
    return float(np.mean([film in best[user] for user, film in zip(*held_out, strict=True)]))


def baseline(args, rows, shape):
    """Return the scores of plain Keras in this process."""
    import keras

    keras.utils.set_random_seed(args.seed)
    sizes = dict(zip(("user", "film"), shape, strict=True))
    model = build_model(lambda name, dim: recommender.plain(dim, sizes[name]))
    users, films, labels = rows
    inputs = {"user": users, "film": films}
    model.fit(inputs, labels, batch_size=args.batch_size, epochs=args.epochs, verbose=0)
    return model.predict(args.every_pair, batch_size=4096, verbose=0)


def main(argv=None):
    parser = recommender.arguments(__doc__, epochs=20, batch_size=64)
    args = parser.parse_args(argv)
    from pyspark.sql import SparkSession

    users, films, liked = ratings()
    shape = int(users.max()) + 1, int(films.max()) + 1
    is_held_out = np.arange(len(users)) % 5 == 0
    rows = [column[~is_held_out] for column in (users, films, liked)]
    to_find = is_held_out & (liked == 1)
    held_out = users[to_find], films[to_find]
    grid = np.indices(shape).reshape(2, -1)
    args.every_pair = {"user": grid[0], "film": grid[1]}
    print(f"ratings: {len(users)} of {shape[1]} films by {shape[0]} users")
    with SparkSession.builder.getOrCreate() as spark:
        sc = spark.sparkContext
        sc.addPyFile(recommender.__file__)
        columns = [column.tolist() for column in rows]
        table = spark.createDataFrame(
            list(zip(*columns, strict=True)), "user bigint, film bigint, label float"
        )
        with TFCluster.reserve(
            sc, args.cluster_size, num_ps=args.num_ps, input_mode=InputMode.SPARK
        ) as cluster:
            cluster.start(main_fun, args)
            cluster.train(table.repartition(2 * args.cluster_size).cache(), args.epochs)
    found = {
        "a guess": np.random.default_rng(args.seed).random(shape),
        "plain Keras in one process": baseline(args, rows, shape).reshape(shape),
        "two towers on the cluster": cluster.results()[0].reshape(shape),
    }
    for name, scores in found.items():
        print(f"{name}: recall@{TOP} {recall(scores, (rows[0], rows[1]), held_out):.4f}")


if __name__ == "__main__":
    sys.exit(main())
