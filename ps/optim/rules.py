"""Update rules: their slots, the slots' first values, and the scalars of one step.

Covers: from a rule's settings (ps.manifest.rule_spec) to its formula (ps.optim.formulas), slots
and scalars.
Does not: loop over arrays (ps.optim.kernels), lock, or know Keras.
Pure; no numba here, so that clients may import it.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ps.errors import PSSettingsError
from ps.manifest.manifest import Hyper
from ps.manifest.rule_spec import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Add,
    AMSGrad,
    Average,
    Descent,
    Frozen,
    Ftrl,
    Lion,
    Nadam,
    RMSprop,
    RowWiseAdagrad,
    RuleConfig,
)
from ps.optim import formulas

Array = np.ndarray[Any, Any]
Number = Any
"""A numpy scalar of a group's dtype."""


AVERAGE = "average"
"""Name of the moving average among what is kept with the values."""


@dataclass(frozen=True, slots=True)
class RowPart:
    """What a table's rule does once per row, before the formula of its elements."""

    formula: Callable[..., Any]
    """A function of ps.optim.formulas: ([g,] *slots, *scalars) -> (*slots, *computed)."""
    slots: tuple[str, ...]
    """Numbers that a row has once."""
    slot_starts: tuple[float, ...]
    computed: tuple[str, ...]
    """Scalars of the elements' formula that are this row's."""
    suffix: str = ""
    """What the rule's name then ends in."""

    @property
    def takes_gradient(self) -> bool:
        """Whether the formula looks at the row's gradient."""
        return next(iter(inspect.signature(self.formula).parameters)) == "g"

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the formula's scalars, in order."""
        return _parameters(self.formula)[self.takes_gradient + len(self.slots) :]


@dataclass(frozen=True, slots=True)
class Rule:
    """A formula with its slots and scalars."""

    formula: Callable[..., Any]
    """A function of ps.optim.formulas: (g, v, *slots, *scalars) -> value, or (value, *slots)."""
    slots: tuple[str, ...] = ()
    """Arrays of the values' shape and dtype that stay with the values on the server."""
    slot_starts: tuple[float, ...] = ()
    """What each slot is filled with."""
    constants: tuple[float, ...] = ()
    """The formula's last scalars, in double precision; cast to the dtype on use."""
    step_scalars: tuple[str, ...] = ()
    """Scalars with powers of the step that may come with the push (`Hyper.scalars`)."""
    is_averaged: bool = False
    """Whether a moving average of the values is kept; see ps.dense.ema."""
    row: RowPart | None = None
    """Only in tables: what each row does once; see ps.optim.row_rules."""

    @property
    def name(self) -> str:
        """The formula's name, and how its rows differ from it."""
        return self.formula.__name__ + (self.row.suffix if self.row is not None else "")

    @property
    def row_slots(self) -> tuple[str, ...]:
        """Numbers that a row of a table has once."""
        return self.row.slots if self.row is not None else ()

    @property
    def row_starts(self) -> tuple[float, ...]:
        """What each of them starts with."""
        return self.row.slot_starts if self.row is not None else ()

    @property
    def kept(self) -> tuple[str, ...]:
        """Arrays that a server keeps beside the values: the slots, then the average if any."""
        return (*self.slots, *[AVERAGE] * self.is_averaged)

    @property
    def kept_starts(self) -> tuple[float, ...]:
        """What each of them is filled with."""
        return (*self.slot_starts, *[0.0] * self.is_averaged)

    @property
    def element_scalars(self) -> tuple[str, ...]:
        """Names of the formula's scalars, in order: those of the step first, then constants."""
        return _parameters(self.formula)[2 + len(self.slots) :]

    @property
    def scalar_names(self) -> tuple[str, ...]:
        """Names of the scalars that a kernel is given: those of the row's part come first."""
        if self.row is None:
            return self.element_scalars
        given = (name for name in self.element_scalars if name not in self.row.computed)
        return (*self.row.scalar_names, *given)


