"""The direction of a metric by its name, against the one that Keras gives it."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import pytest

from tfos.metric_direction import higher_is_better

ARGUMENTS: dict[str, dict[str, Any]] = {
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": 2},
    "MeanMetricWrapper": {"fn": abs},
    "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 2},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}


@pytest.mark.tf
def test_every_metric_of_keras_has_the_direction_that_keras_gives_it():
    kinds = {n: c for n, c in vars(keras.metrics).items() if inspect.isclass(c)}
    metrics: list[Any] = [kind(**ARGUMENTS.get(name, {})) for name, kind in kinds.items()]
    known = {m.name: m._direction == "up" for m in metrics if getattr(m, "_direction", None)}
    assert len(known) > 25
    assert {name: higher_is_better(f"val_{name}") for name in known} == known
