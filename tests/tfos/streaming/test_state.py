"""Streams in the driver: batches that come again or are missing, the stop, numbers of the lag."""

from __future__ import annotations

import math
import threading
import types

import pytest

from tests.support.feed import eventually
from tfos.monitor.reports import EpochReport
from tfos.streaming.state import (
    BatchStopped,
    QueryState,
    RunPhase,
    StreamLag,
    StreamRun,
    StreamStopped,
)


def report(rows: int, dropped: int = 0) -> EpochReport:
    return EpochReport("input", 0, rows + dropped, rows, dropped, 0, 2.0)


def test_a_batch_without_rows_is_over_and_needs_no_save():
    state = QueryState("q")
    state.note(0, report(10))
    state.note(1, report(0))
    assert (state.last_id, state.num_unsaved, state.num_batches) == (1, 1, 1)
    assert (state.rows, state.rows_per_s) == (10, 5.0)


def test_rows_of_batches_that_no_worker_trained_are_counted():
    state = QueryState("q")
    state.note(0, report(10, dropped=5))
    state.note(1, report(0, dropped=2))
    assert (state.rows, state.dropped_rows) == (10, 7)


@pytest.mark.parametrize(
    ("last", "batch", "missing"),
    [(-1, 0, ""), (6, 7, ""), (6, 8, "batch 7"), (-1, 3, "batches 0 to 2"), (6, 3, "")],
)
def test_missing_batches_are_named(last, batch, missing):
    state = QueryState("q")
    state.know(last)
    assert state.missing(batch) == missing


def test_what_was_restored_does_not_hide_what_this_program_trained():
    state = QueryState("q", last_id=9)
    state.know(4)
    assert state.last_id == 9


def test_a_stop_waits_for_the_running_batch_and_holds_the_next_one_back():
    run, may_end, log = StreamRun(), threading.Event(), []

    def train(name: str) -> None:
        try:
            with run.batch():
                may_end.wait(20)
                log.append(name)
        except StreamStopped as error:
            log.append(str(error))

    first = threading.Thread(target=train, args=("first",))
    first.start()
    eventually(lambda: run.phase is RunPhase.TRAINING, "the first batch")
    stopped: list[bool] = []
    stop = threading.Thread(target=lambda: stopped.append(run.stop(20.0)))
    stop.start()
    eventually(lambda: run._num_stops, "the stop")
    may_end.set()
    stop.join(20)
    assert stopped == [True]
    second = threading.Thread(target=train, args=("second",))
    second.start()
    eventually(lambda: run.phase is RunPhase.HELD, "the second batch")
    run.let_go.set()
    for thread in (first, second):
        thread.join(20)
    assert log[0] == "first"
    assert "java.lang.InterruptedException" in log[1]
    assert run.error is None


def test_batches_go_on_behind_a_stop_that_did_not_wait_long_enough():
    run = StreamRun()
    with run.batch():
        assert run.stop(0.01) is False
    with run.batch():  # Spark has brought it: nobody has told it to stop
        pass
    assert (run.phase, run.error) == (RunPhase.IDLE, None)


def test_an_error_of_a_batch_is_kept_and_frees_the_run():
    run = StreamRun()
    with pytest.raises(ValueError, match="rows"), run.batch():
        raise ValueError("rows")
    assert isinstance(run.error, ValueError)
    assert run.stop(0.01)


@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_batch_that_ends_in_part_because_of_a_stop_is_an_error_only_if_nobody_stops_the_query(
    is_stopping,
):
    run = StreamRun()
    run.let_go.set()

    def train() -> None:
        with run.batch():
            run._num_stops = int(is_stopping)
            raise BatchStopped("batch 7 was not trained to its end")

    with pytest.raises(StreamStopped if is_stopping else BatchStopped):
        train()
    assert (run.phase is RunPhase.HELD, run.error is None) == (is_stopping, is_stopping)
    assert run.stop(0.01)


def test_all_batches_since_the_last_save_are_named_and_each_has_its_epoch():
    state, known = QueryState("q"), QueryState("q")
    for batch_id in (3, 4):
        state.note(batch_id, EpochReport("input", batch_id + 10, 5, 5, 0, 0, 1.0))
        known.know_trained(batch_id)
    assert (state.unsaved, list(state.epochs)) == ("batches 3 to 4", [13, 14])
    assert known.unsaved == "batches 3 to 4"


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_the_lag_is_read_from_sparks_progress(unknown):
    source = types.SimpleNamespace(metrics={"numFilesOutstanding": "3"})
    progress = types.SimpleNamespace(
        inputRowsPerSecond=unknown,
        processedRowsPerSecond=40.0,
        batchDuration=1500,
        sources=[source, types.SimpleNamespace(metrics=None)],
    )
    lag = StreamLag.of(progress)
    assert lag == StreamLag(0.0, 40.0, 1.5, {"numFilesOutstanding": "3"})
    assert str(lag) == "40 rows/s are trained (numFilesOutstanding 3)"
    assert str(StreamLag(50.0, 40.0, 1.0, {})) == "50 rows/s come, 40 are trained"
    assert str(StreamLag(0.0, 0.0, 1.0, {})) == "0 rows/s come, 0 are trained"
    assert not lag.is_growing
    assert StreamLag(50.0, 40.0, 1.0, {}).is_growing
