"""Settings of the update rules: what a group of parameters is told about its optimizer.

Covers: one frozen struct per rule, with its ranges; they travel in the manifest.
Does not: compute (ps.formulas), derive scalars or slots (ps.optimizers).
Pure; no numba, no threads.
"""

from __future__ import annotations

import math

import msgspec

from ps.errors import SettingsError

MAX_CONSTANT = 1e30
"""Largest epsilon, initial value or strength: far below what overflows float32."""


def _check_range(rule: object, name: str, low: float, high: float) -> None:
    value = getattr(rule, name)
    if not low <= value <= high:  # also false for NaN
        kind = type(rule).__name__
        raise SettingsError(f"{kind}: {name} must be in [{low:g}, {high:g}], got {value!r}")


def _check_betas(rule: object) -> None:
    for name in ("beta_1", "beta_2"):
        value = getattr(rule, name)
        if not 0.0 <= value < 1.0:
            raise SettingsError(f"{type(rule).__name__}: {name} must be in [0, 1), got {value!r}")


class Descent(msgspec.Struct, frozen=True, kw_only=True, tag_field="rule"):
    """Settings that every optimizer of Keras has."""

    weight_decay: float | None = None
    """Decoupled decay: before the update v -= v * weight_decay * learning_rate. None: no decay."""
    clipvalue: float | None = None
    """Each element of the gradient is cut to [-clipvalue, clipvalue]. None or 0: not clipped."""
    clipnorm: float | None = None
    """Each parameter's gradient is scaled down to this norm. None or 0: not clipped."""
    global_clipnorm: float | None = None
    """The whole gradient is scaled down to this norm. None or 0: not clipped."""

    def __post_init__(self) -> None:
        for name in ("weight_decay", "clipvalue", "clipnorm", "global_clipnorm"):
            if getattr(self, name) is not None:
                _check_range(self, name, 0.0, math.inf)


class SGD(Descent, frozen=True, kw_only=True, tag="sgd"):
    """Gradient descent; see ps.formulas.sgd, momentum, nesterov."""

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "momentum", 0.0, 1.0)


class Adagrad(Descent, frozen=True, kw_only=True, tag="adagrad"):
    """See ps.formulas.adagrad."""

    epsilon: float = 1e-7
    initial_accumulator_value: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "epsilon", 0.0, MAX_CONSTANT)
        _check_range(self, "initial_accumulator_value", 0.0, MAX_CONSTANT)


class RMSprop(Descent, frozen=True, kw_only=True, tag="rmsprop"):
    """See ps.formulas.rmsprop and its three variants."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "rho", 0.0, 1.0)
        _check_range(self, "momentum", 0.0, 1.0)
        _check_range(self, "epsilon", 0.0, MAX_CONSTANT)


class Adadelta(Descent, frozen=True, kw_only=True, tag="adadelta"):
    """See ps.formulas.adadelta."""

    rho: float = 0.95
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "rho", 0.0, 1.0)
        _check_range(self, "epsilon", 0.0, MAX_CONSTANT)


class Adam(Descent, frozen=True, kw_only=True, tag="adam"):
    """See ps.formulas.adam."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
        _check_range(self, "epsilon", 0.0, MAX_CONSTANT)


class AdamW(Adam, frozen=True, kw_only=True, tag="adamw"):
    """Adam with decoupled weight decay; see ps.formulas.adam and decay."""

    weight_decay: float | None = 0.004


class AMSGrad(Adam, frozen=True, kw_only=True, tag="amsgrad"):
    """Keras's Adam or AdamW with `amsgrad=True`; see ps.formulas.amsgrad."""


class Adamax(Descent, frozen=True, kw_only=True, tag="adamax"):
    """See ps.formulas.adamax."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
        _check_range(self, "epsilon", 0.0, MAX_CONSTANT)


class Nadam(Descent, frozen=True, kw_only=True, tag="nadam"):
    """See ps.formulas.nadam."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_betas(self)
        _check_range(self, "epsilon", 0.0, MAX_CONSTANT)


class Ftrl(Descent, frozen=True, kw_only=True, tag="ftrl"):
    """See ps.formulas.ftrl and ftrl_power."""

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "learning_rate_power", -16.0, 0.0)
        for name in (
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "l2_shrinkage_regularization_strength",
            "beta",
        ):
            _check_range(self, name, 0.0, MAX_CONSTANT)


class Lion(Descent, frozen=True, kw_only=True, tag="lion"):
    """See ps.formulas.lion."""

    beta_1: float = 0.9
    beta_2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_range(self, "beta_1", 0.0, 1.0)
        _check_range(self, "beta_2", 0.0, 1.0)


class Average(msgspec.Struct, frozen=True, tag_field="rule", tag="average"):
    """Statistics, not gradients, are pushed; see ps.formulas.average."""


class Add(msgspec.Struct, frozen=True, tag_field="rule", tag="add"):
    """The pushed values are added; see ps.formulas.add."""


RuleConfig = (
    SGD
    | Adagrad
    | RMSprop
    | Adadelta
    | Adam
    | AdamW
    | AMSGrad
    | Adamax
    | Nadam
    | Ftrl
    | Lion
    | Average
    | Add
)
