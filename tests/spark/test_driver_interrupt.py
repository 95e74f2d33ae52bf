"""F15 and F16 from outside: Ctrl-C in a running driver, and a driver that forgets shutdown()."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.marked_processes import MARKER, wait_gone

pytestmark = [pytest.mark.spark, pytest.mark.timeout(240, func_only=True)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("interrupted_driver.py")
START_S = 100.0
ABORT_S = 10.0
GONE_S = 5.0
"""A supervisor says goodbye, then removes its files and ends; longer on a loaded machine."""


class Driver:
    def __init__(self, *arguments: str) -> None:
        self.mark = secrets.token_hex(8)
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYSPARK_PYTHON": sys.executable, MARKER: self.mark},
        )
        self.lines: list[str] = []

    def read_until(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith(word):
                return line.strip()
        raise AssertionError(f"no {word!r} in {self.lines}: {self.errors()}")

    def errors(self) -> str:
        return self.process.stderr.read() if self.process.stderr is not None else ""

    @property
    def pids(self) -> list[int]:
        line = next(line for line in self.lines if line.startswith("pids "))
        return [int(pid) for pid in line.split()[1:]]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Iterator[Driver]:
    started = Driver(*request.param)
    yield started
    started.close()


def _await_gone(pids: list[int], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


@pytest.mark.fault("F15")
@pytest.mark.parametrize(
    "driver", [(phase, "wait") for phase in ("idle", "train", "shutdown")], indirect=True
)
def test_ctrl_c_stops_the_cluster_in_order_and_leaves_the_context(driver):
    driver.read_until("ready")
    started = time.monotonic()
    driver.process.send_signal(signal.SIGINT)
    # FAILED if pyspark's own handler had cancelled the node jobs before we heard of Ctrl-C.
    assert driver.read_until("interrupted").split()[1] in ("CLOSED", "FAILED")
    assert time.monotonic() - started < ABORT_S
    assert driver.read_until("sum") == "sum 45"
    errors = driver.errors()
    assert driver.process.wait(ABORT_S) != 0
    assert "KeyboardInterrupt" in errors
    assert wait_gone(driver.mark, GONE_S) == {}


@pytest.mark.fault("F16")
@pytest.mark.parametrize("driver", [("idle", "forget")], indirect=True)
def test_a_driver_that_never_shuts_down_ends_and_takes_its_nodes_with_it(driver):
    driver.read_until("ready")
    errors = driver.errors()
    assert driver.process.wait(2 * ABORT_S) == 0, errors
    _await_gone(driver.pids, ABORT_S)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("driver", [("idle", "stop-context")], indirect=True)
def test_a_stopped_context_fails_the_cluster_by_name_and_leaves_nothing(driver):
    assert "SparkContext was shut down" in driver.read_until("stopped")
    errors = driver.errors()
    assert driver.process.wait(ABORT_S) == 0, errors
    assert wait_gone(driver.mark, GONE_S) == {}
