"""The benchmarks, the figures that each prints, and how tests run them at toy size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 800
FIELDS = {"id", "name", "unit", "better", "ours", "reference", "ratio", "repeats", "command"}
ON_SPARK = {
    "startup": ["P15", "P16"],
    "feed_rdd": ["P08"],
    "feed_df": ["P09"],
    "feed_parts": ["P28"],
    "map_train": ["P27"],
    "accuracy": ["ACC"],
    "end_to_end": ["P29"],
    "collect_fit": ["COLLECT", "COLLECTm"],
    "inference": [*["P20"] * 15, "P20c"],
}
SPARK_EXECUTORS = 4
"""The most that one of them needs."""
OWN_SPARK = ("inference",)
"""Its reference imports TensorFlow once per executor, so at toy size it has one."""
KERAS_WORKERS = {
    "deepfm": ["P14", "P14c"],
    "row_lookahead": ["P23"],
}
"""Their workers are processes, each of which imports Keras."""
OTHERS = {
    # It limits TensorFlow to one thread, which must come before its first use.
    "apply": ["APPLY"] * 4,
    # The memory that its nodes take is a difference: others' memory, given back meanwhile, counts.
    "control_nodes": ["SIM"] * 14,
    "allreduce": ["P26"],
    "tfrecord": ["P10", "P10"],
    "calls": [*["CALLS"] * 6, *["PUSH"] * 2],
    "checkpoint": ["P19", "P18"],
    "compression": ["PACK"] * 3,
    "decode": ["DECODE", "DECODE-arrow"] * 3,
    "dense": ["P01", "P01", *["P01g"] * 4, "P02", "P02", "P03"],
    "driver": ["driver"] * 4,
    "feed_memory": ["P22"] * 4,
    "keras_step": ["P13"],
    "learning": ["LRN-async-2"],
    "load": ["LOAD", "SHAKE", "SHAKE"],
    "memory": ["P21", "P21"],
    "packed_learning": ["AUC-int8"],
    "parquet": ["P11"] * 4,
    "peers": ["P04"] * 3,
    "row_exchange": ["ROWS"] * 4,
    "scaling": ["P17", "steps", "steps"],
    "serving": ["P25", "P25p99"],
    "small": ["P05"],
    "sparse": ["P06", "P07"],
    "table_size": ["P24n", "P24n", "P24", "P24c", "P24f", "P24d", "P24r"],
}
ON_HDFS = {"hdfs": ["P12"]}
"""Run by tests/system/hdfs/test_benchmark.py, beside the other tests that have an HDFS."""


def printed_by(module: str, *arguments: str) -> list[dict[str, Any]]:
    """Run a module as a program; returns its JSON lines after checking the form of the figures."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYSPARK_PYTHON": sys.executable},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-500:] + result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        if "benchmark" not in line:
            assert set(line) >= FIELDS
            ours = line["ours"]
            assert 0 < ours["min"] <= ours["median"] <= ours["max"], line
    return lines
