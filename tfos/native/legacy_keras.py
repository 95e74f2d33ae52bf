"""tf-keras, Keras 2, as `tf.keras`: which Keras the nodes use, and what Keras 2 programs write.

Covers: the driver's choice on the nodes, `lr=` of tf-keras' optimizers, advice if one Keras
refuses what the other one takes.
Does not: import TensorFlow or tf-keras, install anything.
Runs in: the driver and the workers' processes.

TensorFlow reads TF_USE_LEGACY_KERAS when it is imported (for `from tensorflow.keras import`), and
when `tf.keras` is first used. main_fun names classes of `tf.keras`,
so a node must have the driver's Keras before it reads main_fun.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping, MutableMapping
from types import ModuleType
from typing import Any

from tfos.native.at_import import at_import

VARIABLE = "TF_USE_LEGACY_KERAS"
_TRUE = ("1", "true", "True")
"""Values that TensorFlow reads as true."""
_PACKAGE = "tf_keras"
_OPTIMIZERS = "tf_keras.src.optimizers"
_OF_CALLBACKS = "_implements_train_batch_hooks"
"""What Keras 2's `fit` asks each callback for, and those of Keras 3 lack."""


def prefer(environment: MutableMapping[str, str], modules: Mapping[str, ModuleType]) -> None:
    """Choose Keras 2 if it is installed and nothing has been chosen yet.

    Args:
        environment: environment of this process.
        modules: modules of this process. If TensorFlow is among them and `tf.keras` was used, that
            use was the choice.
    """
    if VARIABLE in environment or _was_used(modules):
        return
    if importlib.util.find_spec(_PACKAGE) is not None:
        environment[VARIABLE] = "1"


def _was_used(modules: Mapping[str, ModuleType]) -> bool:
    tensorflow = modules.get("tensorflow")
    if tensorflow is None:
        return False
    lazy = vars(tensorflow).get("keras")
    # TensorFlow's own mark of a module that is not used yet; without it, it was used.
    waits = lazy is not None and vars(lazy).get("_tfll_initialized") is False
    return not waits or "tensorflow.keras" in modules


def follow(environment: MutableMapping[str, str], choice: str) -> None:
    """Prepare a node for the driver's Keras, before anything imports TensorFlow.

    Args:
        environment: environment of this process; what is already set stays.
        choice: the driver's TF_USE_LEGACY_KERAS; empty: not set.
    """
    if choice:
        environment.setdefault(VARIABLE, choice)
    if environment.get(VARIABLE) in _TRUE:
        honour_lr()


def advice(error: BaseException) -> str:
    """Return the advice where one Keras does not say that the other one is needed; else nothing.

    Keras 3's `fit` under several workers of a strategy only says that a conversion fails. Keras 2's
    `fit` only says that a callback of Keras 3 lacks an attribute.

    Args:
        error: error of main_fun.
    """
    if isinstance(error, AttributeError) and error.name == _OF_CALLBACKS:
        return (
            ". This model is of Keras 2: pass callbacks of tf_keras only; those of ctx.callbacks() "
            "are of Keras 3. One of tf_keras may call ctx.report_progress(step, rows) in "
            "on_epoch_end"
        )
    if not isinstance(error, ValueError) or "values.PerReplica" not in str(error):
        return ""
    return (
        ". Keras 3 does not fit under this strategy of TensorFlow; Keras 2 does: install tf-keras, "
        f"and set {VARIABLE}=1 at the driver. Or train on parameter servers: ctx.distribute(model)"
    )


def honour_lr() -> None:
    """Let `lr=` of tf-keras' optimizers set the learning rate again; idempotent.

    tf-keras ignores it with a line in the log, and trains with 0.001.
    """
    at_import(_OPTIMIZERS, _take_lr)


def _take_lr(module: ModuleType) -> None:
    kinds = [module.base_optimizer.Optimizer]
    while kinds:
        found = kinds.pop().__subclasses__()
        kinds += found
        for kind in found:
            _take_lr_in(kind)


def _take_lr_in(kind: Any) -> None:
    plain = vars(kind).get("__init__")
    if plain is None or hasattr(plain, "takes_lr"):
        return

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "lr" in kwargs:
            kwargs["learning_rate"] = kwargs.pop("lr")
        plain(self, *args, **kwargs)

    init.takes_lr = True  # type: ignore[attr-defined]
    kind.__init__ = init
