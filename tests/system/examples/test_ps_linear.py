"""The example without Spark and TensorFlow: two servers, two workers, least squares."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "ps_linear.py"

pytestmark = pytest.mark.process


@pytest.mark.parametrize("consistency", [pytest.param("async", marks=pytest.mark.long), "sync"])
def test_the_weights_match_least_squares(consistency: str):
    steps = 150
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), "--consistency", consistency, "--steps", str(steps)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "weights match least squares" in result.stdout
    losses = [float(loss) for loss in re.findall(r"worker:0 .* loss ([\d.]+)", result.stdout)]
    assert losses[-1] < 0.05 < losses[0]
    pushes = f"worker:0 {steps} pushes, worker:1 {steps} pushes"
    assert result.stdout.count(pushes) == 2, "both servers took every push of both workers"
    assert result.stderr == ""
