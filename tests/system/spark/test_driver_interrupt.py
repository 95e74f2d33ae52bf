"""F15 and F16 from outside: Ctrl-C in a running driver, and a driver that forgets shutdown()."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import secrets
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ps.checkpoint.choice import newest_sound
from tests.support.marked_processes import MARKER, wait_gone
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.spark, pytest.mark.timeout(480, func_only=True)]

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = Path(__file__).parents[2] / "support" / "programs" / "interrupted_driver.py"
ABORT_S = 30.0
"""The product's own abort_s is 10 s; the rest is for a loaded machine."""
IMMEDIATE_S = 15.0
"""Far below the abort_s of 60 s that the program's phase `save` has."""
LEASE_S = 30.0
LONGEST_START_S = 2.0


class Driver:
    """The program in a process of its own; its errors go to a file, so that it never blocks.

    Args:
        end: its first argument, behind "submit " by spark-submit and in a terminal. Others have
            none, whose end would tell all of their processes to end.
        directory: of its files.
    """

    def __init__(self, end: str, directory: Path) -> None:
        launcher, take_terminal = sys.executable, None
        self._keyboard, terminal = os.openpty()
        if end.startswith("submit "):
            launcher = f"{os.environ['SPARK_HOME']}/bin/spark-submit"
            take_terminal = partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0)
        self.mark = secrets.token_hex(8)
        self.save_dir = directory / "saved"
        self._errors = directory / "errors"
        with self._errors.open("wb") as out:
            self.process = subprocess.Popen(
                [launcher, str(PROGRAM), end.removeprefix("submit "), str(self.save_dir)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env={
                    **os.environ,
                    "PYSPARK_PYTHON": sys.executable,
                    "PYTHONPATH": str(ROOT),
                    MARKER: self.mark,
                },
                start_new_session=True,
                preexec_fn=take_terminal,
            )
        os.close(terminal)
        self.lines: list[str] = []

    def read_until(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith(word):
                return line.strip()
        raise AssertionError(f"no {word!r} in {self.lines}: {self.errors()}")

    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    def enter(self, phase: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{phase}\n")
        self.process.stdin.flush()
        self.read_until("ready")

    def interrupt(self, within_s: float = ABORT_S) -> str:
        """Send Ctrl-C; returns the phase in which the program then finds its cluster."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        phase = self.read_until("interrupted").split()[1]
        assert time.monotonic() - started < within_s
        assert self.read_until("sum") == "sum 45"
        assert "another handler" not in self.lines
        return phase

    def press_ctrl_c(self) -> None:
        """Have the program's terminal send SIGINT to all processes in its foreground."""
        os.write(self._keyboard, b"\x03")

    @property
    def pids(self) -> list[int]:
        line = next(line for line in self.lines if line.startswith("pids "))
        return [int(pid) for pid in line.split()[1:]]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        os.close(self._keyboard)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Driver]:
    started = Driver(request.param, tmp_path)
    yield started
    started.close()


def _await_gone(pids: list[int], within_s: float) -> None:
    wait_until(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "their end", within_s
    )


def _interrupt_starts(driver: Driver, count: int) -> None:
    seed = secrets.randbits(32)
    moments = random.Random(seed)
    pulse = threading.Event()
    for _ in range(count):
        after_s = moments.uniform(0.0, LONGEST_START_S)
        driver.enter("start")
        pulse.wait(after_s)
        assert driver.interrupt() in ("NONE", "CLOSED", "FAILED"), f"seed {seed}, {after_s:.3f} s"


def _interrupt_a_save(driver: Driver) -> None:
    """Ctrl-C, then once more while the last save is under way: whole in the end, or not there."""
    directory = Path(f"{driver.save_dir}-held")
    driver.enter("save")
    driver.process.send_signal(signal.SIGINT)
    driver.read_until("committing")
    assert driver.interrupt(IMMEDIATE_S) in ("RUNNING", "FAILED")
    assert not list(directory.glob("step-*"))
    Path(f"{directory}-let-go").touch()
    wait_until(lambda: list(directory.glob("step-*")), "the save", ABORT_S)
    assert newest_sound(directory).step > 0
    assert not list(directory.glob(".tmp-*"))


@pytest.mark.fault("F15")
@pytest.mark.parametrize("driver", ["rounds"], indirect=True)
def test_ctrl_c_stops_the_cluster_in_order_and_the_program_goes_on(driver):
    driver.enter("reserve")
    assert driver.interrupt() == "NONE"
    for phase in ("train", "shutdown"):
        driver.enter(phase)
        # FAILED if pyspark's own handler had cancelled the node jobs before we heard of Ctrl-C.
        assert driver.interrupt() in ("CLOSED", "FAILED")
    assert not driver.save_dir.exists()  # no parameters were made in these
    driver.enter("steps")
    driver.interrupt()
    saved = newest_sound(driver.save_dir)
    assert saved.step > 0
    assert f"saved the parameters after {saved.step} updates to" in driver.errors()
    _interrupt_a_save(driver)
    # SIGTERM kills Python at once, and Spark's JVM ends with it.
    driver.enter("idle")
    driver.process.terminate()
    assert driver.process.wait(ABORT_S) == -signal.SIGTERM
    assert wait_gone(driver.mark, LEASE_S) == {}


@pytest.mark.fault("F15")
@pytest.mark.parametrize("driver", ["submit steps"], indirect=True)
def test_ctrl_c_in_the_terminal_of_spark_submit_saves_and_leaves_spark_to_the_program(driver):
    """A terminal sends it to the JVM, too."""
    driver.read_until("ready")
    driver.press_ctrl_c()
    driver.read_until("interrupted")
    assert driver.read_until("sum") == "sum 45"
    assert newest_sound(driver.save_dir).step > 0
    assert driver.process.wait(ABORT_S) == 0, driver.errors()


@pytest.mark.long
@pytest.mark.fault("F15")
@pytest.mark.parametrize("driver", ["rounds"], indirect=True)
def test_ctrl_c_at_many_moments_of_the_start(driver):
    _interrupt_starts(driver, 20)


@pytest.mark.long
@pytest.mark.fault("F16")
@pytest.mark.parametrize("driver", ["forget"], indirect=True)
def test_a_driver_that_never_shuts_down_ends_and_takes_its_nodes_with_it(driver):
    driver.read_until("ready")
    assert driver.process.wait(2 * ABORT_S) == 0, driver.errors()
    _await_gone(driver.pids, ABORT_S)
