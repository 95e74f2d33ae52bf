"""The call that starts a stream, or takes charge of one that runs."""

from __future__ import annotations

import contextlib
import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.cluster_states import node_id, report_to
from tfos import InputMode, TFCluster
from tfos.config import Checkpoints
from tfos.control.members import NodeStatus
from tfos.control.messages import BatchReport, Done, EpochTrained, FitReading, SaveBatches
from tfos.errors import FeedJobError, NodeFailedError, PhaseError, SettingsError, ShutdownTimeout
from tfos.feed.dataframe import check_fed
from tfos.feed.micro_batch import BatchKnown
from tfos.feed.request import FeedRequest
from tfos.monitor.reports import EpochReport
from tfos.streaming import streaming
from tfos.streaming.state import QueryState, StreamFailed, StreamStopped
from tfos.streaming.streaming import StreamCalls, Streams
from tfos.watch.job import STOP_REASON, STREAMS_REASON


class Frame:
    """A streaming DataFrame whose query must not be started."""

    isStreaming = True
    mapInArrow = None
    started = False

    @property
    def writeStream(self) -> Frame:
        return self

    def foreachBatch(self, function: Any) -> Frame:
        return self

    def start(self) -> Query:
        self.started = True
        return Query()


class Watched(Exception):
    """The call has come to the query."""


class Query:
    """A query that runs."""

    runId = "r"

    def awaitTermination(self) -> None:
        """As of Spark's."""

    @property
    def id(self) -> str:
        """Asked when a handle is made."""
        raise Watched


def read_to_the_end(args: Any, ctx: Any) -> None:
    feed = ctx.get_data_feed()
    while not feed.should_stop():
        feed.next_batch(8)


def calls() -> StreamCalls:
    view = SimpleNamespace(streams_stop="")
    reserved: Any = SimpleNamespace(
        sc=None,
        coordinator=SimpleNamespace(read=lambda look: look(view), act=lambda _: None),
        console=SimpleNamespace(line=lambda text: None),
        config=SimpleNamespace(checkpoints=None),
    )
    service: Any = SimpleNamespace(check=lambda *_: None)
    ending: Any = SimpleNamespace(raising=contextlib.nullcontext)
    cluster = StreamCalls()
    cluster._streams = Streams(reserved, service, ending)
    return cluster


@pytest.mark.parametrize(
    "given",
    [
        {"checkpoint_location": "/c"},
        {"qname": "other"},
        {"columns": ["a"]},
        {"columns": []},
        {"nulls": 0},
        {"nulls": "unknown"},
        {"nulls": np.zeros(2)},
        {"nulls": {"a": 0}, "feed_timeout": 5.0},
    ],
    ids=str,
)
def test_settings_of_a_query_that_runs_already_are_refused(given: dict[str, Any]):
    with pytest.raises(SettingsError, match=rf"{', '.join(sorted(given))}.*runs already.*writeSt"):
        calls().stream(Query(), **given)


@pytest.mark.parametrize("location", ["/mnt/query-7", None])
def test_a_query_is_started_at_its_checkpoint_location(location):
    options: list[tuple[str, str]] = []

    class Writer(Frame):
        def option(self, *given: str) -> Writer:
            options.append(given)  # type: ignore[arg-type]
            return self

    with pytest.raises(Watched):
        calls().stream(Writer(), location)
    assert options == ([("checkpointLocation", location)] if location else [])


def test_a_query_that_runs_already_is_taken_as_it_is():
    with pytest.raises(Watched):
        calls().stream(Query())


def test_train_refuses_a_stream_with_the_calls_that_train_each_batch_once():
    """Batches that train() feeds are epochs, of which a run that resumes leaves new ones out."""
    with pytest.raises(SettingsError) as refusal:
        check_fed(Frame())
    told = str(refusal.value)
    assert "cluster.stream(df, checkpoint_location)" in told
    assert "foreachBatch(cluster.train_batch)" in told
    assert "cluster.train(" not in told
    assert all(hasattr(TFCluster, name) for name in ("stream", "train_batch"))


