"""The handle of a stream: the stop of a query that has ended by itself, the history."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.watched_job import WatchedJob
from tfos.control.epoch_log import EpochLog
from tfos.control.messages import EpochTrained
from tfos.errors import FeedJobError
from tfos.monitor.reports import EpochReport
from tfos.phases import ClusterPhase
from tfos.streaming import handle
from tfos.streaming.handle import StreamTraining
from tfos.streaming.state import QueryState, StreamRun
from tfos.watch.job import STOP_REASON

ENDING: Any = types.SimpleNamespace(raising=contextlib.nullcontext)


def active_query() -> Any:
    """Return a query that runs until it is stopped."""
    query = types.SimpleNamespace(isActive=True, exception=lambda: None, lastProgress=None)
    query.stop = lambda: setattr(query, "isActive", False)
    return query


def test_a_stop_saves_also_behind_a_query_that_has_ended_by_itself_and_again_after_an_error():
    query = types.SimpleNamespace(isActive=False, exception=lambda: None)
    phases = [ClusterPhase.RUNNING, ClusterPhase.RUNNING, ClusterPhase.CLOSED]
    coordinator: Any = types.SimpleNamespace(
        read=lambda look: look(types.SimpleNamespace(phase=phases.pop(0)))
    )
    saves: list[str] = []

    def save(limit_s: float) -> None:
        saves.append("full" if not saves else "saved")
        if len(saves) == 1:
            raise FeedJobError("the disk is full")

    training = StreamTraining(query, QueryState("q"), StreamRun(), coordinator, ENDING, save)
    with pytest.raises(FeedJobError, match="the disk is full"):
        training.stop()
    training.stop()
    assert saves == ["full", "saved"]
    training.stop()  # behind the cluster's end, which saves by itself
    assert training.end() is None
    assert len(saves) == 2


def test_an_error_that_was_read_is_no_news_at_the_clusters_end():
    query = types.SimpleNamespace(isActive=False, exception=lambda: ValueError("the source"))
    training = StreamTraining(query, QueryState("q"), StreamRun(), None, ENDING, lambda _: None)  # type: ignore[arg-type]
    assert training._ended.wait(20)
    settled = [training.is_settled]
    assert str(training.error) == "the source"
    settled.append(training.is_settled)
    assert settled == [False, True]
    assert training.end() is None
    with pytest.raises(ValueError, match="the source"):
        training.await_end(20)


def test_an_error_that_was_raised_is_raised_once_and_no_news_at_the_clusters_end():
    query = types.SimpleNamespace(isActive=False, exception=lambda: ValueError("the source"))
    training = StreamTraining(query, QueryState("q"), StreamRun(), None, ENDING, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the source"):
        training.await_end(20)
    assert training.is_settled
    assert training.end() is None
    assert training.await_end(20)


def test_the_clusters_end_waits_for_a_batch_no_longer_than_it_may(bed: WatchedJob):
    run = StreamRun()
    query = active_query()
    training = StreamTraining(query, QueryState("q"), run, bed.coordinator, ENDING, lambda _: None)
    with run.batch():
        assert "did not end within 0 s" in str(training.end(0.01))
    query.isActive = False
    assert training._ended.wait(20)


def trained(fed_epoch: int, loss: float, feed: str = "input") -> EpochTrained:
    return EpochTrained(1, fed_epoch, {"loss": loss}, feed=feed, fed_epoch=fed_epoch)


def test_the_history_of_a_stream_has_its_own_batches():
    log = EpochLog()
    for event in (trained(0, 9.0), trained(1, 0.5), trained(1, 8.0, "other"), trained(2, 7.0)):
        log.note(event)
    state = QueryState("q", feed="input")
    for batch_id, (epoch, rows) in enumerate([(1, 10), (3, 0), (4, 10)]):
        state.note(batch_id, EpochReport("input", epoch, rows, rows, 0, 0, 2.0))
    state.note(3, EpochReport("input", 5, 4, 1, 3, 0, 2.0))
    cluster = types.SimpleNamespace(epochs=log, workers=[])
    query = types.SimpleNamespace(isActive=False, lastProgress=None)
    coordinator: Any = types.SimpleNamespace(read=lambda look: look(cluster))
    training = StreamTraining(query, state, StreamRun(), coordinator, None, lambda _: None)  # type: ignore[arg-type]
    assert training._ended.wait(20)
    assert training.history["loss"] == [0.5]
    log.note(trained(4, 0.25))
    assert training.history["loss"] == [0.5, 0.25]
    assert (training.rows, training.dropped_rows) == (21, 3)
    assert "21 rows, 3 dropped, " in str(training)


def asked_to_stop(
    bed: WatchedJob, save: Any, run: StreamRun | None = None, state: QueryState | None = None
) -> StreamTraining:
    """Return a stream without data, of a cluster whose training was asked to stop."""
    bed.coordinator.act(lambda state: state.stop_training(STOP_REASON))
    query = active_query()
    state, run = state or QueryState("q"), run or StreamRun()
    return StreamTraining(query, state, run, bed.coordinator, ENDING, save)


def test_a_stop_that_was_asked_for_ends_a_stream_without_data_in_order(bed: WatchedJob):
    saves, run = list[str](), StreamRun()
    training = asked_to_stop(bed, lambda _: saves.append("saved"), run)
    assert training.await_end(20.0)
    assert (training.is_active, training.error, saves) == (False, None, ["saved"])
    assert run.is_stopping  # so Spark's next batch would be held back
    assert training.end() is None


def test_a_save_that_fails_behind_a_stop_that_was_asked_for_is_told_and_can_be_repeated(
    bed: WatchedJob,
):
    saves = list[str]()

    state = QueryState("q", num_unsaved=1)

    def save(limit_s: float) -> None:
        saves.append("full" if not saves else "saved")
        if len(saves) == 1:
            raise FeedJobError("the disk is full")

    training = asked_to_stop(bed, save, state=state)
    with pytest.raises(FeedJobError, match="the disk is full"):
        training.await_end(20.0)
    training.stop()
    assert saves == ["full", "saved"]
    assert training.error is None


def test_what_a_stop_that_was_asked_for_has_lost_is_told_by_a_later_stop(bed: WatchedJob):
    lost = iter([FeedJobError("batch 3 is lost")])

    def save(limit_s: float) -> None:
        for error in lost:
            raise error

    training = asked_to_stop(bed, save)
    assert training._ended.wait(20)
    with pytest.raises(FeedJobError, match="batch 3 is lost"):
        training.stop()


class ReleasedBeforeStop:
    """A lock behind whose release a call of stop() that waits for it ends, before anything else."""

    def __init__(self, lock: threading.Lock, stop: Callable[[], None]) -> None:
        self.lock = lock
        self.waits = threading.Event()
        self.caller = threading.Thread(target=stop)

    def acquire(self, timeout: float) -> bool:
        self.waits.set()
        return self.lock.acquire(timeout=timeout)

    def release(self) -> None:
        self.lock.release()
        if threading.current_thread().name == "tfos-stream":
            self.caller.join(20)


def test_a_stop_that_waits_for_one_that_was_asked_for_tells_what_that_one_has_lost(bed: WatchedJob):
    told = list[BaseException]()
    lost = iter([FeedJobError("batch 3 is lost")])  # once: the waiting stop() saves again
    saving, may_save = threading.Event(), threading.Event()
    query = active_query()

    def end_query() -> None:
        saving.set()
        may_save.wait(20)
        query.isActive = False

    def save(limit_s: float) -> None:
        for error in lost:
            raise error

    def stop() -> None:
        try:
            training.stop()
        except FeedJobError as error:
            told.append(error)

    query.stop = end_query
    bed.coordinator.act(lambda state: state.stop_training(STOP_REASON))
    training = StreamTraining(query, QueryState("q"), StreamRun(), bed.coordinator, ENDING, save)
    assert saving.wait(20)
    lock = ReleasedBeforeStop(training._stopping, stop)
    training._stopping = lock  # type: ignore[assignment]
    lock.caller.start()
    assert lock.waits.wait(20)
    may_save.set()
    lock.caller.join(20)
    assert [str(each) for each in told] == ["batch 3 is lost"]
    assert training._ended.wait(20)


def test_the_clusters_end_waits_for_a_stop_that_was_asked_for(bed: WatchedJob):
    saving, may_save = threading.Event(), threading.Event()
    saves: list[str] = []

    def save(limit_s: float) -> None:
        saving.set()
        may_save.wait(20)
        saves.append("saved")

    training = asked_to_stop(bed, save)
    assert saving.wait(20)

    def end() -> None:
        training.end()
        saves.append("ended")

    ends = threading.Thread(target=end)
    ends.start()
    ends.join(0.2)
    may_save.set()
    ends.join(20)
    assert saves == ["saved", "ended"]


def test_a_stop_says_that_the_query_has_not_ended(monkeypatch):
    monkeypatch.setattr(handle, "_END_S", 0.05)
    query = types.SimpleNamespace(id="q-1", isActive=True, stop=lambda: None)
    ended = threading.Event()
    view = types.SimpleNamespace(phase=ClusterPhase.RUNNING, streams_stop="")
    coordinator: Any = types.SimpleNamespace(
        read=lambda look: look(view), wait=lambda *_: ended.wait(20)
    )
    saves: list[str] = []
    training = StreamTraining(
        query, QueryState("q"), StreamRun(), coordinator, ENDING, lambda _: saves.append("saved")
    )
    with pytest.raises(FeedJobError, match=r"query q-1 is still active .* call query\.stop\(\)"):
        training.stop()
    assert saves == ["saved"]
    query.isActive = False
    ended.set()


def test_a_stop_beside_one_that_saves_names_what_it_waits_for(bed: WatchedJob):
    saving, may_save = threading.Event(), threading.Event()

    def save(limit_s: float) -> None:
        saving.set()
        may_save.wait(20)

    training = asked_to_stop(bed, save)
    assert saving.wait(20)
    with pytest.raises(FeedJobError) as caught:
        training.stop(0.01)
    assert str(caught.value) == (
        "another stop() of this stream, which ends the query and saves what is not saved yet, did "
        "not end within 0.01 s; call stop() again with more seconds, or end the cluster with "
        "abort()"
    )
    may_save.set()
    assert training._ended.wait(20)


def test_a_stop_beside_one_that_waits_for_a_batch_names_the_batch(bed: WatchedJob):
    run, waits = StreamRun(), threading.Event()
    query = active_query()
    training = StreamTraining(query, QueryState("q"), run, bed.coordinator, ENDING, lambda _: None)
    stop = run.stop

    def stop_run(timeout_s: float) -> bool:
        waits.set()
        return stop(timeout_s)

    run.stop = stop_run  # type: ignore[method-assign]
    first = threading.Thread(target=training.stop)
    with run.batch():
        first.start()
        assert waits.wait(20)
        with pytest.raises(FeedJobError, match=r"which waits for the running micro-batch, did not"):
            training.stop(0.01)
    first.join(20)
    assert training._ended.wait(20)


class EndsBefore:
    """A lock before whose acquisition a query ends by itself."""

    def __init__(self, lock: threading.Lock, query: Any) -> None:
        self._lock, self._query = lock, query
        self.release = lock.release

    def acquire(self, timeout: float) -> bool:
        self._query.isActive = False
        return self._lock.acquire(timeout=timeout)


def test_a_query_that_ends_by_itself_just_before_its_stop_is_saved(bed: WatchedJob):
    saves = list[str]()
    query = active_query()
    state = QueryState("q", num_unsaved=1)
    training = StreamTraining(
        query, state, StreamRun(), bed.coordinator, ENDING, lambda _: saves.append("saved")
    )
    training._stopping = EndsBefore(training._stopping, query)  # type: ignore[assignment]
    training.stop()
    assert saves == ["saved"]
    assert training._ended.wait(20)


def test_the_clusters_end_gives_the_save_what_the_batch_has_left_of_its_time(bed: WatchedJob):
    given = list[float]()
    query = active_query()
    training = StreamTraining(
        query, QueryState("q"), StreamRun(), bed.coordinator, ENDING, given.append
    )
    began_s = time.monotonic()

    def stop(timeout_s: float) -> bool:
        while time.monotonic() == began_s:
            pass
        return True

    training._run.stop = stop  # type: ignore[method-assign]
    assert training.end(30.0) is None
    assert given[0] < 30.0
    assert training._ended.wait(20)


def test_spark_takes_no_time_of_the_save_to_end_a_query(bed: WatchedJob):
    has_saved = threading.Event()
    query = active_query()
    in_time: list[bool] = []

    def stop() -> None:  # as Spark's: it returns once the thread of the query has ended
        query.isActive = False
        in_time.append(has_saved.wait(20))

    query.stop = stop
    training = StreamTraining(
        query, QueryState("q"), StreamRun(), bed.coordinator, ENDING, lambda _: has_saved.set()
    )
    training.stop()
    assert in_time == [True]
    assert training._ended.wait(20)


@pytest.mark.parametrize(
    ("end_s", "saves_behind", "batch_s"),
    [(40.0, True, 30.0), (40.0, False, 40.0), (259_200.0, True, 194_400.0)],
)
def test_a_save_keeps_a_quarter_of_the_time_of_the_clusters_end(bed, end_s, saves_behind, batch_s):
    given, saved = list[float](), list[float]()
    query = active_query()
    run = StreamRun(saves_behind=saves_behind)
    training = StreamTraining(query, QueryState("q"), run, bed.coordinator, ENDING, saved.append)

    def stop(timeout_s: float) -> bool:
        given.append(timeout_s)
        return False

    is_over, run.stop = run.stop, stop  # type: ignore[method-assign]
    told = str(training.end(end_s))
    run.stop = is_over  # type: ignore[method-assign]
    training.end(math.inf)
    assert training._ended.wait(20)
    assert f"within {batch_s:.0f} s" in told
    assert ("kept 25% for the save" in told) is saves_behind
    assert given[0] == pytest.approx(batch_s, abs=5.0)
    assert saved == [math.inf]
