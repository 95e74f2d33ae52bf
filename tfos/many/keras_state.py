"""What an object of Keras computes with: its configuration, its weights, code that it only names.

Covers: Keras 3 and tf-keras: models, layers, losses, optimizers, initializers.
Does not: import either.      Threads: any; pure.

A configuration has the user's layers, losses and activations by their names alone, so their code is
looked up in the layers themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy

from tfos.many.wrappers import code_behind

_KERAS = ("keras", "tf_keras")
_OWN_CODE_IS_NAMED = (*_KERAS, "tensorflow")
_BASES = {"KerasSaveable", "Layer", "_BaseOptimizer"}
"""Of Keras 3; of models, layers and optimizers of tf-keras."""


def keras_state(value: Any) -> dict[str, Any] | None:
    """Return what an object of Keras computes with; None: it is none, or has no configuration."""
    bases = {each.__name__ for each in type(value).__mro__ if _package(each.__module__) in _KERAS}
    if bases & {"RandomInitializer", "SeedGenerator"}:
        # Keras draws these where the user gives no seed; a given one is also in `_init_seed`,
        # `_initial_seed`.
        drawn = ("seed", "state")
        return {name: each for name, each in vars(value).items() if name not in drawn}
    if not bases & _BASES:
        return None
    if not hasattr(value, "variables"):
        hidden: dict[str, Any] = vars(value)
        return hidden  # a loss: the configuration of Huber leaves its delta out
    try:
        found: dict[str, Any] = {"config": value.get_config()}
    except Exception:  # noqa: BLE001 - a model of the user's own class may have no configuration
        return None
    if hasattr(value, "_compile_config"):  # as it was given: serialized, a loss is a name
        found["compiled"] = value._compile_config.config
    if hasattr(value, "_flatten_layers"):
        found["layers"] = [
            (type(layer), list(_code_of(layer))) for layer in value._flatten_layers()
        ]
    if "Metric" in bases:
        return found  # its variables are what the last evaluation has left
    numbers = value.weights if hasattr(value, "weights") else value.variables
    return found | {"weights": [numpy.asarray(each) for each in numbers]}


def _code_of(layer: Any) -> Iterator[tuple[str, Any]]:
    """Yield functions and objects that a layer calls and that no package of Keras has."""
    for name, value in sorted(vars(layer).items()):
        for each in _members(value):
            # Layers inside it stand beside it.
            if callable(each) and not hasattr(each, "_flatten_layers"):
                code = code_behind(each)
                home = getattr(code, "__globals__", {"__name__": code.__module__})["__name__"]
                if _package(home) not in _OWN_CODE_IS_NAMED:
                    yield name, each


def _members(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def _package(module: str) -> str:
    return module.partition(".")[0]
