"""Prints how clusters start whose GPU another process holds; Spark schedules simulated GPUs.

meets_a_held_gpu.py DIRECTORY    where the discovery script is written

After SEEN: the error of the start and its seconds, then what a worker says with busy_gpus="warn".
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyspark

import tfos


def main_fun(_args: Any, _ctx: Any) -> str:
    """Return the GPUs that this worker sees, and their order."""
    return f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.environ['CUDA_DEVICE_ORDER']}"


def main() -> None:
    """Start one worker on an executor with one GPU, twice."""
    script = Path(sys.argv[1]) / "discover"
    found = json.dumps({"name": "gpu", "addresses": ["0"]})
    script.write_text(f"#!/bin/sh\necho '{found}'\n")
    script.chmod(0o755)
    conf = pyspark.SparkConf()
    for process in ("worker", "executor", "task"):
        conf.set(f"spark.{process}.resource.gpu.amount", "1")
    conf.set("spark.worker.resource.gpu.discoveryScript", str(script))
    conf.set("spark.executor.resource.gpu.discoveryScript", str(script))
    sc = pyspark.SparkContext(conf=conf)
    began_s = time.monotonic()
    try:
        with tfos.TFCluster.reserve(sc, 1, 0, input_mode=tfos.InputMode.TENSORFLOW) as cluster:
            cluster.start(main_fun, None)
    except tfos.errors.NodeFailedError as error:
        print("SEEN", json.dumps([str(error), time.monotonic() - began_s]))
    config = tfos.ClusterConfig(busy_gpus="warn")
    with tfos.TFCluster.reserve(
        sc, 1, 0, input_mode=tfos.InputMode.TENSORFLOW, config=config
    ) as cluster:
        cluster.start(main_fun, None)
    print("SEEN", json.dumps(cluster.results()))
    sc.stop()


if __name__ == "__main__":
    main()
