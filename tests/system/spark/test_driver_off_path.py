"""The driver is off the data path: its sockets stay quiet, whatever the model's size."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from pathlib import Path

import pytest

from tests.support.plain_steps import PlainSteps
from tests.support.socket_bytes import process_tcp_bytes
from tests.support.waiting import wait_until
from tfos import InputMode, TFCluster

pytestmark = [pytest.mark.spark, pytest.mark.timeout(180)]

WINDOW_S = 2.0
WINDOWS = 3
# When a garbage collection of the driver's JVM finds them, broadcasts are removed.
ONCE_BYTES = 100_000
NODES = 3
# A window holds none, one or all of the executors' heartbeats (about 5 kB each, one in 10 s).
LIMIT_BYTES_S = 2048 * NODES
GROWTH_BYTES_S = 1024 * NODES


def _steps(args, ctx):
    steps = PlainSteps(ctx, args["num_elements"])
    while not os.path.exists(args["stop_file"]):
        steps.step()
        ctx.report_progress(step=steps.count, rows=steps.count, loss=0.0)
        if steps.count == 3:
            Path(f"{args['stop_file']}.{ctx.task_index}").touch()


def _measure(spark, tmp_path: Path, num_elements: int) -> tuple[float, float]:
    """Return median bytes per second of the driver's Python and of its JVM during steps."""
    stop_file = tmp_path / f"stop-{num_elements}"
    args = {"num_elements": num_elements, "stop_file": str(stop_file)}
    jvm = spark._gateway.proc.pid
    with TFCluster.reserve(
        spark, cluster_size=NODES, num_ps=1, input_mode=InputMode.TENSORFLOW
    ) as cluster:
        cluster.start(_steps, args)
        wait_until(
            lambda: len(list(tmp_path.glob(f"{stop_file.name}.*"))) == 2,
            "steps of both workers",
            90,
        )
        counts = {pid: [_counted(pid)] for pid in (os.getpid(), jvm)}
        for _ in range(WINDOWS):
            threading.Event().wait(WINDOW_S)
            for pid, seen in counts.items():
                seen.append(_counted(pid))
        stop_file.touch()
    return _median_rate(counts[os.getpid()]), _median_rate(counts[jvm])


def _counted(pid: int) -> tuple[float, int]:
    """Return the time in s and the bytes that a process has sent and received until then."""
    return time.monotonic(), process_tcp_bytes(pid)


def _median_rate(counts: list[tuple[float, int]]) -> float:
    windows = [(end - start, new - old) for (start, old), (end, new) in itertools.pairwise(counts)]
    assert max(num_bytes for _, num_bytes in windows) < ONCE_BYTES, windows
    return statistics.median(num_bytes / seconds for seconds, num_bytes in windows)


@pytest.mark.parametrize("spark", ["local-cluster[3,1,1024]"], indirect=True)
def test_driver_traffic_is_small_and_does_not_grow_with_the_model(spark, tmp_path):
    small_python, small_jvm = _measure(spark, tmp_path, 1_000_000)  # 4 MB
    large_python, large_jvm = _measure(spark, tmp_path, 5_000_000)  # 20 MB
    figures = (
        f"bytes/s with 4 MB and 20 MB of parameters: python {small_python:.0f}, "
        f"{large_python:.0f}; "
        f"jvm {small_jvm:.0f}, {large_jvm:.0f}"
    )
    assert max(small_python, large_python) < LIMIT_BYTES_S, figures
    assert large_jvm - small_jvm < GROWTH_BYTES_S, figures
