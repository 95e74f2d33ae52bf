"""DeepFM and Wide & Deep for late flights: their inputs, the models, the run on a cluster.

The data and the question are those of examples/flights/flights.py. Carriers, airports and tail
numbers are ids as they stand in the table: no vocabulary is made of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import recommender

sys.path.append(str(Path(__file__).parents[1] / "flights"))  # beside this one on executors

import flights

IDS = (*flights.TEXTS, *flights.CATEGORIES)
DIM = 8


def _inputs(known):
    """Return the inputs by name, and the scaled numbers side by side, [batch, 3]."""
    import keras
    from keras import layers

    dtypes = {name: "string" if name in flights.TEXTS else "int32" for name in IDS}
    inputs = {name: keras.Input((1,), name=name, dtype=dtype) for name, dtype in dtypes.items()}
    numbers = []
    for name in flights.NUMBERS:
        inputs[name] = keras.Input((1,), name=name)
        mean, variance = known["means"][name], known["variances"][name]
        numbers.append(layers.Normalization(mean=mean, variance=variance)(inputs[name]))
    return inputs, layers.Concatenate()(numbers)


def _compiled(inputs, logit):
    import keras

    model = keras.Model(inputs, keras.layers.Activation("sigmoid")(logit))
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3),
        loss="binary_crossentropy",
        metrics=[keras.metrics.AUC(name="auc")],
    )
    return model


def deepfm(embedding, known):
    """First order, pairs of a factorization machine, and a perceptron on the same rows."""
    from keras import layers, ops

    inputs, numbers = _inputs(known)
    rows = layers.Concatenate(axis=1)([embedding(name, DIM)(inputs[name]) for name in IDS])
    first = layers.Concatenate(axis=1)([embedding(name, 1)(inputs[name]) for name in IDS])
    squared = ops.square(ops.sum(rows, axis=1))
    pairs = 0.5 * ops.sum(squared - ops.sum(ops.square(rows), axis=1), axis=1, keepdims=True)
    deep = layers.Concatenate()([layers.Flatten()(rows), numbers])
    for width in (64, 32):
        deep = layers.Dense(width, activation="relu")(deep)
    parts = [ops.sum(first, axis=1), pairs, layers.Dense(1)(numbers), layers.Dense(1)(deep)]
    return _compiled(inputs, layers.Add()(parts))


def wide_deep(embedding, known):
    """A weight for each id, beside a perceptron on embeddings of the same ids and the numbers."""
    from keras import layers

    inputs, numbers = _inputs(known)
    wide = [layers.Flatten()(embedding(name, 1)(inputs[name])) for name in IDS]
    rows = [layers.Flatten()(embedding(name, DIM)(inputs[name])) for name in IDS]
    deep = layers.Concatenate()([*rows, numbers])
    for width in (64, 32):
        deep = layers.Dense(width, activation="relu")(deep)
    return _compiled(inputs, layers.Add()([*wide, layers.Dense(1)(deep)]))


def plain(name, dim):
    """Return the baseline's embedding of one column."""
    return recommender.plain(dim, flights.CATEGORIES.get(name))


def baseline(args, build, training, testing):
    """Return what the same model predicts that plain Keras has trained in this process."""
    import keras

    keras.utils.set_random_seed(args.seed)
    model = build(plain, args.known)
    labels = training[flights.LABEL].to_numpy()
    inputs = recommender.tensors(training, flights.FEATURES)
    model.fit(inputs, labels, batch_size=args.batch_size, epochs=args.epochs, verbose=0)
    held_out = recommender.tensors(testing, flights.FEATURES)
    return model.predict(held_out, batch_size=4096, verbose=0)


def arguments(doc):
    """The flags of both programs."""
    parser = recommender.arguments(doc)
    parser.add_argument("--flights", type=int, help="number of flights to draw; default: all")
    return parser


def modules():
    """Return the files that the executors need."""
    return [flights.__file__, recommender.__file__, __file__]
