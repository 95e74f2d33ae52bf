"""Ctrl-C in scripts/demo, as a terminal sends it: an answer at once, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests.support.marked_processes import below, kill
from tests.support.spark_submit import ROOT

TIMEOUT_S = 300.0
END_S = 60.0
"""For the nodes, Spark and its executors after Ctrl-C."""
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_S + END_S, func_only=True)]


def test_ctrl_c_in_the_demo_is_answered_and_leaves_nothing(tmp_path: Path):
    demo = subprocess.Popen(
        [ROOT / "scripts" / "demo", "--epochs", "50"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    lines: list[str] = []
    seen = threading.Condition()

    def read() -> None:
        assert demo.stdout is not None
        for line in demo.stdout:
            with seen:
                lines.append(line)
                seen.notify_all()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        with seen:
            has_begun = seen.wait_for(
                lambda: any(line.startswith("tfos | epoch 1") for line in lines), TIMEOUT_S
            )
        assert has_begun, "".join(lines)[-4000:]
        interrupted_s = time.monotonic()
        os.killpg(demo.pid, signal.SIGINT)  # all processes of the terminal get it
        assert demo.wait(END_S) == 130, "".join(lines)[-4000:]
    finally:
        kill(below(tmp_path))
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGKILL)
            demo.wait()
        reader.join(END_S)
        if demo.stdout is not None:
            demo.stdout.close()
    output = "".join(lines)
    assert time.monotonic() - interrupted_s < END_S
    assert output.count("Ctrl-C: the nodes end, which takes some seconds\n") == 1
    assert re.search(r"^demo: interrupted after \d+ s$", output, re.MULTILINE), output[-4000:]
    after = output.partition("Ctrl-C: the nodes end")[2]
    assert "Traceback" not in after, after[-4000:]
    assert below(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []
