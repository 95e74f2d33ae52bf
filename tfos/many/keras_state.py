"""State of a Keras object: its configuration, its weights, and code that it only names.

Covers: Keras 3 and tf-keras: models, layers, losses, optimizers, initializers.
Does not: import either.      Threads: any; pure.

A configuration only names the user's layers, losses, activations and learning rates, so their
code is looked up in the objects themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy

from tfos.many.wrappers import code_behind

_KERAS = ("keras", "tf_keras")
_OWN_CODE_IS_NAMED = (*_KERAS, "tensorflow")
_BASES = {"KerasSaveable", "Layer", "_BaseOptimizer"}
"""Base classes in Keras 3; base classes of models, layers and optimizers in tf-keras."""
_FROM_COMPILE = {"CompileLoss", "CompileMetrics", "LossesContainer", "MetricsContainer"}
"""Objects that `compile` makes from its arguments, and changes with the first batch. The
arguments count."""


def keras_state(value: Any, is_own: Callable[[Any], bool]) -> dict[str, Any] | None:
    """Return what a Keras object computes with; None: it is not one, or has no configuration.

    Args:
        value: any object.
        is_own: returns whether an object's class belongs to the program.
    """
    bases = {each.__name__ for each in type(value).__mro__ if _package(each.__module__) in _KERAS}
    if bases & {"RandomInitializer", "SeedGenerator"}:
        # Keras draws these if the user gives no seed; a given one is also in `_init_seed`,
        # `_initial_seed`.
        drawn = ("seed", "state")
        return {name: each for name, each in vars(value).items() if name not in drawn}
    if not bases & _BASES:
        return None
    if not hasattr(value, "variables"):
        hidden: dict[str, Any] = vars(value)
        return hidden  # a loss: Huber's configuration leaves out its delta
    try:
        found: dict[str, Any] = {"config": value.get_config()}
    except Exception:  # noqa: BLE001 - a model of the user's own class may have no configuration
        return None
    if hasattr(value, "_compile_config"):  # as it was given: serialized, a loss is a name
        found["compiled"] = value._compile_config.config
    parts = value._flatten_layers() if hasattr(value, "_flatten_layers") else [value]
    found["code"] = [(type(each), list(_code_of(each, is_own))) for each in parts]
    if "Metric" in bases:
        return found  # its variables are left from the last evaluation
    numbers = value.weights if hasattr(value, "weights") else value.variables
    return found | {"weights": [numpy.asarray(each) for each in numbers]}


def _code_of(
    value: Any, is_own: Callable[[Any], bool], met: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """Yield functions and objects that a Keras object calls and that no Keras package defines.

    This includes what its losses, metrics, rates and optimizers call, and all its objects of the
    program's classes.

    Args:
        value: a layer, a metric, an optimizer, ...
        is_own: as in `keras_state`.
        met: ids of the objects that were met.
    """
    met |= {id(value)}
    for name, parts in sorted(vars(value).items()):
        for each in _members(parts, is_own):
            if id(each) in met or _is_layer(each) or not (_is_called(each) or is_own(each)):
                continue
            code = code_behind(each)
            home = getattr(code, "__globals__", {"__name__": code.__module__})["__name__"]
            if _package(home) not in _OWN_CODE_IS_NAMED:
                yield name, each
            elif _package(type(each).__module__) in _KERAS and hasattr(each, "__dict__"):
                yield from _code_of(each, is_own, met)


def _is_layer(value: Any) -> bool:
    """Whether it is a layer; a layer counts next to the one that has it."""
    return hasattr(value, "_flatten_layers") and not hasattr(value, "update_state")


def _is_called(value: Any) -> bool:
    """Whether an attribute of a Keras object may lead to code that counts."""
    if type(value).__name__ in _FROM_COMPILE:
        return False
    return callable(value) or hasattr(value, "apply_gradients")


def _members(value: Any, is_own: Callable[[Any], bool]) -> list[Any]:
    if is_own(value):  # a named tuple of the program has more than its members
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [inner for each in value for inner in _members(each, is_own)]


def _package(module: str) -> str:
    return module.partition(".")[0]