def _parameters(formula: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(formula).parameters)


@functools.cache
def single(setting: float) -> float:
    """Round a setting as Keras does where it casts it: through float32, for float64 too."""
    return float(np.float32(setting))


def _zeros(formula: Callable[..., Any], *slots: str, **more: Any) -> Rule:
    return Rule(formula, slots, (0.0,) * len(slots), **more)


def _sgd(config: SGD) -> Rule:
    if config.momentum == 0:
        return Rule(formulas.sgd)
    formula = formulas.nesterov if config.nesterov else formulas.momentum
    return _zeros(formula, "momentum", constants=(single(config.momentum),))


def _adagrad(config: Adagrad) -> Rule:
    start = single(config.initial_accumulator_value)
    return Rule(formulas.adagrad, ("accumulator",), (start,), (config.epsilon,))


def _rowwise_adagrad(config: RowWiseAdagrad) -> Rule:
    start = single(config.initial_accumulator_value)
    row = RowPart(formulas.mean_square_root, ("accumulator",), (start,), ("root",))
    return Rule(formulas.rowwise_adagrad, row=row)


def _rmsprop(config: RMSprop) -> Rule:
    moves = config.momentum > 0
    constants: tuple[float, ...] = (config.rho, 1 - config.rho, config.epsilon)
    slots = ["velocity"]
    if moves:
        constants = (*constants, config.momentum)
        slots.append("momentum")
    if config.centered:
        slots.append("average_gradient")
    formula = _RMSPROPS[moves, config.centered]
    return _zeros(formula, *slots, constants=constants)


_RMSPROPS: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): formulas.rmsprop,
    (True, False): formulas.rmsprop_momentum,
    (False, True): formulas.rmsprop_centered,
    (True, True): formulas.rmsprop_centered_momentum,
}


def _adadelta(config: Adadelta) -> Rule:
    constants = (config.rho, 1 - config.rho, config.epsilon)
    slots = ("accumulated_grad", "accumulated_delta_var")
    return _zeros(formulas.adadelta, *slots, constants=constants)


def _adam(config: Adam) -> Rule:
    rates = (1 - config.beta_1, 1 - config.beta_2, config.epsilon)
    slots: tuple[str, ...] = ("momentum", "velocity")
    formula: Callable[..., Any] = formulas.adam
    if isinstance(config, AMSGrad):
        slots, formula = (*slots, "velocity_hat"), formulas.amsgrad
    return _zeros(formula, *slots, constants=rates, step_scalars=("alpha",))


def _adamax(config: Adamax) -> Rule:
    constants = (1 - config.beta_1, config.beta_2, config.epsilon)
    names = ("correction",)
    return _zeros(formulas.adamax, "momentum", "norm", constants=constants, step_scalars=names)


def _nadam(config: Nadam) -> Rule:
    rates = (1 - single(config.beta_1), 1 - single(config.beta_2))
    constants = (*rates, config.epsilon)
    return _zeros(formulas.nadam, "momentum", "velocity", constants=constants)


def _ftrl(config: Ftrl) -> Rule:
    slots = ("accumulator", "linear")
    starts = (single(config.initial_accumulator_value), 0.0)
    constants = (
        config.l1_regularization_strength,
        2 * config.l2_shrinkage_regularization_strength,
    )
    if config.learning_rate_power == -0.5:
        return Rule(formulas.ftrl, slots, starts, constants)
    return Rule(formulas.ftrl_power, slots, starts, (*constants, -config.learning_rate_power))


def _lion(config: Lion) -> Rule:
    beta_1, beta_2 = single(config.beta_1), single(config.beta_2)
    constants = (beta_1, 1 - beta_1, beta_2, 1 - beta_2)
    return _zeros(formulas.lion, "momentum", constants=constants)


