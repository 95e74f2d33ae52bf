"""Rows that Spark stores pickled are fed without being made; all arrive as the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfos import InputMode, TFCluster
from tfos.feed.sources import raw_batches

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]


def keep(args, ctx):
    """Write every row that this worker took."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    rows = []
    while not feed.should_stop():
        rows += [repr(row) for row in feed.next_batch(16)]
    Path(args["out"], f"{ctx.task_index}.json").write_text(json.dumps(rows))


def test_parallelized_and_cached_rows_are_raw_and_others_are_not(spark):
    stored = spark.parallelize([[1, 2, 3]] * 10, 2)
    mapped = stored.map(lambda row: [value + 1 for value in row])
    assert raw_batches(stored)[1] is not None
    assert raw_batches(stored.repartition(3))[1] is not None
    assert raw_batches(mapped) == (mapped, None)
    cached = mapped.cache()
    batches, loads = raw_batches(cached)
    assert loads is not None
    assert [row for batch in batches.collect() for row in loads(batch)] == [[2, 3, 4]] * 10
    assert cached.getStorageLevel().useMemory
    cached.unpersist()


def test_an_rdd_of_text_lines_is_fed_as_rows(spark, tmp_path):
    (tmp_path / "lines.txt").write_text("a\nb\n")
    lines = spark.textFile(str(tmp_path / "lines.txt"))
    assert raw_batches(lines) == (lines, None)


@pytest.mark.parametrize(
    "rows",
    [
        [([index % 7, 400], 2.5 * index) for index in range(200)],
        pytest.param([f"line {index}" for index in range(200)], marks=pytest.mark.long),
        [(float(index), b"x" * (index % 5)) for index in range(200)],
    ],
    ids=["numbers", "strings", "bytes"],
)
def test_rows_of_a_stored_rdd_arrive_unchanged(spark, tmp_path, rows):
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(keep, {"out": str(tmp_path)})
        report = cluster.train(spark.parallelize(rows, 3), num_epochs=1)
    assert report is not None
    assert report.fed_rows == report.trained_rows == len(rows)
    taken = [row for part in tmp_path.glob("*.json") for row in json.loads(part.read_text())]
    assert sorted(taken) == sorted(map(repr, rows))


def test_one_list_that_is_filled_again_for_each_row_is_fed_as_it_was_each_time(spark, tmp_path):
    def filled(numbers):
        row = [0, 0]
        for number in numbers:
            row[:] = number, -number
            yield row

    rows = spark.parallelize(range(200), 2).mapPartitions(filled)
    with TFCluster.reserve(spark, 2, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(keep, {"out": str(tmp_path)})
        cluster.train(rows, num_epochs=1)
    fed = json.loads((tmp_path / "0.json").read_text())
    assert sorted(fed) == sorted(repr([number, -number]) for number in range(200))
