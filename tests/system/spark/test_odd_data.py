"""Data that users really have: DataFrames, streams, holes, rows that change; each ends clearly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfos import InputMode, TFCluster
from tfos.errors import FeedJobError

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local[4]"], indirect=True),
]

FEED_TIMEOUT_S = 60.0


STOP = "stop"
"""A row at which main_fun ends its stream."""


def keep(args, ctx):
    """Write every row that this worker took."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    with Path(args, f"{ctx.task_index}.txt").open("w") as out:
        while not feed.should_stop():
            rows = feed.next_batch(16)
            if STOP in rows:
                feed.terminate()
            out.writelines(f"{row!r}\n" for row in rows if row != STOP)


def kept(directory: Path) -> list[str]:
    return [line for path in directory.glob("*.txt") for line in path.read_text().splitlines()]


def _frame(spark: Any, rows: list[tuple[Any, ...]], schema: str) -> Any:
    from pyspark.sql import SparkSession

    return SparkSession(spark).createDataFrame(rows, schema)


FED: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "a DataFrame": (
        20,
        lambda sc: _frame(sc, [(i, f"t{i}") for i in range(20)], "a int, b string"),
    ),
    "a DataFrame without rows": (0, lambda sc: _frame(sc, [], "a int, b double")),
    "an RDD without partitions": (0, lambda sc: sc.emptyRDD()),
    "one huge partition": (20_000, lambda sc: sc.parallelize(range(20_000), 1)),
    "many empty partitions": (3, lambda sc: sc.parallelize(range(3), 12)),
    "partitions of different types": (20, lambda sc: sc.parallelize([1] * 10 + ["x"] * 10, 2)),
}
REFUSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a null in a DataFrame": (
        r"partition 0, row 1, column 'b': null; F\.coalesce\(\) replaces it, .*takes nulls=",
        lambda sc: _frame(sc, [(1, 2.0), (2, None)], "a int, b double").coalesce(1),
    ),
    "a row of None": (
        r"partition 0, row 300",
        lambda sc: sc.parallelize([1] * 300 + [None], 1),
    ),
    "rows of None": (r"partition \d, row 0.*None", lambda sc: sc.parallelize([None] * 4, 2)),
    "a type that changes": (
        r"partition 0, row 300.*str",
        lambda sc: sc.parallelize([1] * 300 + ["x"], 1),
    ),
    "a type that changes in rows made on the way": (
        r"partition 0, row 300.*str",
        lambda sc: sc.parallelize([1] * 300 + ["x"], 1).map(lambda row: row),
    ),
    "another number of columns": (
        r"partition 0, row 300",
        lambda sc: sc.parallelize([(1, 2)] * 300 + [(1, 2, 3)], 1),
    ),
}


def test_odd_data_is_fed_whole_or_refused_by_row_and_the_cluster_goes_on(spark, tmp_path):
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK) as cluster:
        cluster.start(keep, str(tmp_path))
        for what, (text, make) in REFUSED.items():
            with pytest.raises(FeedJobError, match=rf"RowError: .*{text}"):
                cluster.train(make(spark), 1, feed_timeout=FEED_TIMEOUT_S)
            assert cluster.phase.name == "RUNNING", what
        for what, (rows, make) in FED.items():
            report = cluster.train(make(spark), 1, feed_timeout=FEED_TIMEOUT_S)
            assert report is not None
            assert (report.fed_rows, report.trained_rows) == (rows, rows), what
    lines = kept(tmp_path)
    assert sum(line.startswith("Row(a=") for line in lines) >= 20
    assert "Row(a=7, b='t7')" in lines
    assert lines.count("'x'") == 10


@pytest.mark.long
def test_shutdown_waits_until_every_batch_of_a_stream_is_trained(spark, tmp_path, capfd):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "DStream is deprecated", FutureWarning)
        from pyspark.streaming import StreamingContext

        stream_context = StreamingContext(spark, 0.5)
    batches = [spark.parallelize(range(i * 100, i * 100 + 100), 2) for i in range(2)]
    batches.append(spark.parallelize([STOP], 1))
    cluster = TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK)
    cluster.start(keep, str(tmp_path))
    assert cluster.train(stream_context.queueStream(batches)) is None
    stream_context.start()
    cluster.shutdown(stream_context, timeout=120)
    assert sorted(map(int, kept(tmp_path))) == list(range(200))
    assert spark.parallelize(range(4), 2).sum() == 6
    shown = capfd.readouterr().err
    assert "ERROR JobScheduler" not in shown
    assert "shutdown() waits for the stream, 120 s at most" in shown
    assert "the stream stops: main_fun" in shown
    assert ": 0 rows fed" not in shown
