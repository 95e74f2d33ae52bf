"""The handle of a stream: the stop of a query that has ended by itself."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import pytest

from tfos.errors import FeedJobError
from tfos.phases import ClusterPhase
from tfos.streaming.handle import StreamTraining
from tfos.streaming.state import QueryState, StreamRun


def test_a_stop_saves_also_behind_a_query_that_has_ended_by_itself_and_again_after_an_error():
    query = types.SimpleNamespace(isActive=False, exception=lambda: None)
    ending: Any = types.SimpleNamespace(raising=contextlib.nullcontext)
    phases = [ClusterPhase.RUNNING, ClusterPhase.RUNNING, ClusterPhase.CLOSED]
    coordinator: Any = types.SimpleNamespace(
        read=lambda look: look(types.SimpleNamespace(phase=phases.pop(0)))
    )
    saves: list[str] = []

    def save() -> None:
        saves.append("full" if not saves else "saved")
        if len(saves) == 1:
            raise FeedJobError("the disk is full")

    training = StreamTraining(query, QueryState("q"), StreamRun(), coordinator, ending, save)
    with pytest.raises(FeedJobError, match="the disk is full"):
        training.stop()
    training.stop()
    assert saves == ["full", "saved"]
    training.stop()  # behind the cluster's end, which saves by itself
    assert training.end() is None
    assert len(saves) == 2
