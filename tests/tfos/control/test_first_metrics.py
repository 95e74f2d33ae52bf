"""Which of many metrics are kept: the losses among them, in their order."""

from __future__ import annotations

import pytest

from tfos.control.first_metrics import first_metrics

METRICS = dict.fromkeys(("a", "b", "loss", "val_a", "val_b", "val_loss"), 0.5)


@pytest.mark.parametrize(
    ("most", "kept"),
    [
        (9, list(METRICS)),
        (6, list(METRICS)),
        (3, ["a", "loss", "val_loss"]),
        (1, ["loss"]),
        (0, []),
    ],
)
def test_the_losses_stay_and_the_order_too(most, kept):
    assert list(first_metrics(METRICS, most)) == kept


def test_a_metric_that_is_wanted_stays_where_it_is_if_it_is_there():
    assert list(first_metrics(METRICS, 3, "val_b")) == ["loss", "val_b", "val_loss"]
    assert list(first_metrics(METRICS, 2, "other")) == ["loss", "val_loss"]


def test_there_may_be_no_loss():
    assert list(first_metrics({"a": 1, "b": 2}, 1)) == ["a"]
