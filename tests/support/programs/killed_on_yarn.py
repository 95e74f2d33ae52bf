"""Two clusters on one application, each of which loses an executor: a worker's, then a server's.

Prints what the cluster says. The executors' Java processes are on the driver's host.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from tfos import NodeFailedError, TFCluster

PATIENCE_S = 60.0


def wait_for_file(args, ctx):
    """Return when the driver says so."""
    end = time.monotonic() + PATIENCE_S
    while not Path(args["stop"]).exists() and time.monotonic() < end:
        time.sleep(0.05)


def kill_executor(application: str, executor_id: str) -> None:
    """End the Java process of an executor without warning."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if application in words and words[words.index("--executor-id") + 1] == executor_id:
            process.kill()
            return
    raise LookupError(f"no executor {executor_id} of {application}")


def lose(sc, node: str, stop: Path) -> None:
    """Train until the executor of a node is lost, then print what the user gets."""
    try:
        with TFCluster.reserve(sc, 3, 1) as cluster:
            cluster.start(wait_for_file, {"stop": str(stop)})
            found = next(each for each in cluster.status().nodes if each.name == node)
            kill_executor(sc.applicationId, found.executor_id)
            end = time.monotonic() + PATIENCE_S
            while not cluster.failures and time.monotonic() < end:
                time.sleep(0.05)
            stop.touch()
        print(f"{node}: went on after", *(each.message for each in cluster.failures))
    except NodeFailedError as error:
        print(f"{node}: ended by {error}")


def main() -> None:
    """Lose both, in a directory that the command line names."""
    from pyspark.sql import SparkSession

    with SparkSession.builder.master("yarn").getOrCreate() as spark:
        sc = spark.sparkContext
        lose(sc, "worker:1", Path(sys.argv[1], "first"))
        lose(sc, "ps:0", Path(sys.argv[1], "second"))


if __name__ == "__main__":
    main()
