"""Every benchmark still works, at toy size; no time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tfos.bench import catalogue

ROOT = Path(__file__).parents[3]
AT_ONCE = 2
"""They are separate programs that wait much, for JVMs above all; their figures do not count."""
FIELDS = {"id", "name", "unit", "better", "ours", "reference", "ratio", "repeats", "command"}


def figures(name: str, *options: str) -> list[str]:
    """Run a benchmark and return the ids of its lines after checking their form."""
    program = [f"scripts.benchmarks.{name}"]
    if name in catalogue.NAMES:
        program = ["tfos", "bench", name, "--json"]
    result = subprocess.run(
        [sys.executable, "-m", *program, "--toy"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYSPARK_PYTHON": sys.executable},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-6000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        assert set(line) >= FIELDS
        assert line["ours"]["min"] <= line["ours"]["median"] <= line["ours"]["max"]
        assert line["ours"]["min"] > 0
    return [line["id"] for line in lines]


BENCHMARKS = {
    "accuracy": ["ACC"],
    "apply": ["APPLY"] * 4,
    "calls": [*["CALLS"] * 6, *["PUSH"] * 2],
    "checkpoint": ["P19", "P18"],
    "compression": ["PACK"] * 3,
    "decode": ["DECODE", "DECODE-arrow"] * 3,
    "dense": ["P01", "P01", *["P01g"] * 4, "P02", "P02", "P03"],
    "driver": ["driver"] * 4,
    "feed_df": ["P09"] * 3,
    "inference": ["P20"] * 2,
    "feed_memory": ["P22"] * 4,
    "feed_parts": ["P28"],
    "feed_rdd": ["P08"],
    "keras_step": ["P13"],
    "learning": ["LRN-async-2"],
    "load": ["LOAD", "SHAKE", "SHAKE"],
    "memory": ["P21", "P21"],
    "packed_learning": ["AUC-int8"],
    "peers": ["P04"] * 3,
    "scaling": ["P17", "steps", "steps"],
    "small": ["P05"],
    "sparse": ["P06", "P07"],
    "startup": ["P15", "P16"],
    "parquet": ["P11"] * 4,
    "tfrecord": ["P10", "P10"],
}
NEEDS_HDFS = {"hdfs": ["P12"]}
"""Run by tests/system/hdfs/test_benchmark.py, beside the other tests that have an HDFS."""


@pytest.mark.tf
@pytest.mark.spark
@pytest.mark.timeout(900)
def test_every_benchmark_works():
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {name: pool.submit(figures, name) for name in BENCHMARKS}
    assert {name: run.result() for name, run in running.items()} == BENCHMARKS


def test_no_benchmark_is_left_out():
    programs = (ROOT / "scripts" / "benchmarks").glob("*.py")
    of_the_checkout = {path.stem for path in programs if "\ndef main" in path.read_text()}
    modules = (ROOT / "tfos" / "bench").glob("*.py")
    shipped = {path.stem for path in modules if "\ndef run(bench" in path.read_text()}
    assert shipped == set(catalogue.NAMES)
    assert of_the_checkout | shipped == set(BENCHMARKS) | set(NEEDS_HDFS)
    assert not of_the_checkout & shipped
