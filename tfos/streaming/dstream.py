"""End of a DStream at a cluster's shutdown: rows are trained until the stream has its end.

Covers: the wait for the stream's end or STOP, its progress, the graceful stop.
Does not: feed the batches (tfos.feed.entry), stop nodes (tfos.driver.shutdown), handle Structured
Streaming (tfos.streaming.streaming).
Runs in: the driver.      Threads: the one that runs shutdown().

STOP, as in TensorFlowOnSpark, is the first main_fun that reads no more rows: it has called
`feed.terminate()`, or returned; or it is `cluster.server.stop()`, or another process
of the user that asks for it (tfos.watch.operator).
"""

from __future__ import annotations

import math
import time
from typing import Any

from tfos.console.console import Console
from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import FeedJobError
from tfos.phases import ClusterPhase
from tfos.spark.jobs import reason_of

_LOOK_S = 0.5
_LINE_S = 30.0
"""Seconds between two lines about a stream that goes on."""
_ENDS = {"INITIALIZED": "it was never started", "STOPPED": "it has ended"}
"""Why a stream does not run, by Spark's state of its context."""


def finish_stream(
    ssc: Any, coordinator: Coordinator, console: Console, *, timeout_s: float
) -> FeedJobError | None:
    """Train a stream to its end, then stop its context; the SparkContext stays.

    Args:
        ssc: pyspark's StreamingContext.
        coordinator: coordinator of the cluster that the stream trains.
        console: shows that the stream goes on.
        timeout_s: after this many seconds the stream is stopped anyway, once the batches that
            wait then are trained; may be infinite.

    Returns:
        Why the stream failed; None if it did not.
    """
    failure: FeedJobError | None = None
    deadline_s, shown_s = time.monotonic() + timeout_s, -_LINE_S
    end = _ENDS.get(str(ssc._jssc.getState()), "")
    while not end:
        now_s = time.monotonic()
        if now_s - shown_s >= _LINE_S:
            shown_s = now_s
            console.line(_progress(coordinator, deadline_s - now_s))
        try:
            end = "it has ended" if ssc.awaitTerminationOrTimeout(_LOOK_S) else ""
        except Exception as error:  # noqa: BLE001  # py4j's: a batch failed
            end = f"a batch failed: {reason_of(error)}"
            failure = FeedJobError(f"the stream ended because {end}")
        end = end or coordinator.read(_stop_reason)
        if not end and time.monotonic() >= deadline_s:
            console.warn(
                f"the stream did not end within {timeout_s:.0f} s and is stopped now: the batches "
                "that wait are trained first, however long that takes, and rows that come later "
                "are not. Raise timeout= of shutdown(), or stop the stream before it without "
                "those batches: ssc.stop(stopSparkContext=False, stopGraceFully=False)"
            )
            break
    if end:
        console.line(f"the stream stops: {end}")
    is_running = coordinator.phase is ClusterPhase.RUNNING
    # Batches that wait cannot be trained without a cluster: each would fail on its own.
    ssc.stop(stopSparkContext=False, stopGraceFully=is_running)
    return failure


def _progress(coordinator: Coordinator, left_s: float) -> str:
    rows = coordinator.read(_trained_rows)
    most = "" if math.isinf(left_s) else f", {left_s:.0f} s at most"
    return (
        f"shutdown() waits for the stream{most}: {rows} rows trained so far. It "
        "ends by ssc.stop(), or when a main_fun calls feed.terminate() or returns"
    )


def _trained_rows(state: ClusterView) -> int:
    return sum(worker.trained_rows for worker in state.workers)


def _stop_reason(state: ClusterView) -> str:
    """Return why no further row of the stream is to be fed; empty while there is no reason."""
    if state.phase is not ClusterPhase.RUNNING:
        return f"the cluster is {state.phase.name}"
    if state.streams_stop:
        return state.streams_stop
    for worker in state.workers:
        if worker.status is NodeStatus.DONE:
            return f"main_fun has returned on {worker.name}"
        if worker.heartbeat is not None and any(feed.is_drained for feed in worker.heartbeat.feeds):
            return f"main_fun on {worker.name} has called terminate()"
    return ""