@pytest.mark.socket
@pytest.mark.parametrize(
    ("mode", "starts", "qname", "error", "refusal"),
    [
        (InputMode.TENSORFLOW, True, "input", SettingsError, "needs input_mode=InputMode.SPARK"),
        (InputMode.SPARK, False, "input", PhaseError, "cluster to be RUNNING; it is RESERVED"),
        (InputMode.SPARK, True, "inptu", SettingsError, "qname='inptu' is not a feed of this"),
    ],
    ids=["no feeds", "not started", "no such feed"],
)
def test_a_cluster_that_can_take_no_batch_refuses_it_at_the_call(
    spark, monkeypatch, mode, starts, qname, error, refusal
):
    monkeypatch.setattr(streaming, "_ANSWER_S", 0.1)  # the wait that came before the refusal
    cluster = TFCluster.reserve(spark, 2, 1, input_mode=mode)
    if starts:
        cluster.start(read_to_the_end, {})
    frame: Any = Frame()
    try:
        with pytest.raises(error, match=rf"stream\(\).*{refusal}" if qname == "input" else refusal):
            cluster.stream(frame, qname=qname)
        assert not frame.started
        request = FeedRequest(data=None, feed=qname, feed_timeout_s=1.0)
        with pytest.raises(error, match=refusal):  # of a user's foreachBatch
            cluster._streams._train_once(QueryState("q"), request, 0)
    finally:
        cluster.abort()


@pytest.mark.fault("F08")
def test_a_batch_that_a_server_has_lost_is_trained_once_more():
    fed: list[int] = []
    answers = iter([BatchReport("input", 1, True, {}, error="ps:1 lost it", is_lost=True)])

    def feed(request: FeedRequest, batch: Any) -> EpochReport:
        fed.append(batch.batch_id)
        return EpochReport("input", 0, 10, 10, 0, 0, 2.0)

    streams = calls()._streams
    streams._checkpoints = SimpleNamespace(every_batches=1)  # type: ignore[assignment]
    streams._feed_service.train_batch = feed  # type: ignore[method-assign]
    done = BatchReport("input", 2, True, {})
    streams._answer = lambda *_: next(answers, done)  # type: ignore[method-assign]
    streams._await_answer = lambda *_: done  # type: ignore[method-assign]
    state = QueryState("q", last_id=6, is_known=True)
    request = FeedRequest(data=None, feed="input", feed_timeout_s=1.0)
    with pytest.raises(FeedJobError, match=r"ps:1 lost it.* the batch is trained once more$"):
        streams._train_once(state, request, 7)
    assert (state.last_id, state.num_unsaved) == (6, 0)
    streams._train_once(state, request, 7)
    assert (fed, state.last_id, state.num_unsaved) == ([7, 7], 7, 0)


def test_a_batch_whose_end_nobody_waited_for_is_saved_and_not_trained_again():
    orders: list[Any] = []

    def feed(request: FeedRequest, batch: Any) -> EpochReport:
        raise BatchKnown

    streams = calls()._streams
    streams._checkpoints = SimpleNamespace(every_batches=1)  # type: ignore[assignment]
    streams._feed_service.train_batch = feed  # type: ignore[method-assign]
    view: Any = SimpleNamespace(workers=[SimpleNamespace(node=node_id("worker:0"))])
    streams._coordinator.act = lambda decide: orders.extend(decide(view))  # type: ignore[method-assign]
    streams._await_answer = lambda *_: BatchReport("input", 2, True, {})  # type: ignore[method-assign]
    state = QueryState("q", last_id=6, is_known=True)
    streams._train_once(state, FeedRequest(data=None, feed="input", feed_timeout_s=1.0), 7)
    assert [each.order for each in orders] == [SaveBatches("input", 2)]
    assert (state.last_id, state.num_unsaved) == (7, 0)


