"""Estimators learn what `fit` on `toPandas()` learns: real digits, the same rows, three seeds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[3] / "examples" / "mnist"
SEEDS = (1, 2, 3)
NUM_HELD = 1000
EPOCHS = 5
BATCH_ROWS = 64
NOISE = 0.015
"""Of the accuracy on 1,000 digits, mean of three seeds: its standard error is 0.005."""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.timeout(900, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[1,3,1024]"], indirect=True),
]


def build():
    """Return the model of all of them."""
    import keras

    layers = [keras.Input((784,), name="pixels"), keras.layers.Rescaling(1 / 255)]
    layers += [keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential(layers)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def made(config):
    """Return the model, of Orca's model_creator."""
    import keras

    keras.utils.set_random_seed(config["seed"])
    return build()


@pytest.fixture(scope="module")
def digits():
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("digits").bundled_digits(0)
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.fixture(scope="module")
def frames(spark: Any, digits: Any) -> Any:
    from pyspark.sql import SparkSession

    rows = [(image.tolist(), int(label)) for image, label in zip(*digits, strict=True)]
    session = SparkSession(spark)
    held = session.createDataFrame(rows[:NUM_HELD], ["pixels", "digit"]).repartition(2).cache()
    train = session.createDataFrame(rows[NUM_HELD:], ["pixels", "digit"]).repartition(4).cache()
    return train, held


def collected(frames: Any, seed: int) -> float:
    """Return the accuracy of fit on toPandas()."""
    import keras

    keras.utils.set_random_seed(seed)
    train, held = (each.toPandas() for each in frames)
    model = build()
    x, y = np.stack(train["pixels"].to_list()), train["digit"].to_numpy()
    model.fit(x, y, batch_size=BATCH_ROWS, epochs=EPOCHS, verbose=0)
    found = model.evaluate(
        np.stack(held["pixels"].to_list()), held["digit"].to_numpy(), verbose=0, return_dict=True
    )
    return float(found["accuracy"])


def by_estimator(frames: Any, seed: int, num_workers: int) -> float:
    from tfos.ml import KerasEstimator

    estimator = KerasEstimator(
        model_fn=build,
        featuresCol="pixels",
        labelCol="digit",
        epochs=EPOCHS,
        batchSize=BATCH_ROWS // num_workers,
        clusterSize=num_workers + 1,
        numPS=1,
        consistency="sync",
        seed=seed,
        verbose=False,
    )
    return float(estimator.fit(frames[0]).evaluate(frames[1])["accuracy"])


def by_orca(frames: Any, seed: int) -> float:
    from tfos.orca import Estimator

    config = {"seed": seed}
    estimator = Estimator.from_keras(model_creator=made, config=config, verbose=False)
    estimator.fit(frames[0], EPOCHS, BATCH_ROWS, feature_cols="pixels", label_cols="digit")
    found = estimator.evaluate(frames[1], feature_cols="pixels", label_cols="digit")
    return float(found["accuracy"])


def test_their_accuracy_is_that_of_a_fit_in_memory(frames):
    found = {
        "toPandas": [collected(frames, seed) for seed in SEEDS],
        "1 worker": [by_estimator(frames, seed, 1) for seed in SEEDS],
        "2 workers": [by_estimator(frames, seed, 2) for seed in SEEDS],
        "orca": [by_orca(frames, seed) for seed in SEEDS],
    }
    print(found)  # noqa: T201 - both numbers, as -s shows them
    means = {name: np.mean(values) for name, values in found.items()}
    assert means["toPandas"] > 0.9
    for name, mean in means.items():
        assert abs(mean - means["toPandas"]) < NOISE, (name, found)
