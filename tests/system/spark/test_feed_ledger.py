"""Tasks and workers killed while rows are fed, on a real Spark: what is trained, what counted."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tfos import InputMode, TFCluster

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]
ROWS, PARTITIONS = 8000, 8
STEP_S = 0.1
"""The chief needs four seconds for its share: the loss is known long before."""


def keep(args: Any, ctx: Any) -> None:
    """Write the rows of every batch once it is trained; worker:1 may die, the chief awaits that."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    mark, dies_at = Path(args["out"], "dead"), args.get("dies_at")
    with Path(args["out"], f"{ctx.task_index}.txt").open("w", buffering=1) as out:
        number = 0
        while not feed.should_stop():
            batch = feed.next_batch(100)
            numbers = [row if isinstance(row, int) else row[0] for row in batch]
            out.write("".join(f"{number}\n" for number in numbers))
            number += 1
            if dies_at is None:
                continue
            if ctx.task_index == 1 and number == dies_at:
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 1:
                end = time.monotonic() + 60
                while ctx.task_index == 0 and not mark.exists() and time.monotonic() < end:
                    time.sleep(0.01)
            time.sleep(STEP_S)


def kept(directory: Path) -> list[int]:
    return [int(row) for path in directory.glob("*.txt") for row in path.read_text().splitlines()]


class DyingTask:
    """Makes a partition's rows; the first time, its Python process is killed at a row."""

    def __init__(self, directory: Path, at: dict[int, int]) -> None:
        self._directory, self._at = str(directory), at

    def __call__(self, partition: int, rows: Any) -> Any:
        mark = Path(self._directory, f"killed-{partition}")
        for number, row in enumerate(rows):
            if number == self._at.get(partition) and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield row


@pytest.mark.fault("F37")
@pytest.mark.parametrize("exactly_once", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_killed_feed_task_is_repeated_and_its_rows_are_counted(spark, tmp_path, exactly_once):
    (tmp_path / "marks").mkdir()
    rows = spark.parallelize(range(ROWS), PARTITIONS).mapPartitionsWithIndex(
        DyingTask(tmp_path / "marks", {2: 700, 5: 999})
    )
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(keep, {"out": str(tmp_path)})
        report = cluster.train(
            rows, 1, seed=3, shuffle_rows=300, exactly_once=exactly_once, feed_timeout=60
        )
        again = cluster.train(rows, 1, feed_timeout=60)
    assert report is not None
    assert again is not None
    assert sorted(path.name for path in (tmp_path / "marks").iterdir()) == ["killed-2", "killed-5"]
    (epoch,) = report.epochs
    found = kept(tmp_path)
    assert set(found) == set(range(ROWS))
    assert (epoch.fed_rows, epoch.trained_rows, epoch.dropped_rows) == (ROWS, ROWS, 0)
    assert epoch.repeated_rows == len(found) - 2 * ROWS
    assert sum(epoch.per_worker.values()) == ROWS + epoch.repeated_rows
    assert (epoch.repeated_rows == 0) is exactly_once
    assert (again.trained_rows, again.repeated_rows) == (ROWS, 0)


@pytest.mark.fault("F01")
def test_rows_lost_with_a_killed_worker_are_trained_by_the_others(spark, tmp_path, capfd):
    """All rows are accepted at once, so most losses come after the epoch's end was ordered."""
    from pyspark.sql import SparkSession

    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(keep, {"out": str(tmp_path), "dies_at": 12})
        frame = SparkSession(spark).range(0, ROWS, 1, PARTITIONS)
        report = cluster.train(frame, 2, feed_timeout=60)
        assert [failure.node.name for failure in cluster.failures] == ["worker:1"]
    assert report is not None
    first, second = report.epochs
    assert (first.fed_rows, first.trained_rows, first.dropped_rows) == (ROWS, ROWS, 0)
    assert (second.fed_rows, second.trained_rows, second.repeated_rows) == (ROWS, ROWS, 0)
    assert "feeding again" in capfd.readouterr().err
    found = kept(tmp_path)
    assert set(found) == set(range(ROWS))
    # What the lost worker trained after its last word is trained twice, and nothing else.
    assert 2 * ROWS <= len(found) <= 2 * ROWS + 12 * 100
    assert first.repeated_rows >= len(found) - 2 * ROWS
