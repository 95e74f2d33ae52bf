"""scripts/demo --yarn as a user runs it: both deploy modes, everything on HDFS, nothing left."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.marked_processes import below, kill
from tests.support.spark_submit import ROOT, number

TIMEOUT_S = 540.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + 30, func_only=True)]


@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_the_demo_trains_on_yarn(mode: str, tmp_path: Path):
    try:
        done = subprocess.run(
            [ROOT / "scripts" / "demo", f"--yarn={mode}", "--epochs", "2"],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except BaseException:
        kill(below(tmp_path))
        raise
    output = done.stdout
    assert done.returncode == 0, output[-6000:]
    assert number(output, r"test accuracy: (\d\.\d+)") > 0.85
    for epoch in (1, 2):
        assert f"epoch {epoch} of 2: 4000 rows fed, 4000 trained, 0 dropped" in output
    assert "checkpoints go to hdfs:///demo/model/checkpoints" in output
    assert "TensorBoard's files go to hdfs:///demo/model/logs" in output
    assert "model saved: hdfs:///demo/export/model.keras" in output
    assert "TensorBoard: http://" in output
    assert below(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
