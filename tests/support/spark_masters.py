"""The kinds of Spark that tests run on: threads, executors as processes, a standalone cluster.

Covers: masters, contexts whose executors run this checkout, and a standalone master with workers.
Does not: the fixture `spark` (tests/system/spark/conftest.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import JVM_PAUSE_S, wait_until

pyspark = pytest.importorskip("pyspark")

REPO = Path(__file__).resolve().parents[2]
START_S = 200.0  # on a busy machine; less than a test may take
MASTER_PORT = r"Starting Spark master at spark://[^\s:]+:(\d+)"
WEB_PORT = r"MasterWebUI\b.* started at http://[^\s:]+:(\d+)"
STANDALONE = "standalone[3,1]"
MASTERS = (
    "local[4]",
    "local-cluster[3,1,1024]",  # a standalone master and its workers within the driver's JVM
    pytest.param(STANDALONE, marks=pytest.mark.long),  # eight JVMs
)

standalones: dict[str, Standalone] = {}
"""The running ones by the URL of their master, for tests that add workers."""


class Standalone:
    """A standalone master and 1-core workers on loopback, started from pip's pyspark."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._num_workers = 0
        # Ports of the system's choice: one that was free a moment ago may be taken by now.
        any_port = ["--port", "0", "--webui-port", "0"]
        self._start("master.Master", "--host", "127.0.0.1", *any_port)
        self.url = f"spark://127.0.0.1:{self._told(MASTER_PORT)}"
        self._web_port = self._told(WEB_PORT)

    def _told(self, pattern: str) -> int:
        """Return the port that the master's log names."""
        log = self._directory / "0.log"
        (port,) = wait_until(
            lambda: re.findall(pattern, log.read_text(errors="replace"))[:1],
            f"the master; see {log}",
            START_S,
            pause_s=JVM_PAUSE_S,
        )
        return int(port)

    def add_workers(
        self, count: int, *, host: str = "127.0.0.1", cores: int = 1, memory: str = "1g"
    ) -> None:
        """Start workers, by default of 1 core, and wait until the master knows them."""
        for _ in range(count):
            self._num_workers += 1
            work = self._directory / f"work-{self._num_workers}"
            place = ["--host", host, "--webui-port", "0", "-d", str(work)]
            self._start("worker.Worker", *place, "-c", str(cores), "-m", memory, self.url)
        wait_until(
            lambda: self._alive_workers() >= self._num_workers,
            f"{self._num_workers} workers; see {self._directory}",
            START_S,
            pause_s=JVM_PAUSE_S,
        )

    def _alive_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._web_port}/json/") as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError):  # the master is still starting
            return 0

    def _start(self, name: str, *options: str) -> None:
        home = Path(os.environ.get("SPARK_HOME", pyspark.__path__[0]))
        log = self._directory / f"{len(self._daemons)}.log"
        with log.open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    [home / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", *options],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        "SPARK_HOME": str(home),
                        "SPARK_DAEMON_MEMORY": "256m",
                        "SPARK_MASTER_OPTS": "-Dspark.master.rest.enabled=false",
                    },
                )
            )

    def stop(self) -> None:
        """End workers, then the master."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)


def make_context(master: str, **conf: str) -> Any:
    """Return a SparkContext whose executors run this interpreter with this checkout."""
    settings = pyspark.SparkConf(loadDefaults=False).setMaster(master).setAppName("tfos-test")
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.log.level": "ERROR",
        "spark.executor.heartbeatInterval": "1s",  # even traffic, where traffic is measured
        "spark.executorEnv.PYTHONPATH": str(REPO),
        **conf,
    }.items():
        settings.set(key, value)
    return pyspark.SparkContext(conf=settings)


def await_executors(sc: Any, count: int) -> None:
    """Wait until `count` executors have registered."""
    wait_until(
        lambda: sc._jsc.sc().getExecutorMemoryStatus().size() - 1 >= count,
        f"{count} executors",
        START_S,
        pause_s=JVM_PAUSE_S,
    )
