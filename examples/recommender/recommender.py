"""Shared code of the recommenders: flags, the two kinds of embeddings, scores of held-out rows.

`distributed` makes the layer whose rows live on the parameter servers, for ids without a
vocabulary; `plain` makes stock Keras layers for the baseline in one process, which hash texts into
a fixed number of rows.

`sc.addPyFile` sends it to the executors, as it would your own module; so Keras and Spark are
imported where they are needed.
"""

from __future__ import annotations

import argparse

HASH_ROWS = 8192
"""Rows of a baseline's table of texts."""


def arguments(doc, **defaults):
    """The flags of all recommenders."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster_size", type=int, default=3, help="PS and workers together")
    parser.add_argument("--num_ps", type=int, default=1, help="how many of the nodes are PS")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    parser.set_defaults(**defaults)
    return parser


def distributed(name, dim):
    """Return an embedding of any ids, numbers or texts: its rows live on the servers."""
    from tfos.keras import Embedding

    return Embedding(dim, table=f"{name}-{dim}")


def plain(dim, num_ids=None):
    """Return an embedding as Keras has it: of texts by a hash, of numbers below num_ids."""
    import keras

    if num_ids is not None:
        return keras.layers.Embedding(num_ids, dim)
    hashed = keras.layers.Hashing(HASH_ROWS)
    return lambda ids: keras.layers.Embedding(HASH_ROWS, dim)(hashed(ids))


def tensors(table, names):
    """Return columns of a pandas table as inputs of a model, each [n]."""
    import tensorflow as tf

    return {name: tf.constant(table[name].to_numpy()) for name in names}


def scores(ctx, model, inputs):
    """Return what the distributed model predicts, [n, 1]; of main_fun, a result at the driver."""
    return model.predict(inputs, batch_size=4096, verbose=0) if ctx.is_chief else None


def _auc(labels, scores):
    """Return the share of pairs of a positive and a negative row that the scores order right."""
    from scipy.stats import mannwhitneyu

    positive, negative = scores[labels == 1], scores[labels == 0]
    return mannwhitneyu(positive, negative).statistic / (len(positive) * len(negative))


def report_auc(labels, found, baseline=None):
    """Print the AUC of the cluster's scores, beside that of plain Keras in one process."""
    if baseline is not None:
        print(f"plain Keras in one process: AUC {_auc(labels, baseline[:, 0]):.4f}")
    print(f"test AUC: {_auc(labels, found[:, 0]):.4f}")
