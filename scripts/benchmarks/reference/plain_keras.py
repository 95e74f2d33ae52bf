"""The same training by plain Keras: a process of its own that maps its rows from a file.

Usage: python -m scripts.benchmarks.reference.plain_keras ROWS.npy
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 784
BATCH_ROWS = 64
NUM_CLASSES = 10


def rows(partition: int, num_rows: int) -> NDArray[np.float32]:
    """Return float32[num_rows, WIDTH + 1]: pixels from 0 to 1, and the label last."""
    random = np.random.default_rng(partition)
    made = random.random((num_rows, WIDTH + 1), np.float32)
    made[:, WIDTH] = random.integers(0, NUM_CLASSES, num_rows)
    return made


def save(path: Path, num_partitions: int, per_partition: int) -> None:
    """Write the rows of all partitions as one array.

    Args:
        path: ends in `.npy`.
        num_partitions: number of partitions of the RDD with the same rows.
        per_partition: rows of each.
    """
    np.save(path, np.concatenate([rows(each, per_partition) for each in range(num_partitions)]))


def compiled_model() -> Any:
    """Return the MLP, with weights of a fixed seed."""
    import keras

    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((WIDTH,)),
            layers.Dense(128, activation="relu"),
            layers.Dense(NUM_CLASSES, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def fit(path: Path) -> None:
    """Train one epoch of the rows in a file."""
    made = np.load(path, mmap_mode="r")
    model = compiled_model()
    model.fit(made[:, :WIDTH], made[:, WIDTH], batch_size=BATCH_ROWS, epochs=1, verbose=0)


if __name__ == "__main__":
    fit(Path(sys.argv[1]))
