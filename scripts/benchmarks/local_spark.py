"""A local Spark cluster of separate executor processes, for the benchmarks that need one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def executors(count: int, name: str) -> Iterator[Any]:
    """Yield a SparkContext with `count` executors of one core each, all of them up."""
    from pyspark import SparkConf, SparkContext

    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "1g",
        "spark.python.worker.reuse": "true",
    }
    conf = SparkConf().setMaster(f"local-cluster[{count},1,1024]").setAppName(name)
    with SparkContext(conf=conf.setAll(list(settings.items()))) as sc:
        seen: set[str] = set()
        while len(seen) < count:  # an executor that is still starting takes no task
            seen = set(sc.parallelize(range(4 * count), 4 * count).map(_executor_pid).collect())
        yield sc


def _executor_pid(_: int) -> str:
    import os

    from pyspark import SparkFiles

    return f"{os.getppid()} {SparkFiles.getRootDirectory()}"
