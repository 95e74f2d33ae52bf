"""A whole driver program for tests that kill it: 1 PS + 2 workers step until told to stop.

Usage: driver_app.py STOP_FILE LEASE_S
Prints READY once every worker has stepped, then ENDED or the error. Workers return once STOP_FILE
exists; the chief raises once STOP_FILE-fail does.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import SparkSession

from tests.support.plain_steps import PlainSteps
from tfos import ClusterConfig, InputMode, TFCluster


def main_fun(args, ctx):
    steps = PlainSteps(ctx, 65_536)
    fail_file = Path(f"{args.stop_file}-fail")
    while not Path(args.stop_file).exists():
        steps.step()
        ctx.report_progress(step=steps.count, rows=steps.count, loss=0.0)
        if steps.count == 20:
            Path(f"{args.stop_file}.{ctx.job_name}-{ctx.task_index}").touch()
        if ctx.is_chief and fail_file.exists():
            raise ValueError("here this program fails")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("stop_file")
    parser.add_argument("lease_s", type=float)
    args = parser.parse_args()
    spark = SparkSession.builder.getOrCreate()
    config = ClusterConfig(lease_s=args.lease_s)
    cluster = TFCluster.reserve(
        spark.sparkContext, 3, num_ps=1, input_mode=InputMode.TENSORFLOW, config=config
    )
    cluster.start(main_fun, args)
    deadline = time.monotonic() + 120
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
