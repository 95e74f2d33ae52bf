"""scripts/test_runner.py gives the groups of tests what a background command does not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import pathlib, signal, sys
from scripts.test_runner import Runner, Step

signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of a command that a shell starts with &
asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
runner = Runner(pathlib.Path(sys.argv[1]), ())
runner.run([Step("asks", (sys.executable, "-c", asks))])
"""


def test_a_group_hears_ctrl_c_although_the_runner_ignores_it(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "\nTrue\n" in run.stdout
