"""Settings of update rules: the optimizer of a group or table in the manifest.

Covers: one frozen struct per rule, with its ranges, as part of the manifest.
Does not: compute (ps.optim.formulas), derive scalars or slots (ps.optim.rules).
Pure; no numba, no threads.
"""

from __future__ import annotations

import math

import msgspec

from ps.errors import PSSettingsError
from ps.manifest.field_types import check_types

MAX_CONSTANT = 1e30
"""Largest epsilon, initial value or strength: far below what overflows float32."""


_RANGES: dict[str, tuple[float, float]] = {
    "weight_decay": (0.0, math.inf),
    "clipvalue": (0.0, math.inf),
    "clipnorm": (0.0, math.inf),
    "global_clipnorm": (0.0, math.inf),
    "ema_momentum": (0.0, 1.0),
    "ema_overwrite_frequency": (1, 1 << 53),
    "momentum": (0.0, 1.0),
    "rho": (0.0, 1.0),
    "beta_1": (0.0, 1.0),
    "beta_2": (0.0, 1.0),
    "epsilon": (0.0, MAX_CONSTANT),
    "initial_accumulator_value": (0.0, MAX_CONSTANT),
    "learning_rate_power": (-16.0, 0.0),
    "l1_regularization_strength": (0.0, MAX_CONSTANT),
    "l2_regularization_strength": (0.0, MAX_CONSTANT),
    "l2_shrinkage_regularization_strength": (0.0, MAX_CONSTANT),
    "beta": (0.0, MAX_CONSTANT),
}
"""The least and the largest value of each setting, for every rule that has it."""


class Descent(msgspec.Struct, frozen=True, kw_only=True, tag_field="rule"):
    """Settings that every optimizer of Keras has."""

    weight_decay: float | None = None
    """Decoupled decay: before the update v -= v * weight_decay * learning_rate. None: no decay."""
    clipvalue: float | None = None
    """Each element of the gradient is clipped to [-clipvalue, clipvalue]. For a table the worker
    clips each row's sum over a push. None or 0: not clipped."""
    clipnorm: float | None = None
    """Each parameter's gradient is scaled down to this norm. None or 0: not clipped."""
    global_clipnorm: float | None = None
    """The whole gradient is scaled down to this norm. None or 0: not clipped."""
    ema_momentum: float | None = None
    """Weight of the old moving average at each update; Keras's use_ema. None: no average. See
    ps.dense.ema."""
    ema_overwrite_frequency: int | None = None
    """Replace the values by their average every this many updates. None: never."""

    def __post_init__(self) -> None:
        check_types(self, type(self).__name__)
        self._check_ranges()

    def _check_ranges(self) -> None:
        if self.ema_overwrite_frequency is not None and self.ema_momentum is None:
            raise PSSettingsError(
                f"{type(self).__name__}: ema_overwrite_frequency={self.ema_overwrite_frequency} "
                "needs ema_momentum: without it there is no average"
            )
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in _RANGES or value is None:
                continue
            low, high = _RANGES[name]
            if not low <= value <= high:  # also false for NaN
                raise PSSettingsError(
                    f"{type(self).__name__}: {name} must be in [{low:g}, {high:g}], got {value!r}"
                )


class SGD(Descent, frozen=True, kw_only=True, tag="sgd"):
    """Gradient descent; see ps.optim.formulas.sgd, momentum, nesterov."""

    momentum: float = 0.0
    nesterov: bool = False


class Adagrad(Descent, frozen=True, kw_only=True, tag="adagrad"):
    """See ps.optim.formulas.adagrad."""

    epsilon: float = 1e-7
    initial_accumulator_value: float = 0.1


class RowWiseAdagrad(Adagrad, frozen=True, kw_only=True, tag="rowwise_adagrad"):
    """Adagrad with one accumulator per row, for tables (ps.optim.formulas)."""


class RMSprop(Descent, frozen=True, kw_only=True, tag="rmsprop"):
    """See ps.optim.formulas.rmsprop and its three variants."""

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-7
    centered: bool = False


class Adadelta(Descent, frozen=True, kw_only=True, tag="adadelta"):
    """See ps.optim.formulas.adadelta."""

    rho: float = 0.95
    epsilon: float = 1e-7


class Moments(Descent, frozen=True, kw_only=True):
    """Settings of the rules that correct two moving averages by powers of the step's number."""

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7

    def _check_ranges(self) -> None:
        for name in ("beta_1", "beta_2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise PSSettingsError(
                    f"{type(self).__name__}: {name} must be in [0, 1), got {value!r}"
                )
        super()._check_ranges()


class Adam(Moments, frozen=True, kw_only=True, tag="adam"):
    """See ps.optim.formulas.adam."""


class AdamW(Adam, frozen=True, kw_only=True, tag="adamw"):
    """Adam with decoupled weight decay; see ps.optim.formulas.adam and decay."""

    weight_decay: float | None = 0.004


class AMSGrad(Adam, frozen=True, kw_only=True, tag="amsgrad"):
    """Keras's Adam or AdamW with `amsgrad=True`; see ps.optim.formulas.amsgrad."""


class Adamax(Moments, frozen=True, kw_only=True, tag="adamax"):
    """See ps.optim.formulas.adamax."""


class Nadam(Moments, frozen=True, kw_only=True, tag="nadam"):
    """See ps.optim.formulas.nadam."""


class Ftrl(Descent, frozen=True, kw_only=True, tag="ftrl"):
    """See ps.optim.formulas.ftrl and ftrl_power."""

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0


class Lion(Descent, frozen=True, kw_only=True, tag="lion"):
    """See ps.optim.formulas.lion."""

    beta_1: float = 0.9
    beta_2: float = 0.99


class Average(msgspec.Struct, frozen=True, tag_field="rule", tag="average"):
    """Statistics, not gradients, are pushed; see ps.optim.formulas.average."""


class Frozen(msgspec.Struct, frozen=True, tag_field="rule", tag="frozen"):
    """Values that nobody pushes to: seeded or restored once, pulled by `pull_frozen`."""


class Add(msgspec.Struct, frozen=True, tag_field="rule", tag="add"):
    """The pushed values are added; see ps.optim.formulas.add."""


RuleConfig = (
    SGD
    | Adagrad
    | RowWiseAdagrad
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
    | Frozen
    | Add
)