_RULES: dict[type, Callable[[Any], Rule]] = {
    SGD: _sgd,
    RowWiseAdagrad: _rowwise_adagrad,  # before the Adagrad that it is
    Adagrad: _adagrad,
    RMSprop: _rmsprop,
    Adadelta: _adadelta,
    Adam: _adam,  # and AdamW, AMSGrad
    Adamax: _adamax,
    Nadam: _nadam,
    Ftrl: _ftrl,
    Lion: _lion,
}


@functools.cache
def rule_of(config: RuleConfig) -> Rule:
    """Return the rule that a configuration means."""
    for kind, make in _RULES.items():
        if isinstance(config, kind):
            return replace(make(config), is_averaged=is_averaged(config))
    if isinstance(config, Frozen):
        return Rule(frozen)
    return Rule(formulas.average if isinstance(config, Average) else formulas.add)


def frozen(_gradient: Number, value: Number) -> Number:
    """Return the value: nothing is pushed to a frozen group, so no kernel is made of this."""
    return value


def every_rule() -> tuple[Rule, ...]:
    """Return one rule for each formula."""
    configs: tuple[RuleConfig, ...] = (
        SGD(),
        SGD(momentum=0.9),
        SGD(momentum=0.9, nesterov=True),
        Adagrad(),
        RowWiseAdagrad(),
        RMSprop(),
        RMSprop(momentum=0.9),
        RMSprop(centered=True),
        RMSprop(momentum=0.9, centered=True),
        Adadelta(),
        Adam(),
        AMSGrad(),
        Adamax(),
        Nadam(),
        Ftrl(),
        Ftrl(learning_rate_power=-1.0),
        Lion(),
        Average(),
        Add(),
    )
    return tuple(map(rule_of, configs))


def decays(config: RuleConfig) -> bool:
    """Whether the values shrink before each update."""
    return isinstance(config, Descent) and bool(config.weight_decay)


def is_averaged(config: RuleConfig) -> bool:
    """Whether a moving average of the values is kept; see ps.dense.ema."""
    return isinstance(config, Descent) and config.ema_momentum is not None


def adam_alpha(config: Adam, learning_rate: float, step: int, dtype: np.dtype[Any]) -> Number:
    """Return Adam's step size, rounded after each operation in `dtype` as Keras does.

    The powers are taken in double precision and rounded once, as the C library's powf does; where
    TensorFlow's differs in the last bit of a power, alpha differs too.

    Args:
        config: the rule.
        learning_rate: learning rate of this step.
        step: number of the update, from 1.
        dtype: dtype of the group.
    """
    number = dtype.type
    rest_2 = _rest(config.beta_2, step, dtype)
    return number(learning_rate) * np.sqrt(rest_2) / _rest(config.beta_1, step, dtype)


def _rest(beta: float, step: int, dtype: np.dtype[Any]) -> Number:
    """Return 1 - beta^step."""
    number = dtype.type
    return number(1) - number(math.pow(single(beta), step))


def _nadam_scalars(config: Nadam, step: int, dtype: np.dtype[Any]) -> tuple[Number, ...]:
    number = dtype.type
    beta, base = single(config.beta_1), single(0.96)
    now, ahead = (number(beta * (1 - 0.5 * math.pow(base, t))) for t in (step, step + 1))
    # Keras casts both settings for the factors of a step, and for their product neither.
    beta, base = float(number(config.beta_1)), float(number(0.96))
    factors = 1 - 0.5 * np.power(base, np.arange(1, min(step, 1000) + 1))  # the rest are 1
    product = number(math.pow(beta, step) * float(np.prod(factors)))
    one = number(1)
    correction = _rest(config.beta_2, step, dtype)
    return ahead, one - product * ahead, one - now, one - product, correction


