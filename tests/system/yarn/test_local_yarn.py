"""A Spark application on a real YARN: its executors' rows, a file on HDFS, and nothing left."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.local_hdfs.yarn import NUM_NODES, LocalYarn
from tests.support.marked_processes import below
from tests.support.on_yarn import TIMEOUT_S, nodes_left, submitted
from tests.support.spark_submit import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 60, func_only=True)]

PROGRAM = """
import os
from pyspark.sql import SparkSession

spark = SparkSession.builder.master("yarn").getOrCreate()
containers = spark.sparkContext.parallelize(range(4), 4).map(lambda _: os.environ["CONTAINER_ID"])
assert all(name.startswith("container_") for name in containers.collect())
spark.range(1000).write.parquet("/rows")
print("rows:", spark.read.parquet("/rows").count())
spark.stop()
"""


def test_spark_runs_on_it_and_nothing_is_left(yarn: LocalYarn, tmp_path: Path):
    assert yarn.num_active_nodes() == NUM_NODES
    assert yarn.num_live_datanodes() == yarn.num_datanodes
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert "rows: 1000" in submitted(yarn, program)
    yarn.stop()
    assert not any(daemon.is_alive() for daemon in yarn.daemons)
    assert not below(yarn.directory)


@pytest.mark.fault("F14")
def test_a_killed_executor_is_told_with_sparks_reason(yarn: LocalYarn, tmp_path: Path):
    output = submitted(yarn, ROOT / "tests/support/programs/killed_on_yarn.py", str(tmp_path))
    assert "worker:1: went on after executor " in output
    (told,) = [line for line in output.splitlines() if line.startswith("ps:0: ended by")]
    assert told.startswith("ps:0: ended by ExecutorLost: executor ")
    assert ". Spark's reason: Container " in told
    assert "Exit status: 137" in told
    assert "yarn logs -applicationId application_" in told
    assert not nodes_left(yarn)
    yarn.stop()
    assert not below(yarn.directory)
