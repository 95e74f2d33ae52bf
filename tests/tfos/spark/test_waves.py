"""Jobs in waves: other jobs get a slot between them, and every partition runs once, in order."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from tfos.spark.jobs import SparkJob, TaskCounts, Waves, collect_in_order, next_size


class Slots:
    """A SparkContext that counts its executors' slots and runs partitions at once."""

    def __init__(
        self, *slots: int, held: int = 0, on_job: Callable[[], object] = lambda: None
    ) -> None:
        self._slots = slots
        self._held = held
        self._on_job = on_job
        self.jobs: list[list[int]] = []
        self._jsc = self

    def sc(self) -> Slots:
        return self

    statusStore = taskScheduler = sc

    def runningTasksByExecutors(self) -> Any:
        entry = types.SimpleNamespace(_1=lambda: "0", _2=lambda: self._held)
        waiting = [entry]
        running = types.SimpleNamespace(hasNext=lambda: bool(waiting), next=waiting.pop)
        return types.SimpleNamespace(iterator=lambda: running)

    def executorList(self, only_active: bool) -> Any:
        waiting = list(self._slots)

        def following() -> Any:
            slots, name = waiting.pop(0), str(len(self._slots) - len(waiting) - 1)
            return types.SimpleNamespace(maxTasks=lambda: slots, id=lambda: name)

        executors = types.SimpleNamespace(hasNext=lambda: bool(waiting), next=following)
        return types.SimpleNamespace(iterator=lambda: executors)

    def runJob(self, rdd: Any, function: Any, partitions: list[int]) -> list[int]:
        self.jobs.append(list(partitions))
        self._on_job()
        return list(partitions)


def rdd_of(spark: Slots, num_partitions: int) -> Any:
    return types.SimpleNamespace(ctx=spark, getNumPartitions=lambda: num_partitions)


def backwards(count: int) -> list[int]:
    return list(reversed(range(count)))


def test_every_partition_runs_once_in_the_order_named_and_a_first_wave_fills_the_slots():
    spark = Slots(2, 3)
    assert Waves(30.0).collect(rdd_of(spark, 40), backwards) == backwards(40)
    assert [len(job) for job in spark.jobs] == [5, 10, 20, 5]


def test_a_wave_that_takes_too_long_is_followed_by_smaller_ones_which_still_fill_the_slots():
    spark = Slots(2)
    Waves(1e-9).collect(rdd_of(spark, 6), backwards)
    assert [len(job) for job in spark.jobs] == [2, 2, 2]


@pytest.mark.parametrize(("held", "size"), [(0, 5), (2, 3), (9, 3)])
def test_slots_that_nodes_hold_are_not_counted(held: int, size: int):
    spark = Slots(2, 3, held=held)
    Waves(30.0).collect(rdd_of(spark, 40), backwards)
    assert len(spark.jobs[0]) == size


@pytest.mark.parametrize(
    ("took_s", "size"), [(0.0, 16), (10.0, 16), (30.0, 8), (60.0, 4), (1e6, 1)]
)
def test_waves_come_to_take_the_time_they_are_to_take(took_s: float, size: int):
    assert next_size(8, took_s, 30.0) == size


def test_tasks_of_later_waves_count_as_tasks_that_have_not_ended():
    seen: list[TaskCounts | None] = []
    waves = Waves(30.0)
    one_ended = TaskCounts(4, 1, 3)
    spark = Slots(4, on_job=lambda: seen.append(waves.tasks_with(one_ended)))
    waves.collect(rdd_of(spark, 10), backwards)
    assert seen == [TaskCounts(10, 1, 3), TaskCounts(10, 5, 3)]


def test_no_function_runs_on_what_is_collected():
    """On the rows of a DataFrame it would need a second Python process for each task."""
    collected = []

    class Context(Slots):
        def runJob(self, rdd: Any, function: Any, partitions: list[int]) -> list[int]:
            collected.append(rdd.mapPartitions(function))  # as SparkContext does
            return partitions

    rdd = rdd_of(Context(2), 2)
    rdd.mapPartitions = lambda _: "a second process"
    Waves(30.0).collect(rdd, backwards)
    collect_in_order(rdd, backwards)
    assert collected == [rdd, rdd]


def test_no_partition_is_no_job():
    spark = Slots(4)
    assert Waves(30.0).collect(rdd_of(spark, 0), backwards) == []
    assert spark.jobs == []


class Counted:
    """A SparkContext whose tracker knows two waves: each lists the shuffle, which ran once."""

    jobs: ClassVar[dict[int, list[int]]] = {1: [1, 2], 2: [3, 4]}
    stages: ClassVar[dict[int, tuple[int, int, int]]] = {
        1: (1000, 1000, 0),
        2: (4, 4, 0),
        3: (1000, 0, 0),
        4: (6, 2, 4),
    }

    def __init__(self) -> None:
        self._jsc = self

    def sc(self) -> Counted:
        return self

    def statusTracker(self) -> Counted:
        return self

    def getJobIdsForTag(self, tag: str) -> list[int]:
        return [2, 1]

    def getJobInfo(self, job: int) -> Any:
        return types.SimpleNamespace(stageIds=self.jobs[job])

    def getStageInfo(self, stage: int) -> Any:
        total, ended, active = self.stages[stage]
        return types.SimpleNamespace(numTasks=total, numCompletedTasks=ended, numActiveTasks=active)


def test_the_share_of_a_job_in_waves_behind_a_shuffle_is_that_of_all_its_tasks(monkeypatch: Any):
    monkeypatch.setattr("tfos.spark.jobs._COUNT_S", 0.0)
    counted: Any = Counted()
    waves = Waves(30.0)
    job = SparkJob[None](counted, "tag", "text", lambda: None, lambda _: None, waves)
    seen: list[TaskCounts | None] = []

    def count() -> None:
        job._ended = Ends(after=1)  # type: ignore[assignment]
        job._count_tasks()
        seen.append(job.tasks)

    waves.collect(rdd_of(Slots(4, on_job=count), 10), backwards)
    assert seen[-1] == TaskCounts(10, 6, 4)
    assert seen[-1].fraction == 0.6


class Ends:
    """An event that is set after it was waited for some times."""

    def __init__(self, after: int) -> None:
        self._answers: Iterator[bool] = iter([False] * after + [True])

    def wait(self, timeout_s: float) -> bool:
        return next(self._answers)