def _powers(
    config: RuleConfig, learning_rate: float, step: int, dtype: np.dtype[Any]
) -> tuple[Number, ...]:
    """Return the scalars that contain powers of the step's number (from 1)."""
    if isinstance(config, Adam):
        return (adam_alpha(config, learning_rate, step, dtype),)
    if isinstance(config, Adamax):
        return (_rest(config.beta_1, step, dtype),)
    if isinstance(config, Nadam):
        return _nadam_scalars(config, step, dtype)
    return ()


def stands_still(config: RuleConfig, learning_rate: float, dtype: np.dtype[Any]) -> bool:
    """Whether a step at this rate changes neither values nor slots: Ftrl's at a rate of 0.

    Ftrl divides by the rate, and Keras's variables become NaN there. A rate below the smallest
    normal number is 0 in a kernel.

    Args:
        config: the rule.
        learning_rate: learning rate of the step.
        dtype: dtype of the values.
    """
    return isinstance(config, Ftrl) and abs(dtype.type(learning_rate)) < np.finfo(dtype).tiny


def _ftrl_l2(config: Ftrl, learning_rate: float, dtype: np.dtype[Any]) -> Number:
    number = dtype.type
    if stands_still(config, learning_rate, dtype):
        return number(0)  # nobody uses it
    strength = number(config.l2_regularization_strength)
    return number(2) * (strength + number(config.beta) / (number(2) * number(learning_rate)))


def scalars(
    config: RuleConfig,
    learning_rate: float,
    step: int,
    dtype: np.dtype[Any],
    given: Sequence[float] = (),
) -> Array:
    """Return the scalars of one step, as the dense and the sparse kernel of the rule take them.

    Args:
        config: the rule's settings.
        learning_rate: learning rate of this step.
        step: this update's number, from 1; unused where `given` replaces what depends on it.
        dtype: the parameters' dtype.
        given: values for `Rule.step_scalars`, or none to compute them from `step`.

    Returns:
        1-d array of `dtype`: those of the step, the rule's constants, then for rules that decay
        (weight decay, learning rate). Empty for average and add.

        A scalar may be infinite at a huge rate: what it touches is not finite, and kernels leave
        that out.

    Raises:
        PSSettingsError: another number of scalars given than the rule has.
    """
    if not isinstance(config, Descent):
        return np.empty(0, dtype)
    rule = rule_of(config)
    if given and len(given) != len(rule.step_scalars):
        wanted = ", ".join(rule.step_scalars) or "none"
        raise PSSettingsError(f"{rule.name} takes the step scalars: {wanted}; got {tuple(given)!r}")
    with np.errstate(over="ignore"):
        lead = [*(given or _powers(config, learning_rate, step, dtype))]
        if not isinstance(config, Adam):  # whose alpha contains the rate
            lead.insert(0, learning_rate)
        if isinstance(config, Ftrl):
            lead.append(_ftrl_l2(config, learning_rate, dtype))
        return np.array((*lead, *rule.constants, *decay_scalars(config, learning_rate)), dtype)


def decay_scalars(config: RuleConfig, learning_rate: float) -> tuple[float, ...]:
    """Return the last scalars of a rule that decays; none of others.

    Args:
        config: the rule.
        learning_rate: learning rate of this step.
    """
    if not isinstance(config, Descent) or not config.weight_decay:
        return ()
    return single(config.weight_decay), learning_rate


def step_scalars(
    config: RuleConfig, group: str, hyper: Hyper, step: int, dtype: np.dtype[Any]
) -> Array:
    """Return `scalars` for a push to a group of the manifest.

    Args:
        config: the group's rule.
        group: its name, for messages.
        hyper: the push's hyper-parameters.
        step: number of the update, from 1.
        dtype: dtype of the group.

    Raises:
        PSSettingsError: `hyper.scalars` does not fit the rule.
    """
    given = (hyper.scalars or {}).get(group, ())
    try:
        return scalars(config, hyper.learning_rate, step, dtype, given)
    except PSSettingsError as error:
        raise PSSettingsError(f"group {group!r}: {error.message}") from None
