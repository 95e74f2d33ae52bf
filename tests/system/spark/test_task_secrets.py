"""Nothing that Spark writes holds a cluster's secret: files of closures, shuffles, event logs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(300)]
ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "support" / "programs" / "search_for_secret.py"


def test_neither_large_closures_nor_an_event_log_show_the_secret(tmp_path):
    run = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    *found, searched = [line for line in run.stdout.splitlines() if "tfos |" not in line]
    assert searched.startswith("searched ")
    assert not searched.endswith(" 0 of event logs")
    assert found == []
    written = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert written, "the event log is there"
