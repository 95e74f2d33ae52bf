"""The example of sparse tables without Spark and TensorFlow: two servers, two workers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "ps_tables.py"


@pytest.mark.process
@pytest.mark.timeout(150)
def test_two_workers_learn_the_factors_together():
    result = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [
        tuple(map(int, found))
        for found in re.findall(r"user (\d+) rows, item (\d+)", result.stdout)
    ]
    assert [sum(column) for column in zip(*rows, strict=True)] == [300, 200]
    assert all(count > 50 for server in rows for count in server), "both servers hold their share"
    assert result.stderr == ""
