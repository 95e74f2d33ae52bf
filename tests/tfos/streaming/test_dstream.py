"""The end of a DStream at shutdown: what is waited for, and for how long."""

from __future__ import annotations

import io
import math
import types
from typing import Any

import pytest

from tfos.console.console import Console
from tfos.phases import ClusterPhase
from tfos.streaming import dstream
from tfos.streaming.dstream import finish_stream


class Stream:
    """A StreamingContext whose looks are played."""

    def __init__(self, *looks: Any, state: str = "ACTIVE") -> None:
        self._looks = list(looks)
        self._jssc = types.SimpleNamespace(getState=lambda: state)
        self.stops: list[dict[str, bool]] = []

    def awaitTerminationOrTimeout(self, timeout: float) -> bool:
        look = self._looks.pop(0) if self._looks else False
        return look() if callable(look) else look

    def stop(self, **how: bool) -> None:
        self.stops.append(how)


class Cluster:
    """A coordinator of one worker."""

    def __init__(self) -> None:
        self.phase = ClusterPhase.RUNNING
        self.streams_stop = ""
        feed = types.SimpleNamespace(is_drained=False)
        beat = types.SimpleNamespace(feeds=[feed])
        self.feed, self.worker = feed, types.SimpleNamespace(name="worker:0", heartbeat=beat)
        self.worker.status, self.worker.trained_rows = None, 70

    def read(self, look: Any) -> Any:
        return look(
            types.SimpleNamespace(
                phase=self.phase, workers=[self.worker], streams_stop=self.streams_stop
            )
        )


def finish(stream: Stream, cluster: Cluster, timeout_s: float = 60.0) -> tuple[Any, str]:
    shown = io.StringIO()
    coordinator: Any = cluster
    failure = finish_stream(stream, coordinator, Console(stream=shown), timeout_s=timeout_s)
    return failure, shown.getvalue()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_stream_that_ends_by_itself_is_waited_for(cluster):
    stream = Stream(False, False, True)
    failure, shown = finish(stream, cluster)
    assert failure is None
    assert stream.stops == [{"stopSparkContext": False, "stopGraceFully": True}]
    assert "shutdown() waits for the stream, 60 s at most: 70 rows trained so far" in shown
    assert "the stream stops: it has ended" in shown


def test_a_stream_ends_when_main_fun_reads_no_more(cluster):
    def terminate() -> bool:
        cluster.feed.is_drained = True
        return False

    _, shown = finish(Stream(False, terminate), cluster)
    assert "main_fun on worker:0 has called terminate()" in shown


def test_a_stream_ends_when_another_process_asks_for_it(cluster):
    cluster.streams_stop = "another process asked for it"
    stream = Stream()
    failure, shown = finish(stream, cluster)
    assert failure is None
    assert stream.stops == [{"stopSparkContext": False, "stopGraceFully": True}]
    assert "the stream stops: another process asked for it" in shown


def test_a_stream_is_stopped_when_the_time_is_up(cluster):
    stream = Stream()
    _, shown = finish(stream, cluster, timeout_s=0.01)
    assert stream.stops == [{"stopSparkContext": False, "stopGraceFully": True}]
    assert "did not end within 0 s and is stopped now: the batches that wait are trained" in shown
    assert "Raise timeout= of shutdown()" in shown


def test_a_stream_may_be_waited_for_without_limit(cluster):
    _, shown = finish(Stream(False, True), cluster, timeout_s=math.inf)
    assert "shutdown() waits for the stream: 70 rows" in shown


def test_a_stream_that_was_never_started_is_not_waited_for(cluster):
    _, shown = finish(Stream(state="INITIALIZED"), cluster)
    assert "never started" in shown


def test_a_stream_that_was_stopped_before_has_ended(cluster):
    _, shown = finish(Stream(state="STOPPED"), cluster)
    assert "the stream stops: it has ended" in shown


def test_a_batch_that_fails_ends_the_stream_with_its_error(cluster):
    def fail() -> bool:
        raise RuntimeError("RowError: partition 1, row 7")

    failure, _ = finish(Stream(False, fail), cluster)
    assert "RowError: partition 1, row 7" in str(failure)


def test_a_cluster_that_has_failed_trains_no_batch_that_still_waits(cluster):
    def fail() -> bool:
        cluster.phase = ClusterPhase.FAILED
        return False

    stream = Stream(False, fail)
    finish(stream, cluster)
    assert stream.stops == [{"stopSparkContext": False, "stopGraceFully": False}]


def test_a_stream_that_goes_on_is_shown_from_time_to_time(cluster, monkeypatch):
    monkeypatch.setattr(dstream, "_LINE_S", 0.0)
    _, shown = finish(Stream(False, False, True), cluster)
    assert shown.count("shutdown() waits for the stream") == 3
