"""TensorFlow's own fused update of a rule, or Keras's compiled one where TensorFlow has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

_ADAM = {
    "beta1_power": 0.9,
    "beta2_power": 0.999,
    "lr": 1e-3,
    "beta1": 0.9,
    "beta2": 0.999,
    "epsilon": 1e-7,
}
_RMSPROP = {"lr": 1e-3, "rho": 0.9, "momentum": 0.9, "epsilon": 1e-3}
_MOMENTUM = {"lr": 1e-3, "momentum": 0.9}
_FTRL = {"lr": 1e-3, "l1": 0.0, "l2": 0.0, "l2_shrinkage": 0.0}
_OPERATORS: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
    "sgd": ("ResourceApplyGradientDescent", {}, {"alpha": 1e-3}),
    "momentum": ("ResourceApplyKerasMomentum", {"accum": 0.0}, _MOMENTUM),
    "nesterov": (
        "ResourceApplyKerasMomentum",
        {"accum": 0.0},
        {**_MOMENTUM, "use_nesterov": True},
    ),
    "adagrad": ("ResourceApplyAdagradV2", {"accum": 0.1}, {"lr": 1e-3, "epsilon": 1e-7}),
    "rmsprop_momentum": ("ResourceApplyRMSProp", {"ms": 0.0, "mom": 0.0}, _RMSPROP),
    "rmsprop_centered_momentum": (
        "ResourceApplyCenteredRMSProp",
        {"mg": 0.0, "ms": 0.0, "mom": 0.0},
        _RMSPROP,
    ),
    "adadelta": (
        "ResourceApplyAdadelta",
        {"accum": 0.0, "accum_update": 0.0},
        {"lr": 1e-3, "rho": 0.95, "epsilon": 1e-7},
    ),
    "adam": ("ResourceApplyAdam", {"m": 0.0, "v": 0.0}, _ADAM),
    "amsgrad": ("ResourceApplyAdamWithAmsgrad", {"m": 0.0, "v": 0.0, "vhat": 0.0}, _ADAM),
    "adamax": (
        "ResourceApplyAdaMax",
        {"m": 0.0, "v": 0.0},
        {name: value for name, value in _ADAM.items() if name != "beta2_power"},
    ),
    "ftrl": ("ResourceApplyFtrlV2", {"accum": 0.1, "linear": 0.0}, {**_FTRL, "lr_power": -0.5}),
    "ftrl_power": (
        "ResourceApplyFtrlV2",
        {"accum": 0.1, "linear": 0.0},
        {**_FTRL, "lr_power": -0.7},
    ),
}
"""Operator, its slots with their first values, its settings."""
_IN_KERAS: dict[str, tuple[str, dict[str, Any]]] = {
    "rmsprop": ("RMSprop", {}),
    "rmsprop_centered": ("RMSprop", {"centered": True, "epsilon": 1e-3}),
    "nadam": ("Nadam", {}),
    "lion": ("Lion", {}),
}


def use_one_thread() -> None:
    """Limit TensorFlow; to be called before it computes anything."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def update(name: str, gradient: np.ndarray[Any, Any]) -> tuple[str, Callable[[], object]]:
    """Return what the update is called, and a function that runs it once.

    Args:
        name: name of the rule's class.
        gradient: [n] float32.
    """
    import tensorflow as tf

    variable = tf.Variable(tf.zeros_like(gradient))
    g = tf.constant(gradient)
    if name not in _OPERATORS:
        return "Keras's compiled apply, one thread", _keras(_optimizer(name), variable, g)
    operator, starts, settings = _OPERATORS[name]
    slots = {slot: tf.Variable(tf.fill(g.shape, start)) for slot, start in starts.items()}
    pushed = {"delta" if name == "sgd" else "grad": g}

    def apply() -> None:
        handles = {slot: array.handle for slot, array in slots.items()}
        getattr(tf.raw_ops, operator)(var=variable.handle, **handles, **pushed, **settings)

    return f"tf.raw_ops.{operator}, one thread", _compiled(apply)


def _keras(optimizer: Any, variable: Any, g: Any) -> Callable[[], object]:
    optimizer.build([variable])
    return _compiled(lambda: optimizer.apply([g], [variable]))


def _optimizer(name: str) -> Any:
    import keras

    kind, settings = _IN_KERAS[name]
    return getattr(keras.optimizers, kind)(1e-3, **settings)


def _compiled(function: Callable[[], object]) -> Callable[[], object]:
    import tensorflow as tf

    compiled: Callable[[], object] = tf.function(function, jit_compile=False, autograph=False)
    return compiled
