"""Launch of a run: what it counts, what it restores, what a failed one leaves."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.fake_spark import FakeSpark
from tfos.console.console import Console
from tfos.errors import NotEnoughSlots, SettingsError
from tfos.many.items import items_of
from tfos.many.launch import (
    RunOptions,
    RunPlace,
    RunWork,
    _restore,
    _seen_from_here,
    listed_work,
    start,
)
from tfos.many.queue import TrainingQueue
from tfos.many.results import ResultHead, ResultsDirectory
from tfos.spark.facts import SparkFacts


def test_an_older_result_of_the_item_does_not_hide_that_the_new_one_is_elsewhere(tmp_path):
    results = ResultsDirectory(f"file://{tmp_path}")
    old = ResultHead(item="a", seconds=1.5, metrics={}, digest="1")
    results.write(0, old, b"")
    with pytest.raises(SettingsError, match="a result there that the driver does not see"):
        _seen_from_here(results, {0: old})(0)
    with pytest.raises(SettingsError, match="that the driver does not see"):
        _seen_from_here(results, {})(1)
    results.write(0, ResultHead(item="a", seconds=1.5, metrics={}, digest="2"), b"")
    _seen_from_here(results, {0: old})(0)


def place(spark: Any, **conf: str) -> RunPlace:
    facts = SparkFacts(
        master="local[2]",
        app_name="",
        conf={"spark.driver.host": "127.0.0.1", **conf},
        default_fs="file:///",
        application_id="",
        ui_url="",
    )
    return RunPlace(spark, facts, Console(enabled=False), 0.1)


def test_a_start_that_fails_leaves_no_server_and_no_broadcast():
    spark = FakeSpark()
    made: list[Any] = []
    gone: list[Any] = []

    class Broadcast:
        def destroy(self):
            gone.append(self)

    def broadcast(value):
        if len(made) == 2:
            raise RuntimeError("no space left on device")
        made.append(Broadcast())
        return made[-1]

    spark.broadcast = broadcast  # type: ignore[attr-defined]
    work = listed_work(items_of([1, 2]), with_digests=False)
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="no space left"):
        start(place(spark), work, RunOptions(2, 0, None, b""), 2, None)
    assert gone == made
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
        assert not thread.is_alive()


def test_slots_are_asked_of_a_spark_that_makes_executors_for_jobs_alone():
    spark = FakeSpark(slots=0)
    dynamic = {"spark.dynamicAllocation.enabled": "true"}
    assert place(spark, **dynamic).count_slots(3) == 3
    with pytest.raises(SettingsError, match=r"enabled=true has left no executor: pass slots=N"):
        place(spark, **dynamic).count_slots(None)
    with pytest.raises(NotEnoughSlots, match="no executor has registered within 0 s"):
        place(spark).count_slots(3)


def test_items_that_have_changed_are_not_taken_as_done(tmp_path):
    results = ResultsDirectory(f"file://{tmp_path}")
    before, now = (
        listed_work(items_of(given), with_digests=True)
        for given in ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 9}])
    )
    for number, name in enumerate(before.names):
        head = ResultHead(item=name, seconds=1.0, metrics={}, digest=before.digests[number])
        results.write(number, head, b"")
    queue = TrainingQueue(now.names, retries=0, is_durable=True)
    restored, changed = _restore(queue, results, now.digests, Console(enabled=False))
    assert (restored, list(changed)) == ([0], [1])


def test_a_start_that_finds_no_result_lets_spark_forget_the_groups(tmp_path):
    (tmp_path / "item-0000000.result").write_bytes(b"cut")
    released = []

    class Groups:
        homes = (0,)

        def release(self):
            released.append(self)

    groups: Any = Groups()
    work = RunWork(("a",), "", None, groups, ("",))
    results = ResultsDirectory(f"file://{tmp_path}")
    with pytest.raises(SettingsError, match="no result of map_train"):
        start(place(FakeSpark()), work, RunOptions(1, 0, None, b""), 1, results)
    assert released == [groups]
