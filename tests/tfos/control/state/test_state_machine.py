"""The driver's state under any order of events: attempts, one start, fences and the end of all.

Covers: what holds after every event, whoever it comes from. Does not: texts and single decisions
(test_state.py), threads and the wire (test_coordinator.py, test_client.py).
"""

from __future__ import annotations

import collections
import copy
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id
from tfos.config import ClusterConfig
from tfos.control import messages
from tfos.control.members import Member, NodeStatus
from tfos.control.restarts.driver_pause import tick_s
from tfos.control.restarts.silence import silence_of
from tfos.control.state.actions import Action, Send
from tfos.control.state.cluster_state import ClusterState
from tfos.failure import EXECUTOR_LOST, NodeFailure, NodeId
from tfos.phases import ClusterPhase, may_move
from tfos.topology import plan

NODES = ("ps:0", "worker:0", "worker:1", "worker:2")
SERVERS = NODES[:1]
FAILURES: dict[str, dict[str, Any]] = {
    "exception": {"error_type": "ValueError", "traceback": "T"},
    "killed": {"signal": 9},
    "crash": {"signal": 11},
    "executor lost": {"error_type": EXECUTOR_LOST},
}
names = st.sampled_from(NODES)
ages = st.sampled_from([0, 0, 0, 1, 2])
"""How many attempts older than the newest one the sender is; mostly the newest."""
LATEST_TICK_S = 3.9
"""Later ones show a driver that was suspended."""


