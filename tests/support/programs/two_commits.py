"""A cluster whose executors find tfos at a path of their own: two_commits.py DIRECTORY."""

from __future__ import annotations

import sys
from typing import Any

from tfos import InputMode, TFCluster
from tfos.errors import NodeFailedError, VersionSkew


def main_fun(args: Any, ctx: Any) -> str:
    """Tell where this node's tfos is."""
    import tfos

    return str(tfos.__file__)


def main() -> None:
    """Start one node, and print its answer or why it was refused."""
    from pyspark.sql import SparkSession

    where = SparkSession.builder.config("spark.executorEnv.PYTHONPATH", sys.argv[1])
    with where.getOrCreate() as spark:
        try:
            with TFCluster.reserve(
                spark.sparkContext, 1, 0, input_mode=InputMode.TENSORFLOW
            ) as cluster:
                cluster.start(main_fun)
            print(f"ran with {cluster.results()[0]}")
        except (NodeFailedError, VersionSkew) as error:
            print(f"REFUSED {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
