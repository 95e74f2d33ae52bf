"""F15 in a notebook: tables, one live display, and an interrupt that kernel and cluster survive.

The cells run in a kernel, as Jupyter runs them. The last one stops Spark below a running cluster.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.marked_processes import MARKER, wait_gone

pytestmark = [pytest.mark.process, pytest.mark.spark, pytest.mark.timeout(240, func_only=True)]

ROOT = Path(__file__).resolve().parents[3]
CELL_S = 90.0
GONE_S = 20.0
"""A supervisor says goodbye, then removes its files and ends."""

START = """
    import time, pyspark
    from tfos import ClusterConfig, InputMode, TFCluster
    from tfos.errors import NodeFailedError

    def consume(args, ctx):
        ctx.ps_client()  # this test is about rows: nothing is learned
        feed = ctx.get_data_feed()
        taken = 0
        while not feed.should_stop():
            rows = feed.next_batch(1)
            taken += len(rows)
            ctx.report_progress(taken, taken, loss=0.5)
            time.sleep(0.2 if rows and rows[0] >= 1000 else 0.0)

    conf = pyspark.SparkConf().setMaster("local[4]").set("spark.ui.enabled", "false")
    conf.set("spark.log.level", "ERROR").set("spark.driver.host", "127.0.0.1")
    conf.set("spark.ui.showConsoleProgress", "false")
    sc = pyspark.SparkContext(conf=conf)
    config = ClusterConfig(max_inflight_bytes=4096)
    cluster = TFCluster.reserve(sc, 2, 1, input_mode=InputMode.SPARK, config=config)
    cluster.start(consume)
    cluster
"""
TRAIN = "cluster.train(sc.parallelize(range(100), 2), num_epochs=2)"
SLOW = "cluster.train(sc.parallelize(range(1000, 100_000), 2), num_epochs=1)"
STATUS = "cluster.status()"
AFTER = "print(cluster.phase.name, sc.parallelize(range(10), 2).sum())"
STOP = """
    sc.stop()
    try:
        cluster.shutdown(timeout=30)
    except NodeFailedError as error:
        print("stopped", error)
"""


@pytest.fixture(autouse=True)
def python_handles_interrupts() -> Iterator[None]:
    """Python's handler is what asyncio leaves; pyspark has another since a test before this one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Notebook:
    """A notebook with a running kernel."""

    def __init__(self, client: NotebookClient) -> None:
        self._client = client
        self._number = 0

    async def run(self, source: str) -> list[Any]:
        """Run one cell; return its outputs."""
        cell = self._add(source)
        await self._client.async_execute_cell(cell, self._number - 1)
        return cell.outputs

    async def interrupt(self, source: str, shown: Callable[[list[Any]], bool]) -> list[Any]:
        """Run one cell and interrupt the kernel once the cell shows something."""
        cell = self._add(source)
        running = asyncio.create_task(self._client.async_execute_cell(cell, self._number - 1))
        deadline = time.monotonic() + CELL_S
        while not shown(cell.outputs):
            assert time.monotonic() < deadline, cell.outputs
            assert not running.done(), cell.outputs
            await asyncio.sleep(0.05)
        await self._client.km.interrupt_kernel()
        await running
        return cell.outputs

    def _add(self, source: str) -> Any:
        cell = nbformat.v4.new_code_cell(textwrap.dedent(source))
        self._client.nb.cells.append(cell)
        self._number += 1
        return cell


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The environment of the kernel, and the mark of every process that it leads to."""
    mark = secrets.token_hex(8)
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        monkeypatch.setenv(name, sys.executable)
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(MARKER, mark)
    return mark


def texts(outputs: list[Any], kind: str) -> list[str]:
    """The outputs that a front end would show as this kind."""
    return [each.data[kind] for each in outputs if "data" in each and kind in each.data]


def printed(outputs: list[Any], stream: str = "stdout") -> str:
    return "".join(each.text for each in outputs if each.get("name") == stream)


def is_training(outputs: list[Any]) -> bool:
    return any("rows/s" in text for text in texts(outputs, "text/plain"))


async def play(client: NotebookClient) -> None:
    async with client.async_setup_kernel():
        book = Notebook(client)
        shown = texts(await book.run(START), "text/plain")[-1]
        assert shown.startswith("TFCluster(")
        progress, report = texts(await book.run(TRAIN), "text/html")
        assert progress.count("100 rows fed, 100 trained") == 2
        assert "loss 0.5" in progress
        assert report.startswith("<table")
        assert "epoch 2 of input" in report
        (status,) = texts(await book.run(STATUS), "text/html")
        assert "<b>cluster" in status
        assert "worker:0" in status

        interrupted = await book.interrupt(SLOW, is_training)
        assert [each.ename for each in interrupted if each.output_type == "error"] == [
            "KeyboardInterrupt"
        ]
        assert len(texts(interrupted, "text/html")) == 1
        # The kernel, the context and the cluster live; a stopped context ends the nodes by name.
        assert printed(await book.run(AFTER)) == "RUNNING 45\n"
        stopped = await book.run(STOP)
        assert "SparkContext was shut down" in printed(stopped)


@pytest.mark.fault("F15")
def test_a_notebook_shows_tables_and_survives_an_interrupt(mark):
    notebook = nbformat.v4.new_notebook()
    client = NotebookClient(notebook, timeout=CELL_S, kernel_name="python3", allow_errors=True)
    asyncio.run(play(client))
    assert wait_gone(mark, GONE_S) == {}
