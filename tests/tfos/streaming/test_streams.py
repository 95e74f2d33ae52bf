"""The call that starts a stream, or takes charge of one that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfos.control.messages import BatchReport
from tfos.errors import FeedJobError, SettingsError
from tfos.feed.request import FeedRequest
from tfos.monitor.reports import EpochReport
from tfos.streaming.state import QueryState
from tfos.streaming.streaming import StreamCalls, Streams


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


def calls() -> StreamCalls:
    parts: dict[str, Any] = dict.fromkeys(("sc", "coordinator", "console"))
    reserved: Any = SimpleNamespace(**parts, config=SimpleNamespace(checkpoints=None))
    cluster, nothing = StreamCalls(), SimpleNamespace()
    cluster._streams = Streams(reserved, nothing, nothing)  # type: ignore[arg-type]
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
    streams._feed_service = SimpleNamespace(train_batch=feed)  # type: ignore[assignment]
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
