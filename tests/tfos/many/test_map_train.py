"""What map_train refuses before anything starts."""

from __future__ import annotations

import types
from typing import Any

import pytest

import tfos
from tests.support.fake_spark import FakeSpark
from tfos.errors import ConfigError, SettingsError


@pytest.mark.fault("F22")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("spark.speculation", "true", "ends the first and trains its items again. Set it to false"),
        ("spark.executor.pyspark.memory", "2g", "RLIMIT_AS.*2048 MiB.*Unset it and set"),
        ("spark.python.worker.killOnIdleTimeout", "true", "Set .*killOnIdleTimeout=false"),
    ],
)
def test_settings_of_spark_under_which_slots_are_doubled_or_die_are_refused(
    name, value, text, monkeypatch
):
    spark: Any = FakeSpark()
    spark.master = "yarn"
    idle = ("spark.python.worker.idleTimeoutSeconds", "60")
    spark.getConf = lambda: types.SimpleNamespace(getAll=lambda: [(name, value), idle])

    def started(*_):
        raise AssertionError("the run starts")

    monkeypatch.setattr("tfos.many.map_train._started", started)
    with pytest.raises(ConfigError, match=rf"{name}={value}.*{text}"):
        tfos.map_train([1], abs, sc=spark)


@pytest.mark.parametrize(
    ("items", "text"),
    [
        ("text", r"list of items.*grouped DataFrame \(df\.groupBy\(\.\.\.\)\), got str"),
        (None, "got NoneType"),
        (object(), "got object"),
    ],
)
def test_what_is_no_set_of_items_is_told_before_the_functions_arguments(items, text):
    """A DataFrame that is not grouped comes with a function of (key, rows), which is right."""
    spark: Any = FakeSpark()
    with pytest.raises(SettingsError, match=f"^items .*{text}"):
        tfos.map_train(items, lambda key, rows: 0, sc=spark)