class Chief:
    """Trains each batch that is fed, and notes its id.

    Args:
        every_batches: of the cluster's checkpoints; None: there are none.
        restored: the last batch of query q that the restored parameters contain.
        is_noted: whether main_fun reports batches.
    """

    def __init__(
        self, every_batches: int | None, restored: int = -1, *, is_noted: bool = True
    ) -> None:
        self.fed: list[tuple[int, bool]] = []
        """Batches with whether the chief is to save behind them."""
        self.warned: list[str] = []
        self.asked: list[int] = []
        self._restored, self._is_noted = restored, is_noted
        self.streams = streams = calls()._streams
        if every_batches is not None:
            streams._checkpoints = Checkpoints(directory="/runs/7", every_batches=every_batches)
        streams._console = SimpleNamespace(line=lambda _: None, warn=self.warned.append)  # type: ignore[assignment]
        streams._feed_service.train_batch = self._feed  # type: ignore[method-assign]
        streams._answer = lambda feed, number: BatchReport(feed, number, True, {}, is_noted)  # type: ignore[method-assign]
        streams._await_answer = self._await_answer  # type: ignore[method-assign]
        view: Any = SimpleNamespace(workers=[SimpleNamespace(node=node_id("worker:0"))])
        streams._coordinator.act = lambda decide: decide(view)  # type: ignore[method-assign, assignment]

    def answers(self, answer: BatchReport | None, **view: Any) -> None:
        """Let the chief answer otherwise, in a cluster of which this is known."""
        self.streams._answer = lambda *_: answer  # type: ignore[method-assign]
        self.streams._await_answer = lambda *_: answer  # type: ignore[method-assign]
        self.streams._coordinator.read = lambda look: look(SimpleNamespace(**view))  # type: ignore[method-assign, assignment, arg-type]

    def train(self, state: QueryState, *batch_ids: int) -> None:
        request = FeedRequest(data=None, feed="input", feed_timeout_s=1.0)
        for batch_id in batch_ids:
            self.streams._train_once(state, request, batch_id)

    def _feed(self, request: FeedRequest, batch: Any) -> EpochReport:
        self.fed.append((batch.batch_id, batch.saves))
        return EpochReport("input", len(self.fed), 10, 10, 0, 0, 2.0)

    def _await_answer(self, feed: str, number: int, most_s: float = 0.0) -> BatchReport:
        self.asked.append(number)
        return BatchReport(feed, number, True, {"q": self._restored, "other": 99})


def test_batches_that_restored_parameters_contain_or_that_come_again_are_not_trained():
    chief, state = Chief(every_batches=1, restored=6), QueryState("q")
    chief.train(state, 5, 6, 7, 7, 8, 8)
    assert chief.fed == [(7, True), (8, True)]
    assert chief.asked == [0], "what was restored; all is saved behind each batch"
    assert (state.last_id, state.num_unsaved) == (8, 0)


@pytest.mark.parametrize(
    ("every_batches", "saved", "num_unsaved"),
    [(1, [True] * 7, 0), (3, [False, False, True] * 2 + [False], 1), (None, [False] * 7, 7)],
)
def test_a_save_follows_as_many_batches_as_the_checkpoints_say(every_batches, saved, num_unsaved):
    chief, state = Chief(every_batches), QueryState("q", is_known=True)
    chief.train(state, *range(7))
    assert chief.fed == [*enumerate(saved)]
    assert state.num_unsaved == num_unsaved
    chief.train(state, 6)  # Spark has not marked it as done, and brings it again
    assert (len(chief.fed), state.num_unsaved) == (7, 0 if every_batches else 7)


@pytest.mark.parametrize(("every_batches", "is_noted"), [(1, False), (1, True), (None, False)])
def test_batches_whose_ids_are_not_saved_are_warned_of_once(every_batches, is_noted):
    chief = Chief(every_batches, is_noted=is_noted)
    chief.train(QueryState("q", is_known=True), 0, 1, 2)
    assert len(chief.warned) == (every_batches is not None and not is_noted)
    assert all("no batch of this stream is skipped" in each for each in chief.warned)


@pytest.mark.parametrize("answer", [None, BatchReport("input", 1, False, {})])
@pytest.mark.parametrize(
    ("is_ending", "error", "sentence"),
    [
        (False, FeedJobError, "batch 7 was not trained: main_fun has returned"),
        (True, PhaseError, "the cluster was stopped while it trained batch 7"),
    ],
)
def test_a_batch_is_over_only_once_the_chief_has_said_so(answer, is_ending, error, sentence):
    chief, state = Chief(every_batches=1), QueryState("q", last_id=6, is_known=True)
    chief.answers(answer, is_ending=is_ending, training_stop="")
    with pytest.raises(error, match=sentence):
        chief.train(state, 7)
    assert (state.last_id, state.num_unsaved) == (6, 0), "Spark brings it again"


