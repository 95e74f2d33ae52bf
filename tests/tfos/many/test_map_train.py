"""What map_train refuses before anything starts."""

from __future__ import annotations

import types
from typing import Any

import pytest

import tfos
from tests.support.fake_spark import FakeSpark
from tfos.errors import ConfigError


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
