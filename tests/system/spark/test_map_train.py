"""map_train on executors: every end of a training, groups, results that survive; windows."""

from __future__ import annotations

import datetime
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, functions

import tfos
from tests.support.feed import eventually
from tfos.errors import MapTrainError, SettingsError
from tfos.spark.jobs import SparkJob
from tfos.timeseries import windows

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(170, func_only=True),  # not of Spark, which starts first
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]


def ends(item):
    how, path = item
    with open(path, "a") as log:
        log.write(f"{how} {os.getpid()}\n")
    begun = Path(path).read_text().splitlines()
    if how == "dies" and sum(line.startswith("dies") for line in begun) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "slow":
        import subprocess

        child = subprocess.Popen(["sleep", "120"])
        Path(f"{path}.child").write_text(str(child.pid))
        time.sleep(60)
    if how == "raises":
        raise ValueError("no such series")
    return {"loss": 0.5, "how": how, "pid": os.getpid()}


def test_spark_tells_whether_a_job_in_the_group_of_its_user_has_a_task(spark, tmp_path):
    ends = tmp_path / "ends"

    def waits(_: int) -> None:
        deadline_s = time.monotonic() + 60
        while not ends.exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    spark.setJobGroup("cell", "of a notebook")
    try:
        rows = spark.range(1).map(waits)
        job = SparkJob[int](spark, "tag", "text", rows.count, lambda _: None)
        assert job.has_active_task() is False
        job.start(count_tasks=True)
        eventually(job.has_active_task, "a running task")
        assert len(spark.statusTracker().getJobIdsForGroup("cell")) == 1
        eventually(lambda: job.tasks and job.tasks.active == 1, "its count")
    finally:
        ends.touch()
        spark.setLocalProperty("spark.jobGroup.id", None)
    assert job.join(60)
    eventually(lambda: job.has_active_task() is False, "no running task")


@pytest.mark.fault("F57")
def test_items_end_in_every_way_and_the_others_are_trained(spark, tmp_path):
    log = tmp_path / "log"
    items = {how: (how, str(log)) for how in ("dies", "slow", "raises")}
    items |= {f"fine {number}": (f"fine {number}", str(log)) for number in range(12)}
    with tfos.map_train(
        items, ends, sc=spark, slots=2, retries=1, timeout_s=3, wait=False
    ) as trainings:
        rows = {row.item: row for row in trainings.as_ended()}
        assert trainings.wait()
    assert len(rows) == 15
    assert (rows["dies"].state, rows["dies"].attempts) == ("done", 2)
    assert "killed by SIGKILL" in rows["dies"].error
    assert (rows["slow"].state, rows["slow"].attempts) == ("failed", 2)
    assert "timeout_s=3" in rows["slow"].error
    assert rows["raises"].error.endswith("ValueError: no such series")
    values = trainings.values()
    assert {value["how"] for value in values.values()} == {*items} - {"slow", "raises"}
    assert len({value["pid"] for value in values.values()}) <= 2 + 3  # fresh after a death
    with pytest.raises(MapTrainError, match="2 of 15 items have failed: 'slow', 'raises'"):
        trainings.raise_failed()
    pids = [int(line.split()[-1]) for line in log.read_text().splitlines()]
    pids.append(int(Path(f"{log}.child").read_text()))
    assert eventually(lambda: not any(map(psutil.pid_exists, pids)), "all trainers end")


def counts(key, rows):
    assert sorted(rows.column_names) == ["series", "v"]
    return {"key": key, "rows": rows.num_rows, "sum": sum(rows["v"].to_pylist())}


def test_groups_of_a_dataframe_are_trained_where_their_rows_are(spark):
    session = SparkSession(spark).newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    frame = session.range(100).selectExpr("concat('s', id % 7) as series", "double(id) as v")
    trainings = tfos.map_train(frame.groupBy("series"), counts, slots=2)
    assert [row.item for row in trainings.table()] == [f"s{number}" for number in range(7)]
    assert sum((row.metrics or {})["sum"] for row in trainings.table()) == sum(range(100))
    assert trainings.value("s0") == {"key": "s0", "rows": 15, "sum": 735.0}
    done = trainings.to_spark(session).where("state = 'done'").selectExpr("sum(metrics.rows)")
    assert done.first()[0] == 100
    with pytest.raises(SettingsError, match=r"fn is called as fn\(key, rows\)"):
        tfos.map_train(frame.groupBy("series"), lambda rows: rows)
    with pytest.raises(SettingsError, match=r"dots or backticks .* has \['a\.b'\]; rename them"):
        tfos.map_train(frame.withColumnRenamed("v", "a.b").groupBy("series"), counts)


