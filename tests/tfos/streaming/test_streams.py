"""The call that starts a stream, or takes charge of one that runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_spark import FakeSpark
from tfos import InputMode, TFCluster
from tfos.control.messages import BatchReport
from tfos.errors import FeedJobError, PhaseError, SettingsError
from tfos.feed.request import FeedRequest
from tfos.monitor.reports import EpochReport
from tfos.streaming import streaming
from tfos.streaming.state import QueryState
from tfos.streaming.streaming import StreamCalls, Streams


class Frame:
    """A streaming DataFrame whose query must not be started."""

    isStreaming = True
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
    parts: dict[str, Any] = dict.fromkeys(("sc", "coordinator", "console"))
    reserved: Any = SimpleNamespace(**parts, config=SimpleNamespace(checkpoints=None))
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
        {"nulls": {"a": 0}, "feed_timeout": 5.0},
    ],
    ids=str,
)
def test_settings_of_a_query_that_runs_already_are_refused(given: dict[str, Any]):
    with pytest.raises(SettingsError, match=rf"{', '.join(sorted(given))}.*runs already.*writeSt"):
        calls().stream(Query(), **given)


def test_a_query_that_runs_already_is_taken_as_it_is():
    with pytest.raises(Watched):
        calls().stream(Query())


@pytest.fixture
def spark() -> Iterator[FakeSpark]:
    made = FakeSpark()
    yield made
    made.close()


@pytest.mark.socket
@pytest.mark.parametrize(
    ("mode", "starts", "qname", "error", "refusal"),
    [
        (InputMode.TENSORFLOW, True, "input", SettingsError, "needs input_mode=InputMode.SPARK"),
        (InputMode.SPARK, False, "input", PhaseError, "needs the cluster RUNNING, it is RESERVED"),
        (InputMode.SPARK, True, "inptu", SettingsError, "qname='inptu' is no feed of this cluster"),
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
    answers = iter([BatchReport("input", 1, True, {}, {}, error="ps:1 lost it", is_lost=True)])

    def feed(request: FeedRequest, batch: Any) -> EpochReport:
        fed.append(batch.batch_id)
        return EpochReport("input", 0, 10, 10, 0, 0, 2.0)

    streams = calls()._streams
    streams._console = SimpleNamespace(line=lambda text: None)  # type: ignore[assignment]
    streams._checkpoints = SimpleNamespace(every_batches=1)  # type: ignore[assignment]
    streams._feed_service.train_batch = feed  # type: ignore[method-assign]
    done = BatchReport("input", 2, True, {}, {})
    streams._answer = lambda *_: next(answers, done)  # type: ignore[method-assign]
    streams._await_answer = lambda *_: done  # type: ignore[method-assign]
    streams._coordinator = SimpleNamespace(act=lambda _: None)  # type: ignore[assignment]
    state = QueryState("q", last_id=6, is_known=True)
    request = FeedRequest(data=None, feed="input", feed_timeout_s=1.0)
    with pytest.raises(FeedJobError, match=r"ps:1 lost it.* start it again: the batch is trained"):
        streams._train_once(state, request, 7)
    streams._train_once(state, request, 7)
    assert (fed, state.last_id, state.num_unsaved) == ([7, 7], 7, 0)
