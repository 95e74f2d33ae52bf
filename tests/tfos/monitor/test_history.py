"""History as users read it: columns, gaps, text."""

from __future__ import annotations

import math

import pytest

from tfos.control.messages import EpochTrained
from tfos.monitor.history import History, history_of
from tfos.monitor.reports import EpochReport, TrainReport

EPOCHS = history_of(
    [
        EpochTrained(1, 0, {"loss": 0.5}, steps=10, rows=100, seconds=2.0, feed="input"),
        EpochTrained(1, 1, {"loss": 0.25, "val_loss": 0.75}, steps=12, rows=100, seconds=1.5),
    ]
)


def test_columns_have_one_value_per_epoch_and_nan_where_there_was_none():
    assert EPOCHS["loss"] == [0.5, 0.25]
    gap, value = EPOCHS["val_loss"]
    assert (math.isnan(gap), value) == (True, 0.75)
    assert list(EPOCHS) == ["loss", "val_loss", "seconds", "steps", "rows"]
    assert {len(column) for column in dict(EPOCHS).values()} == {2}
    assert (EPOCHS["seconds"], EPOCHS["steps"], EPOCHS["rows"]) == ([2.0, 1.5], [10, 12], [100] * 2)


def test_a_metric_called_like_a_number_of_ours_is_the_metric():
    history = history_of([EpochTrained(1, 0, {"steps": 0.5}, steps=7)])
    assert history["steps"] == [0.5]
    assert list(history) == ["steps", "seconds", "rows"]


def test_a_column_that_is_not_there_names_those_there_are():
    with pytest.raises(KeyError, match="'val_los' is not in loss, val_loss, seconds, steps, rows"):
        EPOCHS["val_los"]
    with pytest.raises(KeyError, match="no columns: no epoch has ended"):
        History()["loss"]


def test_a_history_is_empty_only_without_epochs_and_prints_from_1():
    assert not History()
    assert str(History()) == "no epoch of fit has ended"
    assert str(EPOCHS).splitlines() == [
        "fit 1, epoch 1: loss 0.5; 10 steps in 2.0 s",
        "fit 1, epoch 2: loss 0.25, val_loss 0.75; 12 steps in 1.5 s",
    ]


def test_a_notebook_shows_a_table_in_which_names_are_text():
    shown = history_of([EpochTrained(1, 0, {"<b>": 0.5})])._repr_html_()
    assert "&lt;b&gt;" in shown
    assert ">0.5<" in shown
    assert "no epoch of fit has ended" in History()._repr_html_()


def test_a_train_report_without_fit_has_an_empty_history():
    report = TrainReport((EpochReport("input", 0, 1, 1, 0, 0, 1.0),))
    assert not report.history
