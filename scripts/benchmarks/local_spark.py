"""A local Spark cluster of separate executor processes, for the benchmarks that need one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0


@contextlib.contextmanager
def executors(count: int, name: str) -> Iterator[Any]:
    """Yield a SparkContext with `count` executors of one core each, all of them up."""
    from pyspark import SparkConf, SparkContext

    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.executorEnv.PYTHONPATH": str(ROOT),  # for functions of these modules
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "1g",
        "spark.python.worker.reuse": "true",
    }
    conf = SparkConf().setMaster(f"local-cluster[{count},1,1024]").setAppName(name)
    with SparkContext(conf=conf.setAll(list(settings.items()))) as sc:
        await_executors(sc, count)
        yield sc


def await_executors(sc: Any, count: int) -> None:
    """Wait until `count` executors take tasks: one that is still starting takes none."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    seen: set[int] = set()
    while len(seen) < count:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(seen)} of {count} executors after {START_TIMEOUT_S:.0f} s")
        seen = set(sc.parallelize(range(4 * count), 4 * count).map(_executor_pid).collect())


def _executor_pid(_: int) -> int:
    return os.getppid()  # the daemon that forks an executor's Python workers
