"""Shared code of the programs of this directory: flags, the model and the format of a line.

Sent to the executors with `sc.addPyFile`, so TensorFlow is imported where it is needed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def arguments(doc):
    """The flags of all of them."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster_size", type=int, default=2, help="nodes: PS and workers")
    parser.add_argument("--num_ps", type=int, default=1, help="how many of the nodes are PS")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--images_labels", type=absolute, help="what mnist_data_setup.py wrote")
    parser.add_argument("--export_dir", type=absolute, default="mnist_export")
    parser.add_argument("--tensorboard", action="store_true", help="run TensorBoard on the chief")
    return parser


def absolute(path):
    """Return a path that every node understands; URLs stay as they are."""
    return path if "://" in path else os.path.abspath(path)


def spark_context(*modules):
    """Return the SparkContext, with the modules of this directory sent to its executors."""
    from pyspark import SparkContext

    sc = SparkContext.getOrCreate()
    for module in ("shared", *modules):
        sc.addPyFile(str(Path(sys.modules[module].__file__)))
    return sc


def parse_line(line):
    """One CSV line as (pixels, label)."""
    label, *pixels = map(int, line.split(","))
    return pixels, label


def read_lines(pattern, share=slice(None)):
    """Read CSV files; returns pixels int64 [n, 784] and labels int64 [n].

    `share` says which lines: `slice(rank, None, workers)` is every n-th.
    """
    import numpy as np
    import tensorflow as tf

    names = sorted(tf.io.gfile.glob(pattern))
    if not names:
        raise FileNotFoundError(f"no file is called {pattern}: mnist_data_setup.py writes them")
    lines = []
    for name in names:
        with tf.io.gfile.GFile(name) as file:
            lines += file.read().split()
    table = np.loadtxt(lines[share], delimiter=",", dtype=np.int64)
    return table[:, 1:], table[:, 0]


def build_model():
    """A small convolutional network, compiled."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((784,), name="image"),
            keras.layers.Rescaling(1 / 255.0),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax", name="digit"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(2e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def fed_dataset(feed, batch_size):
    """Batches of a TFNode.DataFeed whose rows are (pixels, label), until the feed ends."""
    import tensorflow as tf

    def rows():
        while not feed.should_stop():
            yield from feed.next_batch(batch_size)

    row = (tf.TensorSpec((784,), tf.float32), tf.TensorSpec((), tf.int64))
    return tf.data.Dataset.from_generator(rows, output_signature=row).batch(batch_size)
