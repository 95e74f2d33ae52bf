"""A local YARN for tests, programs that they submit to it, and what those leave."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import pyspark
import pytest

from feeding.filesystem.registry import filesystem_for
from scripts.local_hdfs.errors import MissingTool
from scripts.local_hdfs.yarn import LocalYarn
from tests.support.marked_processes import below
from tests.support.spark_submit import QUICK_JVM, ROOT

TIMEOUT_S = 400.0
_TITLE = re.compile(r" (tfos \S+) ?$")
"""The last argument of a node's process; see tfos.node.bootstrap."""
CONF = {
    "spark.yarn.am.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.executorEnv.PYTHONPATH": str(ROOT),
    "spark.yarn.appMasterEnv.PYTHONPATH": str(ROOT),
    "spark.yarn.appMasterEnv.PYSPARK_PYTHON": sys.executable,
}

Yarn = TypeVar("Yarn", bound=LocalYarn)


@contextlib.contextmanager
def local_yarn(directory: Path, kind: type[Yarn], *, kerberos: bool = False) -> Iterator[Yarn]:
    """Start a YARN, and end it; a host without Java or Maven skips the test.

    Args:
        directory: for all of its files; made.
        kind: its class.
        kerberos: whether it asks for Kerberos.
    """
    try:
        running = kind.started(directory, num_datanodes=1, with_parent=True, kerberos=kerberos)
    except MissingTool as missing:
        pytest.skip(str(missing))
    with running:
        yield running


class Submission:
    """A program that runs on a local YARN, until the end of the `with` block at the latest.

    Args:
        yarn: where.
        program: of the tests, or a file that a test has written.
        arguments: of the program.
        mode: Spark's deploy mode; in cluster mode the program's own output is in its container.
        executors: how many YARN is asked for.
        conf: further settings of Spark.
    """

    def __init__(
        self,
        yarn: LocalYarn,
        program: Path,
        *arguments: str,
        mode: str = "client",
        executors: int = 3,
        conf: dict[str, str] | None = None,
    ) -> None:
        of_pyspark = Path(pyspark.__file__).parent
        java = " ".join([QUICK_JVM, *yarn.java_options])
        own = {"spark.yarn.jars": f"local:{of_pyspark}/jars/*"}
        own |= {
            f"spark.{part}.extraJavaOptions": java for part in ("driver", "executor", "yarn.am")
        }
        settings = {**CONF, **own, "spark.executor.instances": str(executors), **(conf or {})}
        flags = [f"--conf={key}={value}" for key, value in settings.items()]
        # Not the tests' SPARK_HOME: YARN is sent pyspark.zip, which is a directory there.
        places = {"SPARK_HOME": str(of_pyspark), "HADOOP_CONF_DIR": str(yarn.conf_dir)}
        python = {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
        command = [f"{of_pyspark}/bin/spark-submit", "--master=yarn", f"--deploy-mode={mode}"]
        self._output = yarn.directory / f"submitted-{program.stem}.log"
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*command, *flags, str(program), *arguments],
                env={**os.environ, **places, **python, "JAVA_TOOL_OPTIONS": java},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that driver and JVM can be ended together
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if not self.has_ended:  # it would ask for its application as long as nobody answers
            self.kill()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Return its exit status once it has ended, within so many seconds."""
        return self._process.wait(timeout_s)

    @property
    def has_ended(self) -> bool:
        """Whether spark-submit has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End spark-submit, in client mode with the driver, without warning."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        """Return what spark-submit has printed."""
        return self._output.read_text(errors="replace")

    def told(self) -> str:
        """Return what spark-submit has printed without Spark's own progress."""
        return "".join(
            line for line in self.output().splitlines(keepends=True) if " INFO " not in line[:30]
        )


def submitted(yarn: LocalYarn, program: Path, *arguments: str, **options: Any) -> str:
    """Run a program to its end; return what spark-submit printed. Arguments as of Submission."""
    with Submission(yarn, program, *arguments, **options) as run:
        assert run.wait() == 0, run.output()[-6000:] + logs(yarn)
        return run.output()


def logs(yarn: LocalYarn) -> str:
    """Return the ends of the containers' output."""
    found = sorted(yarn.directory.glob("node-*/logs/*/*/std*"))
    return "".join(
        f"\n== {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in found
    )


def nodes_left(yarn: LocalYarn) -> list[str]:
    """Return the titles of tfos' processes below YARN's directory: supervisors and children."""
    titles = (_TITLE.search(line) for line in below(yarn.directory).values())
    return [title[1] for title in titles if title]


def told(path: str) -> Any:
    """Return what a program has written as JSON."""
    with filesystem_for(path).open(path) as file:
        return json.loads(file.read_range(0, file.size_bytes))


def masters(yarn: LocalYarn) -> list[int]:
    """Return the processes of the ApplicationMasters; in cluster mode of the drivers."""
    named = (".yarn.ApplicationMaster ", ".yarn.ExecutorLauncher ")
    return [
        pid
        for pid, line in below(yarn.directory).items()
        if any(name in line for name in named) and "bash" not in line.split()[0]
    ]


def applications(yarn: LocalYarn) -> list[dict[str, Any]]:
    """Return what the ResourceManager says of all applications."""
    with urllib.request.urlopen(f"{yarn.page}/ws/v1/cluster/apps", timeout=10) as answer:
        return (json.load(answer).get("apps") or {}).get("app", [])


def kill_application(yarn: LocalYarn) -> None:
    """Do what `yarn application -kill` does with the one that runs."""
    (running,) = [each for each in applications(yarn) if each["finalStatus"] == "UNDEFINED"]
    url = f"{yarn.page}/ws/v1/cluster/apps/{running['id']}/state?user.name={running['user']}"
    request = urllib.request.Request(
        url, b'{"state": "KILLED"}', {"Content-Type": "application/json"}, method="PUT"
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status in (200, 202), answer.status
