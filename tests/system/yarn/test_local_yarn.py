"""A Spark application on a real YARN: its executors' rows, a file on HDFS, and nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from scripts.local_hdfs.errors import MissingTool
from scripts.local_hdfs.yarn import NUM_NODES, LocalYarn
from tests.support.marked_processes import below

pytestmark = pytest.mark.long

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
CONF = {
    "spark.yarn.am.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.instances": "2",
    "spark.ui.enabled": "false",
}


@pytest.fixture
def yarn(tmp_path: Path) -> Iterator[LocalYarn]:
    """A YARN of this test's own, with its HDFS."""
    try:
        running = LocalYarn.started(tmp_path / "run", with_parent=True)
    except MissingTool as missing:
        pytest.skip(str(missing))
    with running:
        yield running


def test_spark_runs_on_it_and_nothing_is_left(yarn: LocalYarn, tmp_path: Path):
    assert yarn.num_active_nodes() == NUM_NODES
    assert yarn.num_live_datanodes() == yarn.num_datanodes
    (tmp_path / "program.py").write_text(PROGRAM)
    jars = f"spark.yarn.jars=local:{Path(pyspark.__file__).parent}/jars/*"
    settings = [f"--conf={key}={value}" for key, value in CONF.items()]
    submit = [f"{Path(pyspark.__file__).parent}/bin/spark-submit", f"--conf={jars}", *settings]
    places = {"HADOOP_CONF_DIR": str(yarn.conf_dir), "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        [*submit, str(tmp_path / "program.py")],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "rows: 1000" in done.stdout, done.stderr[-3000:]
    yarn.stop()
    assert not any(daemon.is_alive() for daemon in yarn.daemons)
    assert not below(yarn.directory)
