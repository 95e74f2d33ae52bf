"""Update rules as scalar formulas: one element in, one element out.

Covers: the formulas, their slots and the scalars that one step needs.      Does not: loop over
arrays (ps.kernels compiles these functions into fused loops), lock, or know Keras.
Pure; no numba here, so that clients may import it.

Every formula repeats the order of float operations of keras.optimizers 3.15 on the TensorFlow
backend, each operation rounded by itself, because that makes one worker equal to Keras bit for bit.
A formula takes the pushed element g, the value v, its slots, then the step's scalars, all of the
group's dtype, and returns the new value and slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ps.errors import SettingsError
from ps.params import SGD, Adagrad, Adam, Average, Descent, Hyper, RuleConfig

Scalar = Any
"""One element: a numpy scalar when called from Python, a machine float inside a kernel."""


def sgd(g: Scalar, v: Scalar, learning_rate: Scalar) -> Scalar:
    """`v -= g * learning_rate`.

    Slots: none.
    Source: Robbins and Monro, A Stochastic Approximation Method, 1951. No departures.
    """
    return v - g * learning_rate


def momentum(
    g: Scalar, v: Scalar, m: Scalar, learning_rate: Scalar, beta: Scalar
) -> tuple[Scalar, Scalar]:
    """`m = m * beta - g * learning_rate; v += m`.

    Slots: m, the shape of v, starts at 0.
    Source: Polyak, Some methods of speeding up the convergence of iteration methods, 1964.
    Departure, as in Keras: the learning rate is inside m, so a change of it acts with delay.
    """
    m = m * beta - g * learning_rate
    return v + m, m


def nesterov(
    g: Scalar, v: Scalar, m: Scalar, learning_rate: Scalar, beta: Scalar
) -> tuple[Scalar, Scalar]:
    """`m = m * beta - g * learning_rate; v += m * beta - g * learning_rate`.

    Slots: m, the shape of v, starts at 0.
    Source: Sutskever et al., On the importance of initialization and momentum, ICML 2013. As in
    Keras the gradient is the one at v, and the look-ahead is in the update.
    """
    step = g * learning_rate
    m = m * beta - step
    return v + (m * beta - step), m


def adagrad(
    g: Scalar, v: Scalar, a: Scalar, learning_rate: Scalar, epsilon: Scalar
) -> tuple[Scalar, Scalar]:
    """`a += g * g; v -= learning_rate * g / sqrt(a + epsilon)`.

    Slots: a, the shape of v, starts at `initial_accumulator_value`.
    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, JMLR 2011.
    Departures: as in Keras epsilon stands inside the root. In compiled functions TensorFlow takes
    x * rsqrt(y) by an approximation of the CPU at hand for x / sqrt(y), so parity is 2 ulp of the
    update there; eager Keras is equal bit for bit.
    """
    a = a + g * g
    return v - (learning_rate * g) / np.sqrt(a + epsilon), a


def adam(  # noqa: PLR0913 - the operands of the formula
    g: Scalar,
    v: Scalar,
    m: Scalar,
    u: Scalar,
    alpha: Scalar,
    rate_1: Scalar,
    rate_2: Scalar,
    epsilon: Scalar,
) -> tuple[Scalar, Scalar, Scalar]:
    """`m += (g - m) * rate_1; u += (g*g - u) * rate_2; v -= m * alpha / (sqrt(u) + epsilon)`.

    With rate_i = 1 - beta_i and alpha = learning_rate * sqrt(1 - beta_2^t) / (1 - beta_1^t), where
    t counts steps from 1.

    Slots: m and u, the shape of v, start at 0.
    Source: Kingma and Ba, Adam, ICLR 2015; epsilon is the "epsilon hat" of its section 2, as in
    Keras. Departure: t counts the updates of a bucket, which are the steps unless pushes of it
    were refused.
    """
    m = m + (g - m) * rate_1
    u = u + (g * g - u) * rate_2
    return v - (m * alpha) / (np.sqrt(u) + epsilon), m, u


def decay(v: Scalar, weight_decay: Scalar, learning_rate: Scalar) -> Scalar:
    """`v -= v * (weight_decay * learning_rate)`, before the rule's own update.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019. As in Keras
    every optimizer takes it, and AdamW is Adam with it. Departures: no parameter is excluded; Keras
    writes (v * weight_decay) * learning_rate, which TensorFlow's graph optimizer turns into this,
    except for parameters of shape (), where the last bit may differ.
    """
    return v - v * (weight_decay * learning_rate)


def average(p: Scalar, v: Scalar, num_pushers: Scalar) -> Scalar:
    """`v += (p - v) / num_pushers`, a running mean over the statistics p that workers push.

    With one pusher, and in sync mode where p already is the mean, ps.dense copies: v = p exactly.
    Slots: none.  Source: exponential moving average; Keras has no counterpart.
    """
    return v + (p - v) / num_pushers


def add(p: Scalar, v: Scalar) -> Scalar:
    """`v += p`.

    Slots: none.  Source: Smola and Narayanamurthy, An Architecture for Parallel Topic Models, 2010.
    """
    return v + p


@dataclass(frozen=True, slots=True)
class Rule:
    """What a formula needs around it."""

    name: str
    """Names the formula here and its loop in ps.kernels."""
    slots: tuple[str, ...] = ()
    """Arrays of the values' shape and dtype that stay with the values on the server."""
    slot_init: float = 0.0
    step_scalars: tuple[str, ...] = ()
    """Scalars that change with the step and may come with the push (`Hyper.scalars`)."""
    constants: tuple[float, ...] = ()
    """Scalars of the formula after the first, in double precision; cast to the dtype on use."""


