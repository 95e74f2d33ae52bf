"""Whether a metric's larger values are better, by its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tfos.config import Checkpoints
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


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("loss", False),
        ("val_loss", False),
        ("digit_loss", False),
        ("val_digit_accuracy", True),
        ("val_auc_1", True),
        ("acc", True),
        ("val_mean_squared_error_12", False),
        ("mean_absolute_percentage_error", False),
        ("false_positives", False),
        ("val_true_negatives", True),
        ("lossy", None),
        ("gloss", None),
        ("val_fun", None),
        ("", None),
    ],
)
def test_names_say_the_direction(name, answer):
    assert higher_is_better(name) is answer


@pytest.mark.tf
def test_every_metric_of_keras_has_the_direction_that_keras_gives_it():
    import keras

    kinds = {n: c for n, c in vars(keras.metrics).items() if inspect.isclass(c)}
    metrics: list[Any] = [kind(**ARGUMENTS.get(name, {})) for name, kind in kinds.items()]
    known = {m.name: m._direction == "up" for m in metrics if getattr(m, "_direction", None)}
    assert len(known) > 25
    assert {name: higher_is_better(f"val_{name}") for name in known} == known


@pytest.mark.parametrize(
    ("metric", "mode", "is_highest"),
    [("val_auc", "auto", True), ("val_loss", "auto", False), ("val_fun", "max", True)],
)
def test_the_mode_overrides_the_name(metric, mode, is_highest):
    assert (
        Checkpoints(directory="/s", keep_best=metric, best_mode=mode).best_is_highest is is_highest
    )
    opposite = Checkpoints(directory="/s", keep_best=metric, best_mode="min")
    assert not opposite.best_is_highest
