"""Executors in containers of a YARN of one's own, for the benchmarks that can run there."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.benchmarks.local_spark import ROOT, await_executors
from scripts.local_hdfs.yarn import LocalYarn


@contextlib.contextmanager
def executors_on_yarn(count: int, name: str) -> Iterator[Any]:
    """Yield a SparkContext with `count` executors of one core each on YARN, all of them up."""
    import pyspark
    from pyspark import SparkConf, SparkContext

    of_pyspark = Path(pyspark.__file__).parent
    settings = {
        "spark.executor.instances": str(count),
        "spark.executor.memory": "512m",
        "spark.executorEnv.PYTHONPATH": str(ROOT),  # for functions of these modules
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.yarn.am.memory": "512m",
        "spark.yarn.jars": f"local:{of_pyspark}/jars/*",
    }
    with (
        tempfile.TemporaryDirectory(prefix="tfos-bench-yarn-") as directory,
        LocalYarn.started(Path(directory, "yarn"), num_datanodes=1, with_parent=True) as yarn,
    ):
        # YARN is sent pyspark.zip, which is a directory in the Spark home of scripts/java.sh.
        os.environ["SPARK_HOME"] = str(of_pyspark)
        os.environ["HADOOP_CONF_DIR"] = str(yarn.conf_dir)
        os.environ["PYSPARK_PYTHON"] = sys.executable
        conf = SparkConf().setMaster("yarn").setAppName(name).setAll(list(settings.items()))
        with SparkContext(conf=conf) as sc:
            await_executors(sc, count)
            yield sc
