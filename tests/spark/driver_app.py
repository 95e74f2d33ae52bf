"""A whole driver program for tests that kill it: 1 PS + 2 workers step until told to stop.

Usage: driver_app.py STOP_FILE ENDING      ENDING: success | failure | wait
Prints READY once every worker has stepped, then ENDED or the error.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import SparkSession

from tfos import InputMode, TFCluster


def main_fun(args, ctx):
    import numpy as np

    from ps.params import Add, GroupSpec, Hyper, Manifest, ParamSpec

    client = ctx.ps_client()
    size = 65_536
    group = GroupSpec(
        name="trainable", dtype="float32", rule=Add(), params=(ParamSpec("w", (size,)),)
    )
    values = np.zeros(size, np.float32)
    if ctx.is_chief:
        client.seed(Manifest(groups=(group,)), {"trainable": values})
    client.attach(timeout_s=30)
    step = 0
    while not Path(args.stop_file).exists():
        client.push_pull(
            {"trainable": np.ones(size, np.float32)},
            {"trainable": values},
            hyper=Hyper(learning_rate=1.0),
            rows=1,
        )
        step += 1
        ctx.report_progress(step=step, rows=step, loss=0.0)
        if step == 20:
            Path(f"{args.stop_file}.{ctx.job_name}-{ctx.task_index}").touch()
        if step == 40 and args.ending == "failure" and ctx.is_chief:
            raise ValueError("step 40 is where this program fails")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stop_file")
    parser.add_argument("ending")
    args = parser.parse_args()
    spark = SparkSession.builder.getOrCreate()
    cluster = TFCluster.reserve(
        spark.sparkContext, cluster_size=3, num_ps=1, input_mode=InputMode.TENSORFLOW
    )
    cluster.start(main_fun, args)
    deadline = time.monotonic() + 60
    folder, name = Path(args.stop_file).parent, Path(args.stop_file).name
    while len(list(folder.glob(f"{name}.*"))) < 2 and time.monotonic() < deadline:
        threading.Event().wait(0.05)
    print("READY", flush=True)
    try:
        cluster.shutdown()
    finally:
        spark.stop()
    print("ENDED", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