class StateMachine(RuleBasedStateMachine):
    """Nodes that come, replace each other, fail, fall silent and end, in any order."""

    @initialize(tolerates=st.booleans())
    def reserve(self, tolerates: bool) -> None:
        config = ClusterConfig(tolerate_lost_workers=tolerates)
        self.state = ClusterState(plan(len(NODES), len(SERVERS)), config)
        self.state.move(ClusterPhase.RESERVED)
        self.now_s = 0.0
        self.phase = self.state.phase
        self.attempts = dict.fromkeys(NODES, -1)
        self.orders: collections.Counter[tuple[NodeId, str]] = collections.Counter()
        self.fences: collections.Counter[tuple[str, int, int]] = collections.Counter()
        self.take(self.state.on_tick(self.now_s))

    def take(self, actions: list[Action]) -> None:
        """Count the orders; each goes to an attempt that may have it."""
        for action in actions:
            if not isinstance(action, Send):
                continue
            node, order = action.node, action.order
            newest = self.state.members[node.name].attempt
            is_replaced = isinstance(order, messages.Stop) and "replaced" in order.reason
            assert node.attempt == newest - is_replaced or (node.attempt < newest and is_replaced)
            if isinstance(order, messages.Stop | messages.Start):
                assert not self.orders[node, "Stop"], f"{order} after the order to stop"
            self.orders[node, type(order).__name__] += 1
            if isinstance(order, messages.Start):
                ranks = [(entry.node.name, entry.rank) for entry in order.roster]
                assert ranks == [(name, int(name[-1])) for name in NODES]
            if isinstance(order, messages.FenceWorker):
                self.fences[node.name, order.rank, order.generation] += 1

    def sender(self, name: str, age: int) -> NodeId:
        return node_id(name, max(self.attempts[name] - age, 0))

    def is_heard(self, member: Member) -> bool:
        """Whether its newest attempt counts, or does so as soon as it says something."""
        may_come_back = self.state.phase is ClusterPhase.RESERVED and not self.state.is_ending
        return member.is_live or (member.is_unheard and may_come_back)

    def hears(self, node: NodeId, event: messages.Event) -> None:
        """Give an event to the state; nothing changes by what a replaced attempt says."""
        member = self.state.members[node.name]
        is_current = self.is_heard(member) and node.attempt == member.attempt
        before = copy.deepcopy(self.state)
        actions = self.state.on_event(node, event, self.now_s)
        if not is_current:
            assert actions == []
            assert self.state == before
        self.take(actions)

    @rule(name=names, newer=st.sampled_from([-1, 0, 1, 1, 1]), is_other=st.booleans())
    def registers(self, name: str, newer: int, is_other: bool) -> None:
        attempt = max(self.attempts[name] + newer, 0)
        node = node_id(name, attempt)
        pid = 100 + attempt + 1000 * is_other
        register = messages.Register(node, "5", "host", pid)
        member = self.state.members[name]
        newest, its_pid, was_live = member.attempt, member.pid, self.is_heard(member)
        reply, actions = self.state.on_register(register, self.now_s)
        stopped = [each.node for each in actions if isinstance(each, Send)]
        if attempt < newest:
            assert (reply.accepted, actions) == (False, [])
            assert f"attempt {newest}" in reply.reason
        elif attempt == newest:
            assert (reply.accepted, actions) == (was_live and pid == its_pid, [])
            assert reply.accepted or f"pid {its_pid}" in reply.reason
        elif reply.accepted:
            assert stopped == ([node_id(name, newest)] if newest >= 0 else [])
        if reply.accepted:
            assert attempt >= self.attempts[name]
            if attempt > self.attempts[name]:
                assert self.state.phase is ClusterPhase.RESERVED
                assert not self.state.is_ending
            self.attempts[name] = attempt
        self.take(actions)

    @rule(name=names, age=ages)
    def listens(self, name: str, age: int) -> None:
        self.hears(self.sender(name, age), messages.Listening(Endpoint("h", 1)))

    @rule()
    def all_come_that_are_missing(self) -> None:
        """The way to a running cluster, which random steps seldom find."""
        for name in NODES:
            if self.state.members[name].status is NodeStatus.MISSING:
                self.registers(name, 1, is_other=False)
            self.listens(name, 0)

    @rule(name=names, age=ages, kind=st.sampled_from(sorted(FAILURES)))
    def fails(self, name: str, age: int, kind: str) -> None:
        node = self.sender(name, age)
        self.hears(node, messages.Failed(NodeFailure(node, "host", 7, **FAILURES[kind])))

    @rule(name=names, age=ages)
    def is_done(self, name: str, age: int) -> None:
        self.hears(self.sender(name, age), messages.Done())

    @rule(name=names, age=ages)
    def beats(self, name: str, age: int) -> None:
        node = self.sender(name, age)
        member = self.state.members[name]
        is_current = self.is_heard(member) and node.attempt == member.attempt
        reply, actions = self.state.on_heartbeat(messages.Heartbeat(node, 1, "x"), self.now_s)
        assert reply.fenced is not is_current
        assert not actions or self.state.phase is ClusterPhase.RUNNING
        self.take(actions)

    @rule(name=names, age=ages, comes_back=st.booleans())
    def breaks_its_connection(self, name: str, age: int, comes_back: bool) -> None:
        node = self.sender(name, age)
        number = self.state.members[name].stream
        self.take(self.state.on_stream_closed(node, number, self.now_s))
        if comes_back:
            self.state.on_stream_opened(node, number + 1, self.now_s)

    @rule(ticks=st.sampled_from([1, 1, 25]))
    def time_goes_on(self, ticks: int) -> None:
        for _ in range(ticks):
            self.now_s += LATEST_TICK_S
            self.take(self.state.on_tick(self.now_s))

    @rule()
    def the_driver_is_suspended(self) -> None:
        config = self.state.config
        heard_s = self.now_s + tick_s(config)  # the pause itself is no silence of a node
        heard = [each for each in self.state.live() if not silence_of(each, config, heard_s)]
        self.now_s += 100.0
        self.take(self.state.on_tick(self.now_s))
        assert all(each.is_live for each in heard) or self.state.phase is ClusterPhase.FAILED

    @rule()
    def ends(self) -> None:
        self.take(self.state.end(self.state.live(), "the end", grace_s=1.0))

    @invariant()
    def phases_move_as_the_table_says(self) -> None:
        assert self.state.phase is self.phase or may_move(self.phase, self.state.phase)
        self.phase = self.state.phase

    @invariant()
    def attempts_never_fall(self) -> None:
        assert {name: self.state.members[name].attempt for name in NODES} == self.attempts

    @invariant()
    def all_start_once_and_together(self) -> None:
        started = [node.name for node, kind in self.orders.elements() if kind == "Start"]
        assert sorted(started) in ([], sorted(NODES))
        assert started or self.state.phase is not ClusterPhase.RUNNING
        if self.state.phase is ClusterPhase.RESERVED and not self.state.is_ending:
            assert self.state.missing()

    @invariant()
    def a_failed_cluster_stops_all_and_names_a_cause(self) -> None:
        has_failed = self.state.phase is ClusterPhase.FAILED
        assert has_failed == bool(self.state.fatal)
        if has_failed:
            assert all(member.stop_ordered for member in self.state.live())

    @invariant()
    def a_lost_worker_is_fenced_once_and_others_train(self) -> None:
        for member in self.state.workers:
            # Who is lost behind its Done is waited for by nobody and pushes no more.
            if member.status is NodeStatus.LOST and member.done is None:
                assert self.state.config.tolerate_lost_workers
                assert not member.planned.is_chief
                key = member.planned.rank, member.attempt
                assert all(self.fences[server, *key] == 1 for server in SERVERS)
        assert set(self.fences.values()) <= {1}


TestStateMachine = pytest.mark.slow(pytest.mark.fault("F01", "F20")(StateMachine.TestCase))
StateMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=20)
