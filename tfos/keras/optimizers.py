"""From a Keras optimizer to the servers' update rule, and the scalars of one step.

Covers: which optimizers and settings have a rule; the rule's configuration; learning rate and
Adam's alpha as TensorFlow computes them, so that a sync worker equals Keras bit for bit; clipping
that belongs to the worker.
Does not: apply anything.      Threads: no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from ps import params
from tfos.keras.errors import UnsupportedOptimizer

SUPPORTED = (
    "SGD (with momentum and nesterov), Adagrad, Adam, AdamW, each with weight_decay, clipvalue, "
    "clipnorm, global_clipnorm and learning-rate schedules"
)


def unwrap(optimizer: Any) -> Any:
    """Return the optimizer that updates: the inner one of a LossScaleOptimizer, else itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def check(optimizer: Any, *, consistency: str, num_workers: int) -> None:
    """Refuse an optimizer, or a setting of one, that the servers cannot follow.

    Raises:
        UnsupportedOptimizer: names the optimizer or the setting, and what is there instead.
    """
    inner = unwrap(optimizer)
    kind = type(inner).__name__
    if type(inner) not in _RULES:
        raise UnsupportedOptimizer(
            f"the parameter servers have no update rule for {kind}; compile the model with one of: "
            f"{SUPPORTED}"
        )
    refused = {
        "amsgrad": "drop amsgrad=True",
        "use_ema": "drop use_ema=True, or average checkpoints",
        "gradient_accumulation_steps": "raise the batch size instead",
    }
    for name, advice in refused.items():
        if getattr(inner, name, None):
            raise UnsupportedOptimizer(
                f"{kind}({name}={getattr(inner, name)!r}) is not supported by the parameter "
                f"servers; {advice}"
            )
    if inner.built and int(inner.iterations) > 0:
        raise UnsupportedOptimizer(
            f"the {kind} optimizer has already made {int(inner.iterations)} steps, and its slots "
            "cannot be moved to the servers; compile the model again, then distribute it"
        )
    if consistency == "sync" and num_workers > 1:
        for name in ("clipnorm", "global_clipnorm"):
            if getattr(inner, name):
                raise UnsupportedOptimizer(
                    f"{kind}({name}={getattr(inner, name)!r}) with {num_workers} sync workers "
                    "would clip each worker's gradient, not their mean; use clipvalue, which acts "
                    'on the mean, or consistency="async"'
                )


def rule_of(optimizer: Any, *, consistency: str, decays: bool) -> params.RuleConfig:
    """Return the servers' rule for a checked optimizer.

    Args:
        optimizer: the model's optimizer, wrapped or not.
        consistency: "sync" leaves clipping by value to the server, which sees the mean.
        decays: whether the optimizer's weight decay acts on these variables.
    """
    inner = unwrap(optimizer)
    descent: dict[str, float | None] = {"weight_decay": None, "clipvalue": None}
    if decays and inner.weight_decay is not None:
        descent["weight_decay"] = float(inner.weight_decay)
    if server_clips(inner, consistency):
        descent["clipvalue"] = float(inner.clipvalue)
    return _RULES[type(inner)](inner, descent)


def server_clips(optimizer: Any, consistency: str) -> bool:
    """Whether the server cuts the reduced gradient by value; otherwise the worker clips its own."""
    inner = unwrap(optimizer)
    by_norm = inner.clipnorm or inner.global_clipnorm
    return consistency == "sync" and not by_norm and bool(inner.clipvalue)


def _sgd(inner: Any, descent: dict[str, Any]) -> params.RuleConfig:
    return params.SGD(momentum=float(inner.momentum), nesterov=bool(inner.nesterov), **descent)


def _adagrad(inner: Any, descent: dict[str, Any]) -> params.RuleConfig:
    return params.Adagrad(
        epsilon=float(inner.epsilon),
        initial_accumulator_value=float(inner.initial_accumulator_value),
        **descent,
    )


def _adam(inner: Any, descent: dict[str, Any]) -> params.RuleConfig:
    kind = params.AdamW if type(inner) is keras.optimizers.AdamW else params.Adam
    return kind(
        beta_1=float(inner.beta_1),
        beta_2=float(inner.beta_2),
        epsilon=float(inner.epsilon),
        **descent,
    )


# By exact class: a subclass may compute something else in update_step.
_RULES: dict[type, Callable[[Any, dict[str, Any]], params.RuleConfig]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
}


def step_scalars(optimizer: Any, dtypes: Sequence[str]) -> list[Any]:
    """Return, as scalar tensors: the learning rate, then per dtype the scalars of the rule.

    To be called inside the compiled step. The order of operations is that of keras.optimizers, so
    that TensorFlow rounds (and takes powers) exactly as a local step would.

    Args:
        optimizer: the model's optimizer.
        dtypes: the dtypes of the groups of trainable variables.
    """
    import tensorflow as tf
    from keras import ops

    inner = unwrap(optimizer)
    learning_rate = inner.learning_rate
    found = [tf.cast(ops.convert_to_tensor(learning_rate), tf.float64)]
    if not has_alpha(inner):
        return found
    for dtype in dtypes:
        rate = ops.cast(learning_rate, dtype)
        step = ops.cast(inner.iterations + 1, dtype)
        power_1 = ops.power(ops.cast(inner.beta_1, dtype), step)
        power_2 = ops.power(ops.cast(inner.beta_2, dtype), step)
        alpha = rate * ops.sqrt(1 - power_2) / (1 - power_1)
        found.append(tf.cast(alpha, tf.float64))
    return found


def has_alpha(optimizer: Any) -> bool:
    """Whether the rule takes Adam's step size."""
    return isinstance(unwrap(optimizer), keras.optimizers.Adam)
