"""A saved Keras model whose answers are known.

Covers: writing it where TensorFlow is loaded anyway, in a Python worker of DataFrames; the fixture
that does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


def save_linear(path: str) -> str:
    """Save a model of two outputs: the sum of a row plus 1, and its sigmoid."""
    import keras

    x = keras.Input((3,), name="x")
    y = keras.layers.Dense(1, "linear", True, "ones", "ones", name="y")(x)
    keras.Model(x, [y, keras.layers.Activation("sigmoid", name="p")(y)]).save(path)
    return str(path)


@pytest.fixture(scope="module")
def saved(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its path; a task writes it, whose worker answers rows next: this process needs no Keras."""
    from pyspark.sql import SparkSession

    path = str(tmp_path_factory.mktemp("model") / "linear.keras")

    def save(batches: Iterator[Any]) -> Iterator[Any]:
        save_linear(path)
        yield from batches

    SparkSession(spark).range(0, 1, 1, 1).mapInArrow(save, "id long").collect()
    return path
