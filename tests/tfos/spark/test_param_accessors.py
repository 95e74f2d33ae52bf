"""Setters and getters of Params: what users of spark.ml call, under the names that they know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tfos.config import InputMode
from tfos.ml import KerasEstimator, KerasModel
from tfos.ml.params import FitParams, KerasParams
from tfos.tensorflowonspark import pipeline
from tfos.tensorflowonspark.namespace import Namespace

OBJECTS: dict[str, Callable[[], Any]] = {
    "KerasEstimator": lambda: KerasEstimator(model_fn=object),
    "KerasModel": lambda: KerasModel(b"m"),
    "TFEstimator": lambda: pipeline.TFEstimator(print, Namespace({})),
}
VALUES = {str: "a", int: 7, bool: True, float: 0.5, list[str]: ["a", "b"], InputMode: InputMode(1)}


def _setters(kind: type) -> set[str]:
    return {name for name in dir(kind) if name.startswith("set")}


@pytest.mark.parametrize("name", OBJECTS)
def test_every_param_is_set_and_read_by_its_methods(name):
    made = OBJECTS[name]()
    methods = dict(inspect.getmembers(made, inspect.ismethod))
    of_fit = _setters(FitParams) - _setters(KerasParams) if name == "KerasModel" else set()
    assert not of_fit & set(methods)
    for each in made.params:
        title = each.name.replace("_", "").lower()
        if f"set{title}" in {setter.lower() for setter in of_fit}:
            assert f"get{title}" in {method.lower() for method in methods}
            continue
        (put,) = [method for key, method in methods.items() if key.lower() == f"set{title}"]
        (get,) = [method for key, method in methods.items() if key.lower() == f"get{title}"]
        assert put.__name__[3:] == get.__name__[3:]
        assert methods[put.__name__] == put
        assert f"Set `{each.name}`" in (put.__doc__ or "")
        assert get.__doc__ == f"Return `{each.name}`."
        kind = get.__func__.__annotations__["return"]
        value = VALUES.get(kind, {"a": "b"})
        assert put(value) is made
        assert get() == made.getOrDefault(each) == value


def test_methods_with_capitals_have_the_names_that_programs_call():
    made = OBJECTS["TFEstimator"]()
    assert made.setNumPS(2).setTFRecordDir("/d").setDriverPSNodes(True).getNumPS() == 2
    assert (made.getTFRecordDir(), made.getDriverPSNodes()) == ("/d", True)
    assert KerasEstimator(model_fn=object).setNumPS(3).getNumPS() == 3
