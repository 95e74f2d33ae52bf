"""How many ranks a run has if its caller names no number. No Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfos.runner import spark_run


@pytest.mark.parametrize(
    ("conf", "count"),
    [
        ({}, 8),
        ({"spark.task.cpus": "3"}, 2),
        ({"spark.task.cpus": "16"}, 1),
        ({"spark.task.cpus": "3", "spark.default.parallelism": "8"}, 8),
    ],
)
def test_a_run_without_a_number_has_a_rank_per_task_of_all_cores(monkeypatch, conf, count):
    """Spark's own number counts cores."""
    monkeypatch.setattr(spark_run, "run_work", lambda main_fun, work, count, *_, **__: [count])
    sc: Any = SimpleNamespace(defaultParallelism=8, getConf=lambda: Conf(conf))
    found = spark_run.run(int, sc=sc)
    assert found == [count]


class Conf(dict[str, str]):
    """Of Spark."""

    def contains(self, key: str) -> bool:
        return key in self
