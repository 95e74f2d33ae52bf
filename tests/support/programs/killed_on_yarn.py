"""Two clusters on one application, each of which loses an executor: a worker's, then a server's.

Prints what the cluster says. The executors' Java processes are on the driver's host.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.support.node_children import java_of
from tfos import NodeFailedError, TFCluster

PATIENCE_S = 60.0


def wait_for_file(args, ctx):
    """Return when the driver says so."""
    end = time.monotonic() + PATIENCE_S
    while not Path(args["stop"]).exists() and time.monotonic() < end:
        time.sleep(0.05)


def lose(sc, node: str, stop: Path) -> None:
    """Train until the executor of a node is lost, then print what the user gets."""
    try:
        with TFCluster.reserve(sc, 3, 1) as cluster:
            cluster.start(wait_for_file, {"stop": str(stop)})
            java_of(cluster, node).kill()
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
