"""Every benchmark still works, at toy size; no time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIELDS = {"id", "name", "unit", "better", "ours", "reference", "ratio", "repeats", "command"}


def figures(name: str) -> list[str]:
    """Run a benchmark and return the ids of its lines after checking their form."""
    result = subprocess.run(
        [sys.executable, "-m", f"scripts.benchmarks.{name}", "--toy"],
        capture_output=True,
        text=True,
        timeout=110,
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


@pytest.mark.slow
def test_dense():
    assert figures("dense") == ["P01", "P01", "P01g", "P01g", "P02", "P02", "P03"]


@pytest.mark.slow
def test_small():
    assert figures("small") == ["P05"]


@pytest.mark.slow
def test_checkpoint():
    assert figures("checkpoint") == ["P19"]


@pytest.mark.slow
def test_learning():
    assert figures("learning") == ["LRN-async-2"]


@pytest.mark.tf
def test_apply():
    assert figures("apply") == ["APPLY"] * 4


@pytest.mark.tf
def test_sparse():
    assert figures("sparse") == ["P06", "P07"]


@pytest.mark.tf
def test_keras_step():
    assert figures("keras_step") == ["P13"]


@pytest.mark.spark
def test_feed_rdd():
    assert figures("feed_rdd") == ["P08"]


@pytest.mark.spark
def test_startup():
    assert figures("startup") == ["P15", "P16"]


@pytest.mark.spark
def test_accuracy():
    assert figures("accuracy") == ["ACC"]