def test_no_batch_is_trained_before_the_chief_has_said_what_it_restored():
    chief, state = Chief(every_batches=1), QueryState("q")
    chief.answers(None, is_ending=False, training_stop="")
    with pytest.raises(FeedJobError, match="batch 7 was not trained"):
        chief.train(state, 7)
    assert (chief.fed, state.is_known) == ([], False)


def test_a_batch_without_rows_is_over_whatever_the_chief_says():
    chief, state = Chief(every_batches=1), QueryState("q", last_id=6, is_known=True)
    chief.streams._feed_service.train_batch = lambda *_: EpochReport("input", 0, 0, 0, 0, 0, 2.0)  # type: ignore[method-assign]
    chief.answers(None)
    chief.train(state, 7)
    assert (state.last_id, state.num_unsaved, chief.warned) == (7, 0, [])


def test_batches_that_spark_leaves_out_are_named():
    chief = Chief(every_batches=1)
    chief.train(QueryState("q", last_id=2, is_known=True), 3, 7)
    assert len(chief.warned) == 1
    assert "goes on with batch 7; batches 4 to 6, which it marks as done" in chief.warned[0]


def test_what_nobody_saves_is_an_error_unless_the_chief_has_saved_it_at_its_end():
    chief, state = Chief(every_batches=9), QueryState("q", is_known=True)
    chief.train(state, 0, 1)
    chief.answers(None, workers=[SimpleNamespace(status=NodeStatus.RUNNING)])
    with pytest.raises(FeedJobError, match="batches 0 to 1 could not be saved: the chief takes"):
        chief.streams._save(state)
    chief.answers(None, workers=[SimpleNamespace(status=NodeStatus.DONE)])
    chief.streams._save(state)


def test_a_query_that_is_started_again_trains_and_the_run_that_was_stopped_does_not():
    streams, trained = calls()._streams, []
    properties = {"sql.streaming.queryId": "q", "spark.jobGroup.id": "r1"}
    streams._sc = SimpleNamespace(getLocalProperty=properties.get)
    streams._train_once = lambda _, request, batch_id: trained.append((request.data, batch_id))  # type: ignore[method-assign, assignment]
    request = FeedRequest(data=None, feed="input", feed_timeout_s=1.0)
    streams.train_batch(request, "rows", 6)
    state, run = streams._state_of("q", "r1")
    assert run.stop(0.0)
    run.let_go.set()
    with pytest.raises(StreamStopped):
        streams.train_batch(request, "more rows", 7)
    properties["spark.jobGroup.id"] = "r2"
    assert not streams._state_of("q", "r2")[1].is_stopping
    streams.train_batch(request, "the same rows", 7)
    assert trained == [("rows", 6), ("the same rows", 7)]
    assert streams._state_of("q", "r2")[0] is state


def test_an_error_outside_of_a_query_is_raised_as_it_is():
    streams = calls()._streams
    streams._sc = SimpleNamespace(getLocalProperty=lambda _: None)

    def fails(*_: Any) -> None:
        raise FeedJobError("no rows")

    streams._train_once = fails  # type: ignore[method-assign, assignment]
    with pytest.raises(FeedJobError, match=r"^no rows$"):
        streams.train_batch(FeedRequest(data=None, feed="input", feed_timeout_s=1.0), None, 0)


def test_the_last_save_of_a_stream_has_what_no_save_had():
    chief, state = Chief(every_batches=9), QueryState("q", is_known=True)
    chief.train(state, 0, 1)
    chief.streams._coordinator.wait = lambda *_: True  # type: ignore[method-assign]
    chief.streams._save_last(state, 600.0, 30.0)
    assert state.num_unsaved == 0


@pytest.mark.parametrize(
    ("number", "doing"), [(0, "has not begun, or has not restored"), (1, "has not saved")]
)
def test_an_answer_is_waited_for_as_long_as_a_save_may_take(number: int, doing: str):
    waited: list[float] = []
    streams = calls()._streams
    streams._checkpoints = Checkpoints(directory="/runs/7", timeout_s=7200.0)
    streams._ending.raise_failure = lambda: None  # type: ignore[method-assign]
    streams._coordinator.wait = lambda _, timeout_s: waited.append(timeout_s)  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(FeedJobError, match=rf"{doing}.* within .*Checkpoints\(timeout_s="):
        streams._await_answer("input" if number else "", number)
    assert waited[0] > 7200


