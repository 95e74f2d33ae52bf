"""How many ranks a run has if its caller names no number, and what a lost rank costs. No Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfos.config import ClusterConfig, Restarts
from tfos.errors import NoResultError, SettingsError
from tfos.runner import spark_run
from tfos.runner.rank_process import RankWork, run_rank
from tfos.spark.pickling import pickle_value


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


@pytest.mark.parametrize("num_proc", [True, 0, -1, 2.0, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(num_proc):
    with pytest.raises(SettingsError, match=rf"num_proc must .* from 1, got {num_proc!r}"):
        spark_run._count(num_proc, None)


class Conf(dict[str, str]):
    """Of Spark."""

    def contains(self, key: str) -> bool:
        return key in self


class Played:
    """A cluster whose ranks have ended, with a value or without."""

    def __init__(self, values: dict[int, Any]) -> None:
        self.values = {rank: pickle_value(value, "a rank") for rank, value in values.items()}
        self.config = ClusterConfig()

    def reserve(self, _sc: Any, _size: int, _ps: int, *, config: ClusterConfig, **_: Any) -> Any:
        self.config = config
        return self

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, *_: object) -> None:
        pass

    def shutdown(self, *, timeout: float | None) -> None:
        assert timeout is None

    def handed_over(self) -> dict[int, bytes]:
        return self.values


def played(monkeypatch: pytest.MonkeyPatch, values: dict[int, Any], count: int) -> Played:
    cluster = Played(values)
    monkeypatch.setattr(spark_run, "TFCluster", cluster)
    given = ClusterConfig(tolerate_lost_workers=True, restarts=Restarts(workers=3), slot_wait_s=7.0)
    work = RankWork(int, (), {})
    found = spark_run.run_work(run_rank, work, count, None, given, timeout_s=None)
    assert found == [values[rank] for rank in range(count)]
    return cluster


def test_a_lost_rank_ends_a_run_whatever_the_users_settings_say_of_workers(monkeypatch):
    config = played(monkeypatch, {1: "b", 0: "a"}, 2).config
    assert not config.tolerate_lost_workers
    assert config.restarts.workers == 0
    assert config.slot_wait_s == 7.0


def test_ranks_without_a_value_are_named(monkeypatch):
    with pytest.raises(NoResultError, match="ranks 1, 3 of 4 ended without a value"):
        played(monkeypatch, {0: 0, 2: 2}, 4)
