"""Lone fit: which model a running `fit` trains, and whether it is distributed.

Covers: finding the model behind Keras' request for batches.
Does not: decide what to do about it (tfos.worker.context).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType

import keras


def is_lone_fit() -> bool:
    """Return whether the caller serves `fit` of a model that is not distributed."""
    # Keras asks an adapter for batches in the same words for fit, evaluate and predict.
    fit = inspect.unwrap(keras.Model.fit).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is fit:
            return "_tfos_trainer" not in vars(frame.f_locals["self"])
        frame = frame.f_back
    return False
