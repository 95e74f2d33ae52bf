"""Settings of a fit, and functions by their names."""

from __future__ import annotations

import pytest

from tests.support.named_models import compiled
from tfos.errors import SettingsError
from tfos.estimators.functions import function_of, reference_to
from tfos.estimators.recipe import ModelRecipe, recipe_of
from tfos.estimators.training import FitSettings


def test_several_workers_have_a_server_unless_told_otherwise():
    assert [FitSettings(cluster_size=size).servers for size in (1, 2, 5)] == [0, 1, 1]
    FitSettings(cluster_size=5, num_ps=2, checkpoint_dir="/c").check()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (FitSettings(batch_size=0), "batch_size must be an int >= 1"),
        (FitSettings(epochs=0), "epochs=0"),
        (FitSettings(validation_split=1.0), "validationSplit=1.0; it is a share"),
        (FitSettings(cluster_size=2, num_ps=0), "clusterSize=2 with numPS=0"),
        (FitSettings(cluster_size=2, num_ps=2), "leaves no worker"),
        (FitSettings(consistency="bsp"), "consistency='bsp'; it is one of"),
        (FitSettings(consistency="ssp"), "consistency='ssp' with stalenessBound=None; ssp"),
        (FitSettings(staleness_bound=2), "consistency='async' with stalenessBound=2; ssp"),
        (FitSettings(checkpoint_dir="/c"), "needs parameter servers"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, text):
    with pytest.raises(SettingsError, match=text):
        settings.check()


def test_a_model_or_a_function_that_makes_one_is_needed():
    with pytest.raises(SettingsError, match="pass either model="):
        recipe_of(None, None)
    with pytest.raises(SettingsError, match="model_fn must be a function"):
        recipe_of(None, 3)
    with pytest.raises(SettingsError, match="there is neither"):
        ModelRecipe().build()


def test_functions_go_by_module_and_name():
    reference = reference_to("model_fn", compiled)
    assert (reference, function_of(reference)) == ("tests.support.named_models:compiled", compiled)
    assert (reference_to("callbacks", None), function_of("")) == ("", None)
    with pytest.raises(SettingsError, match=r"model_fn .*lambda.* cannot be saved"):
        reference_to("model_fn", lambda: None)
