"""The call that starts a stream, or takes charge of one that runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tfos.errors import SettingsError
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
