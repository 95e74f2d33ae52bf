"""Prints which GPUs each worker of a cluster may see; Spark schedules simulated ones.

shows_gpus.py DIRECTORY    where the discovery script is written
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyspark

import tfos

ADDRESSES = ["4", "GPU-5"]


def main_fun(_args: Any, _ctx: Any) -> str:
    """Return what this worker sees."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


def main() -> None:
    """Run one server and two workers on three executors with two GPUs each."""
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
    for resource in ("gpu", None):
        config = tfos.ClusterConfig(gpu_resource=resource)
        with tfos.TFCluster.reserve(
            sc, 3, 1, input_mode=tfos.InputMode.TENSORFLOW, config=config
        ) as cluster:
            cluster.start(main_fun, None)
        print("SEEN", json.dumps([resource, cluster.results()]))
    sc.stop()


if __name__ == "__main__":
    main()
