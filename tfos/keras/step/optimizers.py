"""Optimizers: from a Keras optimizer to the servers' update rule, and the scalars of one step.

Covers: which optimizers and settings have a rule; the rule's configuration; learning rate and the
scalars with powers of the step as TensorFlow computes them, so that a sync worker equals Keras bit
for bit; clipping that belongs to the worker.
Does not: apply anything.      Threads: no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import msgspec

from ps.manifest import manifest
from tfos.errors import UnsupportedOptimizer

SUPPORTED = (
    "SGD, Adagrad, RMSprop, Adadelta, Adam, AdamW, Adamax, Nadam, Ftrl, Lion, with all their "
    "settings"
)
_SLICES = "but a server holds slices of parameters"
_WITHOUT_RULE = {
    "Adafactor": (
        f"keeps sums over the rows and columns of each matrix, {_SLICES}",
        "Adam or Adagrad",
    ),
    "Lamb": (f"scales each update by the norm of its whole parameter, {_SLICES}", "AdamW"),
    "MultiOptimizer": (
        "has an optimizer per variable, but the servers follow one for all variables",
        "one of its optimizers",
    ),
    "Muon": (f"orthogonalizes the update of each whole matrix, {_SLICES}", "AdamW or Lion"),
    "ScheduleFreeAdamW": (
        "keeps values to evaluate with beside those to train, but no rule of the servers does",
        "AdamW with use_ema=True",
    ),
}


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer that updates: the inner one of a LossScaleOptimizer, else itself."""
    return optimizer.inner_optimizer if is_scaled(optimizer) else optimizer


def is_scaled(optimizer: Any) -> bool:
    """Whether a loss scale is searched. By exact class, as `_RULES`."""
    return type(optimizer) is keras.optimizers.LossScaleOptimizer


def check(optimizer: Any) -> None:
    """Refuse an optimizer, or a setting of one, that the servers cannot follow.

    Raises:
        UnsupportedOptimizer: names the optimizer or the setting, and alternatives.
    """
    inner = unwrap(optimizer)
    kind = type(inner).__name__
    if type(inner) not in _RULES:
        raise UnsupportedOptimizer(
            f"the parameter servers have no update rule for {kind}{_reason(kind)}; compile the "
            f"model with one of: {SUPPORTED}"
        )
    if inner.use_ema and batches_per_update(inner) > 1:
        raise UnsupportedOptimizer(
            f"{kind}(use_ema=True, gradient_accumulation_steps={batches_per_update(inner)}): Keras "
            "updates the averages at every batch, but the servers see one push for all of them; "
            "drop one of the two"
        )
    if inner.built and int(inner.iterations) > 0:
        raise UnsupportedOptimizer(
            f"the {kind} optimizer has already made {int(inner.iterations)} steps, and its slots "
            "cannot be moved to the servers; compile the model again, then distribute it: its "
            "weights stay, and new slots begin at zero steps"
        )


def _reason(kind: str) -> str:
    if kind not in _WITHOUT_RULE:
        return ""
    why, instead = _WITHOUT_RULE[kind]
    return f", which {why} (use {instead})"


def keeps_averages(optimizer: Any) -> bool:
    """Whether the servers keep moving averages of the weights."""
    return bool(unwrap(optimizer).use_ema)


def give_slots(model: Any) -> None:
    """Create the (fresh) slots of a model's optimizer, as Keras does at the first step."""
    inner = unwrap(model.optimizer)
    if len(inner._trainable_variables) == len(model.trainable_variables):
        return
    inner.built = False
    inner.build(model.trainable_variables)


def batches_per_update(optimizer: Any) -> int:
    """Return the number of batches per update; more than 1 if the optimizer accumulates."""
    return unwrap(optimizer).gradient_accumulation_steps or 1


def moves_without_gradient(optimizer: Any) -> bool:
    """Whether the rule changes a value whose gradients were all zero, without weight decay."""
    inner = unwrap(optimizer)
    return isinstance(inner, keras.optimizers.Ftrl) or getattr(inner, "epsilon", None) == 0


def keeps_without_gradient(optimizer: Any) -> bool:
    """Whether a gradient of zeros changes neither value nor slots, whatever came before it.

    Momentum and means of squares go on. A sum of batches would count one as Keras does not.
    """
    inner = unwrap(optimizer)
    is_plain = isinstance(inner, keras.optimizers.SGD) and not inner.momentum
    is_sum = isinstance(inner, keras.optimizers.Adagrad)
    return (is_plain or is_sum) and batches_per_update(inner) == 1


