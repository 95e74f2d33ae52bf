"""A saved Keras model whose answers are known.

Covers: writing it where TensorFlow is loaded anyway, as in a task of Spark; the fixture that does.
"""

from __future__ import annotations

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
    """Its path; a task writes it: it imports TensorFlow anyway, and this process need not."""
    path = str(tmp_path_factory.mktemp("model") / "linear.keras")
    found: str = spark.parallelize([path], 1).map(save_linear).collect()[0]
    return found
