"""Launch of a run: what it counts, what it restores, what a failed one leaves."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from tests.support.fake_spark import FakeSpark
from tfos.console.console import Console
from tfos.errors import ControlError, MapTrainError, NotEnoughSlots, SettingsError
from tfos.many import launch
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
from tfos.many.queue import TrainingQueue, TrainingState
from tfos.many.results import ClaimedResults, ResultHead, ResultsDirectory
from tfos.many.run import MapRun
from tfos.many.trainings import ManyTrainings
from tfos.spark.facts import SparkFacts


def work_of(given: Any) -> RunWork:
    return listed_work(items_of(given), with_digests=True)


def write(results, work, *names, **metrics):
    for name, digest in zip(work.names, work.digests, strict=True):
        if name in names:
            head = ResultHead(item=name, seconds=1.0, metrics=metrics, digest=digest)
            results.write(head, b"I1\n.")


def test_a_result_that_the_driver_does_not_see_is_refused_whatever_older_one_is_there(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(launch, "_LOOK_AGAIN_S", (0.0,))
    results = ResultsDirectory(f"file://{tmp_path}")
    write(results, work_of({"a": 1}), "a", loss=float("nan"))
    work = work_of({"a": 2, "b": 3})
    ((_, old),) = results.done("a")
    check = _seen_from_here(results, work.names, {0: old})
    for item, name in enumerate("ab"):
        with pytest.raises(SettingsError, match=f"'{name}' there, and the driver does not see it"):
            check(item)
        write(results, work, name)
        check(item)


def test_a_result_that_a_mounted_directory_shows_late_is_seen(tmp_path, monkeypatch):
    results, work = ResultsDirectory(f"file://{tmp_path}"), work_of({"a": 1})
    monkeypatch.setattr("time.sleep", lambda pause_s: write(results, work, "a"))
    _seen_from_here(results, work.names, {})(0)


def place(spark: Any, master: str = "local[2]", **conf: str) -> RunPlace:
    facts = SparkFacts(
        master=master,
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


def test_the_driver_listens_for_slots_where_the_environment_says(monkeypatch):
    work = listed_work(items_of([1, 2]), with_digests=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("TFOS_SERVER_PORT", str(port))
        with pytest.raises(ControlError, match=f"cannot listen on .*:{port} .*TFOS_SERVER_PORT"):
            start(place(FakeSpark()), work, RunOptions(2, 0, None, b""), 2, None)


def test_slots_are_asked_of_a_spark_that_makes_executors_for_jobs_alone():
    spark = FakeSpark(slots=0)
    dynamic = {"spark.dynamicAllocation.enabled": "true"}
    assert place(spark, "yarn", **dynamic).count_slots(3) == 3
    with pytest.raises(SettingsError, match=r"enabled=true has left no executor: pass slots=N"):
        place(spark, "yarn", **dynamic).count_slots(None)
    with pytest.raises(NotEnoughSlots, match="no executor has registered within 0 s"):
        place(spark).count_slots(3)


def test_items_that_have_changed_are_not_taken_as_done(tmp_path):
    results = ResultsDirectory(f"file://{tmp_path}")
    write(results, work_of([{"a": 1}, {"a": 2}]), "item 0", "item 1")
    work = work_of([{"a": 1}, {"a": 9}])
    assert restored(results, work) == ([0], [1])
    with pytest.raises(SettingsError, match=r"that of 'item 1' is of another value.*delete only"):
        restored(results, work, has_same_items=False)


def restored(results, work, *, has_same_items=True):
    queue = TrainingQueue(work.names, retries=0, is_durable=True)
    claimed = ClaimedResults(results, has_same_items)
    changed = _restore(queue, claimed, work, Console(enabled=False))
    return queue.ended_items, list(changed)


def test_a_run_with_more_items_keeps_the_results_of_those_that_were_there(tmp_path, capsys):
    results = ResultsDirectory(f"file://{tmp_path}")
    for given, count in (({"b": 1, "c": 2}, 0), ({"a": 0, "b": 1, "c": 2}, 2)):
        work = work_of(given)
        claimed = ClaimedResults(results, results.claim("f", "1", work.digest))
        queue = TrainingQueue(work.names, retries=0, is_durable=True)
        _restore(queue, claimed, work, Console())
        assert [work.names[item] for item in queue.ended_items] == list("bc")[:count]
        assert queue.count(TrainingState.DONE) == count
        write(results, work, *given)
    assert "map_train: 2 of 3 items are done" in capsys.readouterr().err
    (tmp_path / "run.json").unlink()
    assert results.claim("f", "2", "")
    assert restored(results, work_of({"0": 3, "a": 0, "b": 5, "c": 2})) == ([1, 3], [2])


def test_a_value_that_is_gone_or_replaced_is_told_with_its_path(tmp_path):
    results, work = ResultsDirectory(f"file://{tmp_path}"), work_of({"a": 1})
    write(results, work, "a")
    queue = TrainingQueue(work.names, retries=0, is_durable=True)
    _restore(queue, ClaimedResults(results, True), work, Console(enabled=False))
    run = MapRun(queue, Console(enabled=False))
    trainings = ManyTrainings(run, {"a": work.digests[0]}, results, None)
    group = ManyTrainings(run, {"a": ""}, results, None)
    assert trainings.value("a") == 1
    write(results, work_of({"a": 2}), "a")
    assert group.value("a") == 1
    with pytest.raises(MapTrainError, match=r"'a' at file:.* is no longer this run's: another"):
        trainings.value("a")
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(MapTrainError, match=r"'a' cannot be read at file:.*pass a shared direct"):
        trainings.value("a")


def test_all_values_are_read_several_at_a_time_and_in_order(tmp_path, monkeypatch):
    names = [f"i{number:02}" for number in range(50)]
    results, work = ResultsDirectory(f"file://{tmp_path}"), work_of(dict.fromkeys(names, 1))
    write(results, work, *names)
    queue = TrainingQueue(work.names, retries=0, is_durable=True)
    _restore(queue, ClaimedResults(results, True), work, Console(enabled=False))
    run = MapRun(queue, Console(enabled=False))
    run._is_over = True
    trainings = ManyTrainings(run, dict(zip(work.names, work.digests, strict=True)), results, None)
    at_once, read = threading.Barrier(8), results.value

    def together(item):
        if item < "i08":
            at_once.wait(30)
        return read(item)

    monkeypatch.setattr(results, "value", together)
    assert list(trainings.values()) == names


def test_a_start_that_finds_no_result_lets_spark_forget_the_groups(tmp_path):
    results = ResultsDirectory(f"file://{tmp_path}")
    (tmp_path / results.path_of("a").rpartition("/")[2]).write_bytes(b"cut")
    released = []

    class Groups:
        homes = (0,)

        def release(self):
            released.append(self)

    groups: Any = Groups()
    work = RunWork(("a",), "", None, groups, ("",))
    with pytest.raises(SettingsError, match="no result of map_train"):
        start(
            place(FakeSpark()), work, RunOptions(1, 0, None, b""), 1, ClaimedResults(results, True)
        )
    assert released == [groups]