@pytest.mark.parametrize("most_s", [math.inf, 5.0])
def test_the_last_answer_of_the_chief_counts_and_its_failure_before_it(bed, most_s):
    waits: list[float] = []
    streams = calls()._streams
    streams._coordinator = bed.coordinator
    streams._ending.raise_failure = lambda: None  # type: ignore[method-assign]

    def wait(is_over: Any, timeout_s: float) -> bool:
        waits.append(timeout_s)
        found: bool = bed.coordinator.read(is_over)
        return found

    bed.coordinator.wait = wait
    chief, done = node_id("worker:0"), BatchReport("input", 1, True, {})
    report_to(bed.coordinator, chief, BatchReport("input", 1, False, {}))
    with pytest.raises(FeedJobError, match="has not saved within"):
        streams._await_answer("input", 1, most_s)
    report_to(bed.coordinator, chief, done)
    assert streams._await_answer("input", 1, most_s) == done
    assert set(waits) == {min(most_s, streaming._ANSWER_S)}
    report_to(bed.coordinator, chief, Done())
    assert streams._await_answer("input", 2, most_s) is None

    def fails() -> None:
        raise NodeFailedError([])

    streams._ending.raise_failure = fails  # type: ignore[method-assign]
    with pytest.raises(NodeFailedError):
        streams._await_answer("input", 1, most_s)


def ended_query(number: int, query_id: str, error: BaseException | None = None) -> Any:
    query = SimpleNamespace(id=query_id, runId=f"r{number}", isActive=False)
    query.exception, query.awaitTermination = (lambda: error), (lambda: None)
    return query


def test_a_query_that_was_started_again_is_forgotten_with_its_error_and_ended_ones_are_too():
    cluster = calls()
    streams = cluster._streams
    cluster.stream(ended_query(0, "q", ValueError("the source was away")))
    for number in range(1, 20):
        training = cluster.stream(ended_query(number, "q" if number < 10 else f"q{number}"))
        assert training._ended.wait(20)
    assert len(streams._trainings) == 1
    with streams.stopped(1.0):
        pass


def test_the_end_of_a_cluster_has_one_deadline_for_all_of_its_streams():
    given: list[float] = []

    def end(timeout_s: float) -> None:
        given.append(timeout_s)
        began_s = time.monotonic()
        while time.monotonic() == began_s:
            pass

    streams = calls()._streams
    streams._trainings = [SimpleNamespace(end=end)] * 3  # type: ignore[list-item]
    with streams.stopped(30.0):
        pass
    assert 30.0 >= given[0] > given[1] > given[2] > 0.0


def test_a_stream_that_another_query_leaves_unsaved_is_ended_with_the_cluster():
    cluster, ended = calls(), list[float]()
    first = cluster.stream(ended_query(0, "q"))
    cluster._streams._queries["q"].num_unsaved = 1
    first.end = ended.append  # type: ignore[method-assign, assignment]
    cluster.stream(ended_query(1, "other"))
    with cluster._streams.stopped(30.0):
        pass
    assert len(ended) == 1


@pytest.mark.fault("F08")
def test_the_failure_of_the_cluster_is_told_once_where_a_stream_ended_with_it():
    streams = calls()._streams
    told = FeedJobError("worker:0 failed")
    streams._trainings = [SimpleNamespace(end=lambda _: told)]  # type: ignore[list-item]
    with pytest.raises(ShutdownTimeout) as caught, streams.stopped(30.0):
        raise ShutdownTimeout("NodeFailedError: worker:0 failed; log: x")
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.fault("F08")
@pytest.mark.parametrize("raised", [ShutdownTimeout("main_fun did not return", "worker:0"), None])
def test_the_end_of_a_cluster_tells_every_stream_that_failed_whatever_else_it_raises(raised):
    lost = FeedJobError("batches 5 to 9 could not be saved")
    streams = calls()._streams
    streams._trainings = [SimpleNamespace(end=lambda _: lost)]  # type: ignore[list-item]
    of_dstream = FeedJobError("the stream ended because a batch failed")

    def end() -> None:
        with streams.stopped(30.0, of_dstream):
            if raised:
                raise raised

    with pytest.raises(ShutdownTimeout if raised else FeedJobError) as told:
        end()
    assert told.value is (raised or lost)
    unseen = [lost, of_dstream] if raised else [of_dstream]
    assert told.value.__notes__ == [f"Before that: {each}" for each in unseen]


