"""run: how many ranks there are where the call does not say so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_spark import FakeSpark
from tfos.runner.spark_run import run

PARALLELISM, TASK_CPUS = "spark.default.parallelism", "spark.task.cpus"


class SixCores(FakeSpark):
    """Reports what Spark does of six cores."""

    def __init__(self, conf: dict[str, str]) -> None:
        super().__init__()
        self.conf = conf
        self.defaultParallelism = int(conf.get(PARALLELISM, "6"))

    def getConf(self) -> Any:
        return SimpleNamespace(getAll=lambda: list(self.conf.items()))


@pytest.mark.parametrize(
    ("conf", "count"),
    [
        ({}, 6),
        ({TASK_CPUS: "2"}, 3),
        ({TASK_CPUS: "8"}, 1),
        ({TASK_CPUS: "2", PARALLELISM: "4"}, 4),
    ],
)
def test_a_run_without_a_number_takes_every_task_slot(
    conf: dict[str, str], count: int, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    monkeypatch.setattr(
        "tfos.runner.spark_run.run_work", lambda *given, **_: asked.append(given[2])
    )
    run(print, sc=SixCores(conf))
    assert asked == [count]