@pytest.mark.long
def test_groups_whose_rows_have_changed_are_trained_again(spark, tmp_path, capsys):
    session = SparkSession(spark).newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")

    def train(changed):
        value = f"if(id = {changed}, -1, id) as v"
        frame = session.range(21).selectExpr("concat('s', id % 7) as series", value)
        groups = frame.repartition(3).groupBy("series")
        trainings = tfos.map_train(groups, counts, slots=2, results_dir=str(tmp_path / "results"))
        sums = {name: value["sum"] for name, value in trainings.values().items()}
        assert sum(sums.values()) == sum(range(21)) - (changed + 1 if changed >= 0 else 0)
        return {row.item: row.attempts for row in trainings.table() if row.attempts}

    assert train(-1) == {f"s{number}": 1 for number in range(7)}
    assert train(-1) == {}
    assert train(11) == {"s4": 1}
    assert "1 to train, 1 of them because they have changed" in capsys.readouterr().err


@pytest.mark.long
def test_a_cancelled_run_goes_on_where_it_stopped(spark, tmp_path, capsys):
    started = tmp_path / "started"

    def slow_later(item):
        with open(started, "a") as log:
            log.write(f"{item}\n")
        time.sleep(0 if item < 3 or (started.parent / "go").exists() else 60)
        return item * item

    where = {"sc": spark, "slots": 1, "results_dir": str(tmp_path / "results")}
    with tfos.map_train(range(6), slow_later, wait=False, **where) as trainings:
        rows = trainings.as_ended()
        assert [next(rows).item for _ in range(3)] == ["0", "1", "2"]
        assert trainings.value("2") == 4  # while the others are trained
    (tmp_path / "go").touch()
    began = len(started.read_text().splitlines())
    trainings = tfos.map_train(range(6), slow_later, **where)
    assert trainings.values() == {str(number): number * number for number in range(6)}
    assert started.read_text().split()[began:] == ["3", "4", "5"]
    assert [row.attempts for row in trainings.table()] == [0, 0, 0, 1, 1, 1]
    more = tfos.map_train([9, *range(6)], slow_later, **where)
    assert more.values() == {str(number): number * number for number in (9, *range(6))}
    assert [row.attempts for row in more.table()] == [1, 0, 0, 0, 0, 0, 0]
    assert "map_train: 6 of 7 items are done in" in capsys.readouterr().err
    with pytest.raises(SettingsError, match="results of other items: that of '2' is of another"):
        tfos.map_train({"2": 3}, slow_later, **where)


@pytest.mark.long
def test_windows_of_many_series_are_those_of_each_alone(spark):
    session = SparkSession(spark).newSession()
    session.conf.set("spark.sql.shuffle.partitions", "2")
    session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "7")
    hours = "timestamp '2024-01-01 00:00:00' + make_dt_interval(0, n)"
    rows = session.range(200).selectExpr("id % 20 as time", "int(id / 20) as n")
    rows = rows.selectExpr("time", "n", f"{hours} as `at.utc`", "float(time * 100 + n) as value")
    rows = rows.where("not (time = 3 and n = 5)")
    every = datetime.timedelta(hours=1)
    names = {"id": "time", "time": "at.utc", "value": "value"}
    given: dict[str, Any] = {**names, "lookback": 3, "horizon": 2}
    found = sorted(windows(rows, **given, every=every).collect())
    expected = [(s, n) for s in range(20) for n in range(2, 8) if s != 3 or n + 2 < 5 or n - 2 > 5]
    assert [(row["time"], row["past"][-1] % 100) for row in found] == expected
    assert all(row["future"][0] == row["past"][-1] + 1 for row in found)
    assert found[0]["at.utc"] == datetime.datetime(2024, 1, 1, 2)
    doubled = rows.unionByName(rows)
    doubled = doubled.unionByName(rows.withColumn("value", functions.lit(float("inf"))))
    averaged = windows(doubled, **given, duplicates="mean", every=every)
    assert sorted(averaged.collect()) == found
    alone = windows(rows.where("time = 0"), **{**given, "id": None})
    assert [row[1:] for row in found if row["time"] == 0] == list(map(tuple, alone.collect()))
    with pytest.raises(PySparkException, match=r"the series time=\d+ has two rows with the time"):
        windows(doubled, **given).count()


@pytest.mark.parametrize("duplicates", ["error", "mean"])
def test_windows_of_columns_with_any_names(spark, duplicates):
    """Spark reads a dot as a field of a struct, and names in any case as one."""
    rows = SparkSession(spark).range(6).selectExpr("7", "id", "float(id)")
    rows = rows.toDF("At.`UTC", "at.`utc", "a value")
    names: dict[str, Any] = {"id": "At.`UTC", "time": "at.`utc", "value": "a value"}
    found = windows(rows, **names, lookback=3, horizon=2, duplicates=duplicates)
    assert found.columns == ["At.`UTC", "at.`utc", "past", "future"]
    assert [(row[0], row[1], row[2], row[3]) for row in sorted(found.collect())] == [
        (7, 2, [0, 1, 2], [3, 4]),
        (7, 3, [1, 2, 3], [4, 5]),
    ]
