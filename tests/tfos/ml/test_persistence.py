"""What an estimator's files say of its model, by the number of their format."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from pyspark.ml.util import DefaultParamsReader

from tests.support.named_models import compiled
from tfos.config import ClusterConfig
from tfos.errors import SettingsError
from tfos.estimators.recipe import ModelRecipe
from tfos.ml import KerasEstimator, KerasModel
from tfos.ml.persistence import EstimatorWriter, recipe_from
from tfos.predict.signature import TensorInfo

X = TensorInfo("float32", (2, None))


def saved(**changes):
    beside = {"model_fn": "", "custom": {}, "outputs": ["y"], "has_trained": True}
    return beside | {"format": 1, "inputs": [["x", {**asdict(X), "shape": [2, None]}]]} | changes


def test_the_inputs_come_back_as_they_were():
    recipe = recipe_from(saved(), b"model", "at")
    assert (recipe.content, recipe.inputs, recipe.outputs) == (b"model", {"x": X}, ("y",))
    assert recipe.has_trained


def test_a_reader_takes_what_a_writer_says_of_the_model():
    estimator = KerasEstimator(model_fn=compiled)
    recipe = ModelRecipe(content=b"model", inputs={"x": X}, outputs=("y",), has_trained=True)
    estimator.recipe = recipe
    beside = json.loads(json.dumps(EstimatorWriter(estimator)._extra))
    assert recipe_from(beside, b"model", "at") == recipe


def test_a_format_of_a_newer_version_is_refused():
    with pytest.raises(SettingsError, match=r"at was saved in format 2 .* reads 1: load it"):
        recipe_from(saved(format=2), b"", "at")


def test_no_callbacks_are_none_as_of_keras_fit():
    estimator = KerasEstimator(model_fn=compiled, callbacks=None)
    estimator._settings().check()
    assert EstimatorWriter(estimator)._extra["callbacks"] == ""


def test_the_config_of_a_cluster_is_not_saved_unseen():
    estimator = KerasEstimator(model_fn=compiled, config=ClusterConfig(hang_s=60.0))
    assert estimator.copy().config is estimator.config
    with pytest.raises(SettingsError, match=r"cannot be saved\. Set estimator\.config = None"):
        EstimatorWriter(estimator)


@pytest.mark.parametrize(
    ("kind", "saved"), [(KerasModel, "KerasEstimator"), (KerasEstimator, "KerasModel")]
)
def test_what_another_class_has_saved_is_told_so(kind, saved, monkeypatch):
    """`KerasModel.load` of an estimator of model_fn asked for a model.keras that nobody writes."""
    metadata = {"class": f"tfos.ml.{saved}"}
    monkeypatch.setattr(DefaultParamsReader, "loadMetadata", lambda *_: metadata)
    monkeypatch.setattr(DefaultParamsReader, "sc", None)
    with pytest.raises(SettingsError, match=rf"^/m is a saved {saved}; .*{saved}\.load"):
        kind.load("/m")