def trained(*batches: tuple[int, int]) -> QueryState:
    """Return a query with these batches (id, rows) since its last save."""
    state = QueryState("q", feed="input", is_known=True)
    for batch_id, rows in batches:
        state.note(batch_id, EpochReport("input", batch_id, rows, rows, 0, 0, 2.0))
    return state


def saving(error: str, *, is_lost: bool) -> Streams:
    """Return streams whose chief answers so to an order to save."""
    streams = calls()._streams
    streams._checkpoints = SimpleNamespace(every_batches=9)  # type: ignore[assignment]
    answer = BatchReport("input", 1, True, {}, error=error, is_lost=is_lost)
    streams._await_answer = lambda *_: answer  # type: ignore[method-assign]
    return streams


@pytest.mark.fault("F08")
def test_batches_that_are_lost_once_spark_has_marked_them_are_named_and_not_promised_again():
    state = trained((3, 10), (4, 0), (5, 10), (6, 0))
    sentence = "ps:1 lost it.*lacks of batches 3 to 5 is lost"
    with pytest.raises(FeedJobError, match=sentence) as caught:
        saving("ps:1 lost it", is_lost=True)._save(state)
    assert "once more" not in str(caught.value)
    assert state.last_id == 6, "Spark goes on with batch 7"
    assert state.num_unsaved == 0, "no later save can have them"


@pytest.mark.fault("F08")
def test_a_lost_batch_that_comes_again_names_those_before_it_that_do_not():
    state = trained((3, 10), (4, 10), (5, 10))
    sentence = "batch is trained once more; batches 3 to 4, marked as done, may be lost"
    with pytest.raises(FeedJobError, match=sentence):
        saving("ps:1 lost it", is_lost=True)._save(state, 5)
    assert state.last_id == 4


@pytest.mark.parametrize(
    ("awaited_id", "sentence"),
    [
        (None, "batches 3 to 5 could not be saved: no disk.*call stop.. again"),
        (5, "batches 3 to 5 could not be saved: no disk.*before Spark marks batch 5 as done"),
    ],
)
def test_a_save_that_fails_says_whether_spark_waits_for_it(awaited_id, sentence):
    state = trained((3, 10), (5, 10))
    with pytest.raises(FeedJobError, match=sentence):
        saving("no disk", is_lost=False)._save(state, awaited_id)
    assert (state.last_id, state.num_unsaved) == (5, 2)


@pytest.mark.parametrize(
    ("stop", "sentence"),
    [
        ("", r"main_fun has returned on the chief\. Train with fit\(epochs=ctx.all_epochs"),
        (STOP_REASON, rf"the training was asked to stop \({STOP_REASON}\) and has ended"),
    ],
)
def test_a_batch_that_nobody_trains_names_the_stop_that_was_asked_for(bed, stop, sentence):
    streams = calls()._streams
    if stop:
        bed.coordinator.act(lambda state: state.stop_training(stop))
    streams._coordinator = bed.coordinator
    streams._feed_service.train_batch = lambda *_: None  # type: ignore[method-assign]
    request = FeedRequest(data=None, feed="input", feed_timeout_s=1.0)
    with pytest.raises(FeedJobError, match=rf"batch 7 was not trained: {sentence}"):
        streams._train_once(QueryState("q", last_id=6, is_known=True), request, 7)


def test_no_stream_begins_behind_a_stop_that_was_asked_for(bed):
    cluster, frame = calls(), Frame()
    bed.coordinator.act(lambda state: state.end_streams("server.stop() was called"))
    cluster._streams._coordinator = bed.coordinator
    with pytest.raises(PhaseError, match=r"stream\(\) comes after a stop .*server.stop\(\) was"):
        cluster.stream(frame)
    assert not frame.started


