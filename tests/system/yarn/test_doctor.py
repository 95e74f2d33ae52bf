"""`tfos doctor` on a real YARN and its HDFS, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from scripts.local_hdfs.yarn import LocalYarn
from tests.support.marked_processes import below

TIMEOUT_S = 400.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 60, func_only=True)]


def test_containers_hdfs_and_memory_are_examined_and_nothing_is_left(yarn: LocalYarn):
    of_pyspark = Path(pyspark.__file__).parent
    done = subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "tfos",
                "doctor",
                "--json",
                "--no-tensorflow",
                "--timeout",
                "300",
            ),
            *("--master", "yarn", "--hdfs", "hdfs:///"),
            *("--conf", f"spark.yarn.jars=local:{of_pyspark}/jars/*"),
            *("--conf", "spark.executor.memory=512m", "--conf", "spark.yarn.am.memory=512m"),
        ],
        env={
            **os.environ,
            "HADOOP_CONF_DIR": str(yarn.conf_dir),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_HOME": str(of_pyspark),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    reports = {each["place"]: each for each in json.loads(done.stdout)}
    assert list(reports) == ["Spark", "driver", "executor 1", "executor 2"]
    assert "896 MiB = 512 heap + 384 overhead" in str(reports["Spark"])
    for name in ("driver", "executor 1", "executor 2"):
        assert "written, read and removed" in str(reports[name])
    yarn.stop()
    assert not below(yarn.directory)