def damps_itself(optimizer: Any) -> bool:
    """Whether each gradient lowers the rate of later ones, so that stale ones do little harm.

    Adagrad and Ftrl divide by the root of all squares so far. See decision 009.
    """
    return isinstance(unwrap(optimizer), keras.optimizers.Adagrad | keras.optimizers.Ftrl)


def check_staleness_aware(optimizer: Any) -> None:
    """Refuse an optimizer whose values, not only its steps, follow from the learning rate.

    Raises:
        UnsupportedOptimizer: the text says what happens, and what to do.
    """
    if isinstance(unwrap(optimizer), keras.optimizers.Ftrl):
        raise UnsupportedOptimizer(
            "staleness_aware=True with Ftrl: its values follow from its slots and the rate of the "
            "last push, so a gradient of staleness s would divide them by about 1 + s, and the "
            "next fresh one would multiply them again. Omit staleness_aware: Ftrl's rate falls "
            "on its own"
        )


def rule_of(optimizer: Any, *, consistency: str, decays: bool) -> manifest.RuleConfig:
    """Return the servers' rule for a checked optimizer.

    Args:
        optimizer: the model's optimizer, wrapped or not.
        consistency: "sync" and "hybrid" leave clipping to the servers, because it acts on the mean.
        decays: whether the optimizer's weight decay acts on these variables.
    """
    inner = unwrap(optimizer)
    descent: dict[str, Any] = {"weight_decay": None}
    if decays and inner.weight_decay is not None:
        descent["weight_decay"] = float(inner.weight_decay)
    if inner.use_ema:
        descent["ema_momentum"] = float(inner.ema_momentum)
        descent["ema_overwrite_frequency"] = inner.ema_overwrite_frequency or None
    if consistency in ("sync", "hybrid"):
        for name in ("clipvalue", "clipnorm", "global_clipnorm"):
            limit = getattr(inner, name)
            descent[name] = float(limit) if limit else None
    return _kind(inner)(**_own_settings(inner), **descent)


def _kind(inner: Any) -> type[manifest.RuleConfig]:
    return manifest.AMSGrad if getattr(inner, "amsgrad", False) else _RULES[type(inner)]


def _own_settings(inner: Any) -> dict[str, Any]:
    """Return the settings that only this rule has; Keras uses the same names."""
    shared = set(manifest.Descent.__struct_fields__)
    return {
        field.name: type(field.default)(getattr(inner, field.name))
        for field in msgspec.structs.fields(_kind(inner))
        if field.name not in shared
    }


# By exact class: a subclass may compute something else in update_step.
_RULES: dict[type, type[manifest.RuleConfig]] = {
    keras.optimizers.SGD: manifest.SGD,
    keras.optimizers.Adagrad: manifest.Adagrad,
    keras.optimizers.RMSprop: manifest.RMSprop,
    keras.optimizers.Adadelta: manifest.Adadelta,
    keras.optimizers.Adam: manifest.Adam,
    keras.optimizers.AdamW: manifest.AdamW,
    keras.optimizers.Adamax: manifest.Adamax,
    keras.optimizers.Nadam: manifest.Nadam,
    keras.optimizers.Ftrl: manifest.Ftrl,
    keras.optimizers.Lion: manifest.Lion,
}


def step_scalars(optimizer: Any, dtypes: Sequence[str]) -> list[Any]:
    """Return scalar tensors: the learning rate, then per dtype the rule's step scalar, if any.

    Called inside the compiled step. The order of operations is that of keras.optimizers, so
    TensorFlow rounds (and takes powers) exactly as in a local step.

    Args:
        optimizer: the model's optimizer.
        dtypes: the dtypes of the groups of trainable variables.
    """
    import tensorflow as tf
    from keras import ops

    inner = unwrap(optimizer)
    learning_rate = inner.learning_rate
    found = [tf.cast(ops.convert_to_tensor(learning_rate), tf.float64)]
    for dtype in dtypes:
        if isinstance(inner, keras.optimizers.Adam):
            found.append(tf.cast(_adam_alpha(inner, dtype), tf.float64))
        elif isinstance(inner, keras.optimizers.Adamax):
            found.append(tf.cast(1 - _power(inner, inner.beta_1, dtype), tf.float64))
    return found


def _adam_alpha(inner: Any, dtype: str) -> Any:
    from keras import ops

    rate = ops.cast(inner.learning_rate, dtype)
    rest_1, rest_2 = (1 - _power(inner, beta, dtype) for beta in (inner.beta_1, inner.beta_2))
    return rate * ops.sqrt(rest_2) / rest_1


def _power(inner: Any, beta: float, dtype: str) -> Any:
    from keras import ops

    return ops.power(ops.cast(beta, dtype), ops.cast(inner.iterations + 1, dtype))