@pytest.mark.parametrize("has_handle", [False, True])
def test_a_query_without_a_handle_trains_no_batch_behind_a_stop_that_was_asked_for(bed, has_handle):
    streams, trained_ids = calls()._streams, list[int]()
    properties = {"sql.streaming.queryId": "q", "spark.jobGroup.id": "r"}
    streams._sc = SimpleNamespace(getLocalProperty=properties.get)
    streams._coordinator = bed.coordinator
    streams._train_once = lambda *given: trained_ids.append(given[2])  # type: ignore[method-assign]
    request = FeedRequest(data=None, feed="input", feed_timeout_s=1.0)
    query = SimpleNamespace(id="q", runId="r", isActive=False, exception=lambda: None)
    query.awaitTermination = lambda: None
    if has_handle:
        streams.start(query, None, FeedRequest(data=None, feed="input", feed_timeout_s=600.0))
    streams.train_batch(request, None, 6)
    bed.coordinator.act(lambda state: state.end_streams(STREAMS_REASON))
    if has_handle:  # it ends the query in order
        streams.train_batch(request, None, 7)
    else:
        sentence = (
            rf"^BatchStopped: batch 7 is not trained: .* asked to stop \({STREAMS_REASON}\)\. "
            "Spark does not mark the batch as done: start the query again with another cluster"
        )
        with pytest.raises(StreamFailed, match=sentence):
            streams.train_batch(request, None, 7)
    assert trained_ids == [6, 7][: 1 + has_handle]


def test_what_a_chief_that_has_returned_saved_last_is_not_ordered_again(bed):
    streams = calls()._streams
    report_to(bed.coordinator, node_id("worker:0"), Done(()))
    streams._coordinator = bed.coordinator
    streams._ending = SimpleNamespace(raise_failure=lambda: None)  # type: ignore[assignment]
    streams._checkpoints = Checkpoints(directory="/runs/7", every_batches=5)
    streams._save(QueryState("q", feed="input", last_id=6, num_unsaved=2))


def test_a_save_that_shutdown_cuts_short_names_the_timeout_of_shutdown():
    streams = saving("", is_lost=False)
    del streams._await_answer
    plan = Checkpoints(directory="/runs/7", timeout_s=7200.0, every_batches=9)
    streams._checkpoints = plan
    streams._ending.raise_failure = lambda: None  # type: ignore[method-assign]
    streams._coordinator.wait = lambda *_: False  # type: ignore[method-assign]
    with pytest.raises(FeedJobError) as caught:
        streams._save(trained((3, 10)), None, 5.0)
    assert str(caught.value) == (
        "the chief has not saved within 5 s, which is what shutdown(timeout=...) left of "
        f"the {plan.limit_s:.0f} s that a save may take. Call shutdown() with a longer timeout, "
        "or with None for no limit"
    )


@pytest.mark.parametrize("ends", [True, False])
def test_the_end_of_a_stream_waits_for_its_last_epoch_as_long_as_the_best_save_may_take(bed, ends):
    """The chief saves the best checkpoint before it tells the metrics of an epoch."""
    streams, waits = calls()._streams, list[float]()
    warned: list[str] = []
    chief = node_id("worker:0")
    report_to(bed.coordinator, chief, FitReading("input"))
    plan = Checkpoints(directory="/runs/7", timeout_s=7200.0, keep_best="loss")
    streams._checkpoints, streams._coordinator = plan, bed.coordinator
    streams._console = SimpleNamespace(warn=warned.append)  # type: ignore[assignment]

    def wait(is_over: Any, timeout_s: float) -> bool:
        waits.append(timeout_s)
        assert not bed.coordinator.read(is_over)
        if ends:
            report_to(
                bed.coordinator, chief, EpochTrained(1, 4, {"loss": 0.5}, feed="input", fed_epoch=4)
            )
        return bed.coordinator.read(is_over)

    state = trained((4, 10))
    state.num_unsaved = 0  # its own save was behind it
    bed.coordinator.wait = wait
    streams._save_last(state, 600.0, math.inf)
    assert waits == [plan.limit_s]
    assert plan.limit_s > 7200.0
    if ends:
        assert warned == []
    else:
        streams._save_last(state, 600.0, 5.0)
        assert waits[1] <= 5.0
        assert "metrics of batch 4 are not in the handle's history yet" in warned[0]


@pytest.mark.parametrize(("every_batches", "saves_behind"), [(0, True), (1, False), (9, True)])
def test_a_stream_may_have_to_save_behind_its_last_batch(every_batches, saves_behind):
    cluster = calls()
    plan = Checkpoints(directory="/runs/7", every_batches=every_batches)
    cluster._streams._checkpoints = plan
    assert cluster.stream(ended_query(0, "q"))._ended.wait(20)
    assert cluster._streams._runs["q"].saves_behind is saves_behind