def _single(setting: float) -> float:
    """Round a setting as Keras does, which passes these through float32 for float64 too."""
    return float(np.float32(setting))


def rule_of(config: RuleConfig) -> Rule:
    """Return the rule that a configuration means."""
    if isinstance(config, Adam):  # and AdamW
        rates = (1 - config.beta_1, 1 - config.beta_2, config.epsilon)
        return Rule("adam", ("momentum", "velocity"), step_scalars=("alpha",), constants=rates)
    if isinstance(config, Adagrad):
        initial = _single(config.initial_accumulator_value)
        return Rule("adagrad", ("accumulator",), initial, constants=(config.epsilon,))
    if isinstance(config, SGD):
        if config.momentum == 0:
            return Rule("sgd")
        name = "nesterov" if config.nesterov else "momentum"
        return Rule(name, ("momentum",), constants=(_single(config.momentum),))
    return Rule("average" if isinstance(config, Average) else "add")


def adam_alpha(config: Adam, learning_rate: float, step: int, dtype: np.dtype[Any]) -> Scalar:
    """Return Adam's step size, rounded after each operation in `dtype` as Keras does.

    The powers are taken in double precision and rounded once, as the C library's powf does; where
    TensorFlow's differs in the last bit of a power, alpha differs too.
    """
    number = dtype.type
    one = number(1)
    power_1 = number(math.pow(_single(config.beta_1), step))
    power_2 = number(math.pow(_single(config.beta_2), step))
    return number(learning_rate) * np.sqrt(one - power_2) / (one - power_1)


def decay_scalars(
    config: RuleConfig, hyper: Hyper, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any] | None:
    """Return (weight decay, learning rate) for the rules that decay, else None."""
    weight_decay = config.weight_decay if isinstance(config, Descent) else None
    if not weight_decay:
        return None
    return np.array((_single(weight_decay), hyper.learning_rate), dtype)


def step_scalars(
    config: RuleConfig, group: str, hyper: Hyper, step: int, dtype: np.dtype[Any]
) -> np.ndarray[Any, Any]:
    """Return the scalars of one step in the order in which the rule's formula takes them.

    Args:
        config: the group's rule.
        group: its name, the key into `hyper.scalars`.
        hyper: what came with the push.
        step: this update's number, from 1; used only where `hyper` brings no scalars.
        dtype: the group's dtype.

    Returns:
        1-d array of `dtype`; empty for the rules that take none (average, add).

    Raises:
        SettingsError: `hyper.scalars` has another number of scalars than the rule.
    """
    rule = rule_of(config)
    if rule.name in ("average", "add"):
        return np.empty(0, dtype)
    given = (hyper.scalars or {}).get(group, ())
    if given and len(given) != len(rule.step_scalars):
        wanted = ", ".join(rule.step_scalars) or "none"
        raise SettingsError(
            f"group {group!r} ({rule.name}) takes the step scalars: {wanted}; got {given!r}"
        )
    lead: Scalar = hyper.learning_rate
    if given:
        lead = given[0]
    elif isinstance(config, Adam):
        lead = adam_alpha(config, hyper.learning_rate, step, dtype)
    return np.array((lead, *rule.constants), dtype)
