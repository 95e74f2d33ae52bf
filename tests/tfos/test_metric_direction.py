"""Whether a metric's larger values are better, by its name."""

from __future__ import annotations

import pytest

from tfos.config import Checkpoints
from tfos.metric_direction import higher_is_better


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
