"""What an estimator's files say of its model, by the number of their format."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from tests.support.named_models import compiled
from tfos.errors import SettingsError
from tfos.ml import KerasEstimator
from tfos.ml.persistence import EstimatorWriter, recipe_from
from tfos.predict.signature import TensorInfo

X = TensorInfo("float32", (2, None))


def saved(**changes):
    beside = {"model_fn": "", "custom": {}, "outputs": ["y"], "has_trained": True}
    return beside | {"format": 2, "inputs": [["x", {**asdict(X), "shape": [2, None]}]]} | changes


def test_the_inputs_come_back_as_they_were():
    recipe = recipe_from(saved(), b"model", "at")
    assert (recipe.content, recipe.inputs, recipe.outputs) == (b"model", {"x": X}, ("y",))
    assert recipe.has_trained


@pytest.mark.parametrize("inputs", [["x"], [["x", {}]], []])
def test_of_the_format_without_a_number_the_inputs_are_unknown(inputs):
    first = saved(inputs=inputs)
    del first["format"], first["has_trained"]
    recipe = recipe_from(first, b"model", "at")
    assert not recipe.inputs
    assert not recipe.has_trained
    assert recipe.outputs == ("y",)


def test_a_format_of_a_newer_version_is_refused():
    with pytest.raises(
        SettingsError, match=r"at was saved in estimator format 3, .* reads up to 2. Load"
    ):
        recipe_from(saved(format=3), b"", "at")


def test_no_callbacks_are_none_as_of_keras_fit():
    estimator = KerasEstimator(model_fn=compiled, callbacks=None)
    estimator._settings().check()
    assert EstimatorWriter(estimator)._extra["callbacks"] == ""
