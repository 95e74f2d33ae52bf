"""Nothing is left behind, whatever ends the program: no process, port, shared memory or directory.

Each case runs a whole driver program in its own process, ends it in one way, and
then counts what is left by a marker in the environment, which every descendant inherits.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.feed import eventually
from tests.support.marked_processes import MARKER, kill, marked, wait_gone
from tests.support.named_memory import left_since, named
from tfos import ClusterConfig

pytestmark = [pytest.mark.process, pytest.mark.spark, pytest.mark.timeout(240)]

THREADS, EXECUTORS = "local[4]", "local-cluster[1,3,1024]"
APP = Path(__file__).parents[2] / "support" / "programs" / "driver_app.py"
START_S = 140.0
SHORT_LEASE_S = 6.0  # what a supervisor does when it has passed is the same
LEASE_BOUND_S = 40.0  # G3: nothing outlives its driver by more than 30 s, and the JVM's own end


class App:
    """One running driver program, its scratch directory and its marker."""

    def __init__(self, tmp: Path, master: str, lease_s: float) -> None:
        self.mark = secrets.token_hex(8)
        self.named_before = named()
        self.tmp = tmp
        self.stop_file = tmp / "stop"
        self.scratch = tmp / "scratch"
        self.scratch.mkdir()
        self.output = tmp / "output.txt"
        submit_args = (
            f"--master {master} --conf spark.ui.enabled=false "
            "--conf spark.executor.memory=512m --driver-memory 512m "
            "--conf spark.driver.host=127.0.0.1 pyspark-shell"
        )
        environ = {
            **os.environ,
            MARKER: self.mark,
            "TMPDIR": str(self.scratch),
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_SUBMIT_ARGS": submit_args,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_WORKER_DIR": str(self.scratch),
            "PYTHONPATH": str(APP.parents[3]),
        }
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(APP), str(self.stop_file), str(lease_s)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environ,
                start_new_session=True,
            )

    def wait_for(self, word: str, timeout_s: float) -> None:
        """Wait until the program has printed `word`."""
        deadline = time.monotonic() + timeout_s
        while word not in self.text():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"no {word!r}; the program printed:\n{self.text()[-6000:]}")
            psutil.wait_procs([psutil.Process(self.process.pid)], timeout=0.1)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def jvm_pids(self) -> list[int]:
        """The driver's own JVM: the java child of the driver program."""
        found = []
        for pid, command in marked(self.mark).items():
            if "SparkSubmit" in command and "java" in command:
                found.append(pid)
        return found

    def leftovers(self) -> list[str]:
        """Files of ours in the scratch directory, and named memory that no process uses."""
        ours = [str(path) for path in self.scratch.glob("tfos*")]
        return ours + sorted(left_since(self.named_before, 10.0))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator:
    apps: list[App] = []

    def start(master: str, lease_s: float) -> App:
        apps.append(App(tmp_path, master, lease_s))
        return apps[-1]

    yield start
    for app in apps:
        kill(marked(app.mark))
        app.process.wait(timeout=20)


def _end_success(app: App) -> None:
    app.stop_file.touch()


def _end_failure(app: App) -> None:
    app.stop_file.with_name(f"{app.stop_file.name}-fail").touch()


def _end_interrupt(app: App) -> None:
    os.kill(app.process.pid, signal.SIGINT)


def _kill_driver_whole(app: App) -> None:
    for pid in [app.process.pid, *app.jvm_pids()]:
        os.kill(pid, signal.SIGKILL)


def _kill_driver_python(app: App) -> None:
    os.kill(app.process.pid, signal.SIGKILL)


def _kill_driver_jvm(app: App) -> None:
    (jvm,) = app.jvm_pids()
    os.kill(jvm, signal.SIGKILL)


@pytest.mark.parametrize(
    ("master", "how", "expected"),
    [
        pytest.param(THREADS, _end_success, "ENDED", marks=pytest.mark.long),
        pytest.param(THREADS, _end_failure, "here this program fails", marks=pytest.mark.long),
        pytest.param(THREADS, _end_interrupt, "KeyboardInterrupt", marks=pytest.mark.long),
        pytest.param(EXECUTORS, _kill_driver_whole, "", marks=pytest.mark.fault("F13")),
        pytest.param(
            THREADS, _kill_driver_python, "", marks=(pytest.mark.fault("F13"), pytest.mark.long)
        ),
        pytest.param(
            EXECUTORS, _kill_driver_jvm, "", marks=(pytest.mark.fault("F13"), pytest.mark.long)
        ),
    ],
    ids=["success", "failure", "ctrl-c", "kill-driver", "kill-driver-python", "kill-driver-jvm"],
)
def test_nothing_is_left_behind(launch, master, how, expected):
    lease_s = ClusterConfig().lease_s if how is _kill_driver_whole else SHORT_LEASE_S
    app = launch(master, lease_s)
    app.wait_for("READY", timeout_s=START_S)
    # A process whose `execve` is under way has no environment yet.
    everybody = "driver, JVM, three supervisors and their children"
    eventually(lambda: len(marked(app.mark)) >= 8, everybody)
    how(app)
    app.process.wait(timeout=LEASE_BOUND_S)
    left = wait_gone(app.mark, LEASE_BOUND_S)
    assert left == {}, f"processes left after {LEASE_BOUND_S:.0f} s; printed:\n{app.text()[-4000:]}"
    assert app.leftovers() == []
    assert expected in app.text()
