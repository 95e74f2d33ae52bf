"""Programs run by spark-submit as users run them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "mnist"
TIMEOUT_S = 280
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of JVMs that live shortly on a few cores."""


def separate(executors: int) -> str:
    """Return the master with so many executors, each a process of its own with one core."""
    return f"local-cluster[{executors},1,1024]"


def submit(
    program: Path, *flags: str, master: str = "", cwd: Path, timeout_s: float = TIMEOUT_S
) -> str:
    """Run a program, on three separate executors by default.

    Returns what it printed, or fails with it.
    """
    spark_home = Path(os.environ["SPARK_HOME"])
    run = subprocess.Popen(
        [
            *(str(spark_home / "bin" / "spark-submit"), "--master"),
            *(master or separate(3), "--driver-memory", "512m"),
            *("--conf", "spark.ui.enabled=false", "--conf", "spark.executor.memory=512m"),
            *(str(program), *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(ROOT),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
        start_new_session=True,  # so that all of it can be ended: driver, JVM and executors
    )
    try:
        output, _ = run.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(run.pid, signal.SIGKILL)
        output, _ = run.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        pytest.fail(f"{program.name} goes on after {timeout_s:.0f} s:\n{output[-8000:]}")
    assert run.returncode == 0, output[-8000:]
    return output


def number(output: str, pattern: str) -> float:
    """Return the number that `pattern` finds in the output."""
    found = re.search(pattern, output)
    assert found, f"no {pattern!r} in:\n{output[-8000:]}"
    return float(found[1])
