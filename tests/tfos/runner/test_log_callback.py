"""LogCallback: the lines of a fit's metrics."""

from __future__ import annotations

import numpy as np
import pytest

from tfos.runner import log_callback, ranks


@pytest.mark.tf
@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.25, "0.25"), (np.float32(2), "2"), (np.array([0.0, 0.5, 1.0]), "0.5"), ("best", "best")],
    ids=["one", "numpy", "per class", "text"],
)
def test_whatever_a_log_is_its_line_ends_no_training(value, shown, monkeypatch):
    """`F1Score()` has a number per class: rank 0 ended with a TypeError, unlike Keras' bar."""
    lines: list[str] = []
    monkeypatch.setattr(log_callback, "log_to_driver", lines.append)
    monkeypatch.setattr(ranks, "rank", int)
    log_callback.LogCallback(per_batch_log=True).on_batch_end(1, {"loss": 1.5, "found": value})
    assert lines == [f"epoch 1, batch 2: loss 1.5, found {shown}"]
