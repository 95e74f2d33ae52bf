"""Running fit: the model that a running `fit` trains, its class weights, epochs and callbacks.

Covers: finding the call behind Keras' request for batches, `evaluate` and `predict` included;
whether a model trains alone.
Does not: decide what to do about it (tfos.worker.context, class_weights).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import keras

KERAS_FIT = inspect.unwrap(super(keras.Model, keras.Model).fit)
"""Keras' own function, also where a program has replaced `keras.Model.fit`."""
KERAS_EVALUATE = inspect.unwrap(super(keras.Model, keras.Model).evaluate)
KERAS_PREDICT = inspect.unwrap(super(keras.Model, keras.Model).predict)
_STEPS = {
    KERAS_FIT.__code__: "train_step",
    KERAS_EVALUATE.__code__: "test_step",
    KERAS_PREDICT.__code__: "predict_step",
}
"""The method of a model that each loop calls with a batch."""


@dataclass(frozen=True, slots=True)
class KerasLoop:
    """A call of Keras' own `fit`, `evaluate` or `predict` over some data."""

    model: Any
    step: str
    """Name of the model's method that gets the batches."""


@dataclass(frozen=True, slots=True)
class RunningFit:
    """A call of Keras' own `fit`."""

    model: Any
    is_lone: bool
    """Whether its model is not distributed, or only to a server in this process."""
    x: Any
    """Data that it trains on."""
    class_weight: Any
    initial_epoch: int
    epochs: int
    steps_per_epoch: int | None
    callbacks: Any
    """Keras' CallbackList from `on_train_begin` on; before, the callbacks given to the call."""
    is_last_epoch: bool
    """Whether its running epoch is its last; before the first, whether it has only one."""
    has_batches: bool = False
    """Whether it has already asked for its own batches."""
    measures: bool = False
    """Whether the caller serves an `evaluate` or `predict` inside of it."""
    predicts: bool = False
    """Whether the caller serves a `predict` inside of it."""
    validation_data: Any = None
    validation_steps: int | None = None
    measured_steps: int | None = None
    """`steps` of the `evaluate` or `predict` inside of it that the caller serves."""


def is_lone(model: keras.Model) -> bool:
    """Return whether a model is not distributed, or only to a server in this process."""
    trainer = vars(model).get("_tfos_trainer")
    return trainer is None or trainer.is_local


def running_fit() -> RunningFit | None:
    """Return the innermost `fit` that the caller serves, or None."""
    # Keras asks an adapter for batches in the same words for fit, evaluate and predict, and without
    # the class weights.
    frame: FrameType | None = sys._getframe(1)
    measures = predicts = False
    measured = None
    while frame is not None:
        if frame.f_code is KERAS_FIT.__code__:
            found = frame.f_locals
            return RunningFit(
                found["self"],
                is_lone(found["self"]),
                found["x"],
                found["class_weight"],
                found["initial_epoch"],
                found["epochs"],
                found["steps_per_epoch"],
                found["callbacks"],
                found.get("epoch", found["initial_epoch"]) + 1 >= found["epochs"],
                has_batches="epoch_iterator" in found,
                measures=measures,
                predicts=predicts,
                validation_data=found["validation_data"],
                validation_steps=found["validation_steps"],
                measured_steps=measured,
            )
        predicts |= frame.f_code is KERAS_PREDICT.__code__
        if frame.f_code in (KERAS_EVALUATE.__code__, KERAS_PREDICT.__code__):
            measures, measured = True, frame.f_locals["steps"]
        frame = frame.f_back
    return None


def loop_over(x: Any) -> KerasLoop | None:
    """Return the innermost loop over this data that the caller serves; None: there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        step = _STEPS.get(frame.f_code)
        if step is not None and frame.f_locals["x"] is x:
            return KerasLoop(frame.f_locals["self"], step)
        frame = frame.f_back
    return None


def drop_unmeasured(logs: dict[str, Any], trained: int, validated: int) -> None:
    """Remove the metrics of no batch from an epoch's: Keras shows 0, a best one for callbacks.

    Args:
        logs: metrics by name.
        trained: number of batches or rows that the epoch has trained.
        validated: number of batches or rows of its validation.
    """
    for name in list(logs):
        if not (validated if name.startswith("val_") else trained):
            del logs[name]
