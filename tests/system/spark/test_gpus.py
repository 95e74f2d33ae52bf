"""GPUs that Spark schedules, simulated: workers see those of their task."""

from __future__ import annotations

import json

import pytest

from tests.support.spark_submit import ROOT, submit

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(300)]


def test_workers_see_the_gpus_of_their_task(tmp_path):
    program = ROOT / "tests" / "support" / "programs" / "shows_gpus.py"
    output = submit(program, str(tmp_path), cwd=tmp_path)
    lines = [line.partition("SEEN ")[2] for line in output.splitlines()]
    seen = [json.loads(line) for line in lines if line]
    assert seen == [["gpu", ["4,GPU-5"] * 2], [None, ["-1"] * 2]]
