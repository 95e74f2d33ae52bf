"""Every event by every node: a node reports what its role may, of itself alone."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id, running
from tfos.config import ClusterConfig
from tfos.control import messages
from tfos.control.state.cluster_state import ClusterState
from tfos.errors import ControlRefused, NodeFailedError
from tfos.failure import NodeFailure, NodeId
from tfos.phases import ClusterPhase
from tfos.topology import plan

NODES = ("ps:0", "ps:1", "chief:0", "worker:0", "worker:1", "evaluator:0")
PLAN = plan(6, 2, master_node="chief", eval_node=True)
MAY_REPORT = {
    messages.Listening: set(NODES),
    messages.FlushReached: {"chief:0", "worker:0", "worker:1"},
    messages.BatchReport: {"chief:0"},
    messages.FitReading: {"chief:0"},
    messages.EpochTrained: {"chief:0"},
    messages.BestSaved: {"chief:0"},
    messages.SavedNow: {"chief:0"},
    messages.NotSaved: {"chief:0"},
    messages.Evaluated: {"evaluator:0"},
    messages.TensorBoardUp: {"chief:0"},
    messages.PhaseChanged: set(NODES),
    messages.ServesShard: {"chief:0", "worker:0", "worker:1"},
    messages.InCollective: {"chief:0", "worker:0", "worker:1"},
    messages.StrategyBuilt: {"chief:0"},
    messages.Failed: set(NODES),
    messages.Restarted: {"ps:0", "ps:1"},
    messages.UpdatesLost: {"ps:0", "ps:1"},
    messages.CutShort: {"chief:0", "worker:0", "worker:1", "evaluator:0"},
    messages.Done: set(NODES),
}


def _event(kind: type, of: NodeId) -> messages.Event:
    failure = NodeFailure(of, "h", 7, message="gone", signal=9)
    made: dict[type, messages.Event] = {
        messages.Listening: messages.Listening(Endpoint("h", 2)),
        messages.FlushReached: messages.FlushReached("input", 0),
        messages.BatchReport: messages.BatchReport("input", 1, True, {}),
        messages.TensorBoardUp: messages.TensorBoardUp("http://h:6006"),
        messages.FitReading: messages.FitReading("input"),
        messages.EpochTrained: messages.EpochTrained(1, 0, {"loss": 0.5}),
        messages.BestSaved: messages.BestSaved("/s/step-3", 3, "val_loss", 0.5),
        messages.SavedNow: messages.SavedNow(1, "/s/step-3", 3),
        messages.NotSaved: messages.NotSaved("/s", "no room", 3),
        messages.Evaluated: messages.Evaluated(3, {"val_loss": 0.5}),
        messages.PhaseChanged: messages.PhaseChanged("main_fun"),
        messages.ServesShard: messages.ServesShard(),
        messages.InCollective: messages.InCollective(2),
        messages.StrategyBuilt: messages.StrategyBuilt(),
        messages.Failed: messages.Failed(failure),
        messages.Restarted: messages.Restarted(failure, 1, 2),
        messages.UpdatesLost: messages.UpdatesLost("lost"),
        messages.CutShort: messages.CutShort(5.0),
        messages.Done: messages.Done(),
    }
    return made[kind]


def test_the_table_knows_every_event():
    assert set(MAY_REPORT) == set(messages.Event.__args__)


@pytest.mark.attack("A15")
@pytest.mark.parametrize("kind", MAY_REPORT, ids=lambda kind: kind.__name__)
def test_a_role_may_report_exactly_what_the_table_says(kind):
    for name in NODES:
        state = running(PLAN)
        before = repr(state)
        event = _event(kind, node_id(name))
        if name in MAY_REPORT[kind]:
            state.on_event(node_id(name), event, 0.0)
            continue
        with pytest.raises(ControlRefused, match=f"{name} may not report {kind.__name__}"):
            state.on_event(node_id(name), event, 0.0)
        assert repr(state) == before


@pytest.mark.attack("A15")
@pytest.mark.parametrize("kind", [messages.Failed, messages.Restarted])
def test_a_failure_is_taken_of_the_reporter_and_its_attempt_only(kind):
    for name, named, attempt in itertools.product(NODES, NODES, (0, 1)):
        if name not in MAY_REPORT[kind] or (name, 0) == (named, attempt):
            continue
        state = running(PLAN)
        with pytest.raises(ControlRefused, match="a node reports its own"):
            state.on_event(node_id(name), _event(kind, node_id(named, attempt)), 0.0)
        assert state.failures == []


@pytest.mark.attack("A15")
@pytest.mark.parametrize("kind", MAY_REPORT, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("attempt", [0, 2])
def test_events_of_other_attempts_change_nothing(kind, attempt):
    state = ClusterState(PLAN, ClusterConfig())
    state.move(ClusterPhase.RESERVED)
    for name in NODES:
        state.on_register(messages.Register(node_id(name, 1), "1", "h", 7), 0.0)
    before = repr(state)
    for name in NODES:
        assert (
            state.on_event(node_id(name, attempt), _event(kind, node_id(name, attempt)), 1.0) == []
        )
        heartbeat = messages.Heartbeat(node_id(name, attempt), 9, "x")
        assert state.on_heartbeat(heartbeat, 1.0)[0].fenced
        assert "replaced" in state.on_stream_opened(node_id(name, attempt), 9, 1.0)
    assert repr(state) == before


@pytest.mark.attack("A24")
@given(st.text(st.characters(max_codepoint=0x2FF), max_size=20))
def test_no_failure_steers_the_terminal(text):
    state = running(PLAN)
    failure = NodeFailure(
        *(node_id("worker:1"), text, 7),
        executor_id=text,
        phase=text,
        error_type=text,
        message=text,
        traceback=text,
        log_tail=(text,),
        log_path=text,
    )
    state.on_event(node_id("worker:1"), messages.Failed(failure), 0.0)
    error = NodeFailedError(state.failures)
    shown = f"{error}{error.__cause__}{error.failures[0]!r}"
    assert all(char.isprintable() or char in "\t\n" for char in shown)
