"""Prints what the nodes of clusters with resources have; Spark schedules simulated GPUs.

shows_resources.py DIRECTORY    where the discovery script is written

One JSON line after SEEN for each cluster: for each worker its executor, the GPUs that it sees and
its compute threads, and the servers' executors.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyspark

import tfos
from tfos import Resources

ADDRESSES = ["4", "GPU-5"]
CLUSTERS: tuple[dict[str, Any], ...] = (
    {},
    {"config": tfos.ClusterConfig(gpu_resource=None)},
    {"worker_resources": Resources(cores=2, gpus=1), "placement": "pack"},
)


def main_fun(_args: Any, _ctx: Any) -> list[str]:
    """Return what this worker has."""
    return [os.environ["CUDA_VISIBLE_DEVICES"], os.environ["OMP_NUM_THREADS"]]


def main() -> None:
    """Run one server and two workers on executors with four cores and two GPUs each."""
    script = Path(sys.argv[1]) / "discover"
    found = json.dumps({"name": "gpu", "addresses": ADDRESSES})
    script.write_text(f"#!/bin/sh\necho '{found}'\n")
    script.chmod(0o755)
    conf = pyspark.SparkConf()
    for process in ("worker", "executor", "task"):
        conf.set(f"spark.{process}.resource.gpu.amount", "2")
    conf.set("spark.worker.resource.gpu.discoveryScript", str(script))
    conf.set("spark.executor.resource.gpu.discoveryScript", str(script))
    sc = pyspark.SparkContext(conf=conf)
    for options in CLUSTERS:
        with tfos.TFCluster.reserve(
            sc, 3, 1, input_mode=tfos.InputMode.TENSORFLOW, **options
        ) as cluster:
            cluster.start(main_fun, None)
            at = {node.name: node.executor_id for node in cluster.status().nodes}
        values = cluster.results()
        workers = [[at[f"worker:{rank}"], *value] for rank, value in enumerate(values)]
        print("SEEN", json.dumps([workers, at["ps:0"]]))
    sc.stop()


if __name__ == "__main__":
    main()
