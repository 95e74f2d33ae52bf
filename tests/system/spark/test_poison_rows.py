"""A row that crashes every worker that gets it ends the feed, and the error names its rows."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tfos import ClusterConfig, InputMode, Restarts, TFCluster
from tfos.errors import PoisonRows

BAD = 1234
PARTITION, ROW = 1, 234
NUM_ROWS, PARTITIONS = 4000, 4
ALL = 64 << 20
"""A worker takes all rows at once."""
TOLD_S = 10.0
"""From the third crash to the exception; docs/faults.md promises it."""

pytestmark = [
    pytest.mark.spark,
    pytest.mark.long,
    pytest.mark.fault("F54"),
    pytest.mark.timeout(240, func_only=True),
    pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True),
]


def crash_on_a_row(args: dict[str, Any], ctx: Any) -> None:
    """Take the whole feed, and crash like compiled code does when one row comes."""
    ctx.ps_client()  # this test is about rows: nothing is learned
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        batch = feed.next_batch(args["batch_size"])
        time.sleep(args["step_s"])
        if BAD in batch:
            Path(args["out"], f"crash-{ctx.rank}-{ctx.attempt}").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize(
    ("nodes", "restarts", "limit"),
    [(3, 5, ALL), (2, 5, ALL), (2, 2, ALL), (2, 5, 4096), (2, 2, 4096)],
    ids=[
        *("two workers", "one worker", "the last restart"),
        *("while rows are fed", "the last restart while rows are fed"),
    ],
)
def test_three_crashes_by_a_row_end_the_feed_with_its_rows(
    spark: Any, tmp_path: Path, nodes: int, restarts: int, limit: int
) -> None:
    rows = spark.parallelize(range(NUM_ROWS), PARTITIONS)
    config = ClusterConfig(restarts=Restarts(workers=restarts), max_inflight_bytes=limit)
    args: dict[str, Any] = {"out": str(tmp_path), "batch_size": 16, "step_s": 0.005}
    with TFCluster.reserve(spark, nodes, 1, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(crash_on_a_row, args)
        with pytest.raises(PoisonRows) as caught:
            cluster.train(rows, num_epochs=3, feed_timeout=60)
        told_s = time.time()
        cluster.abort("the test is over")
    crashes = sorted(float(path.read_text()) for path in tmp_path.glob("crash-*"))
    assert len(crashes) == 3
    assert told_s - crashes[-1] < TOLD_S
    text = str(caught.value)
    assert text.startswith("epoch 1 of 'input': rows ")
    assert f" of partition {PARTITION}" in text
    assert text.count("killed by SIGSEGV") == 3
    assert any(low <= ROW < high for low, high in caught.value.rows[PARTITION])
    blamed = sum(high - low for spans in caught.value.rows.values() for low, high in spans)
    assert blamed <= args["batch_size"]
    print(f"blamed {blamed} rows after {told_s - crashes[-1]:.1f} s: {text}")  # noqa: T201
    assert blamed < NUM_ROWS
    assert "SIGSEGV" in str(caught.value.__cause__) or "Segmentation" in str(caught.value.__cause__)


def test_rows_that_are_to_be_skipped_are_dropped_and_the_training_goes_on(
    spark: Any, tmp_path: Path, capsys: Any
) -> None:
    rows = spark.parallelize(range(NUM_ROWS), PARTITIONS)
    config = ClusterConfig(restarts=Restarts(workers=5, on_poison="skip"))
    args = {"out": str(tmp_path), "batch_size": 16, "step_s": 0.001}
    with TFCluster.reserve(spark, 3, 1, input_mode=InputMode.SPARK, config=config) as cluster:
        cluster.start(crash_on_a_row, args)
        report = cluster.train(rows, num_epochs=1, feed_timeout=60)
    assert report is not None
    assert 1 <= report.dropped_rows <= 16
    assert report.fed_rows == report.trained_rows + report.dropped_rows == NUM_ROWS
    assert len(list(tmp_path.glob("crash-*"))) == 3
    told = capsys.readouterr().err
    assert f"They are skipped: {report.dropped_rows} rows count as dropped" in told
