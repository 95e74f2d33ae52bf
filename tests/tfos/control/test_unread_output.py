"""A driver whose standard error nobody reads: `spark-submit ... 2>&1 | less`, Ctrl-S."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from rpc.endpoint import Endpoint
from tests.support.cluster_states import node_id
from tests.support.unread_pipe import UnreadPipe
from tests.support.waiting import WAIT_S, wait_until
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.control import messages
from tfos.control.authority import ClusterAuthority
from tfos.control.client import ControlClient
from tfos.control.coordinator import Coordinator
from tfos.control.state.actions import Warn
from tfos.failure import NodeId
from tfos.node.supervisor.reporter import HeartbeatState, Reporter
from tfos.phases import ClusterPhase
from tfos.topology import plan

HEARTBEAT_S = 0.1
LEASE_S = 5.0


class PlayedNode:
    """A node's real reporter, whose heartbeats are counted."""

    def __init__(self, name: str, connect: Callable[[NodeId], ControlClient]) -> None:
        node = node_id(name)
        self.beats = 0
        self.reporter = Reporter(
            lambda: connect(node),
            messages.Register(node, "1", "h", 7),
            vitals=self._vitals,
            post=lambda notice: None,
        )
        self.reporter.start()
        self.reporter.report(messages.Listening(Endpoint("h", 1)))

    def _vitals(self) -> HeartbeatState:
        self.beats += 1
        return HeartbeatState()


@pytest.mark.slow
def test_a_cluster_whose_standard_error_nobody_reads_outlives_its_lease():
    pipe = UnreadPipe()
    console = Console(stream=pipe.stream)
    config = ClusterConfig(heartbeat_s=HEARTBEAT_S, hang_s=LEASE_S, lease_s=LEASE_S)
    coordinator = Coordinator(plan(2, 1), config, console)
    authority = ClusterAuthority("bed")
    port = coordinator.start("127.0.0.1", authority.driver())

    def connect(node: NodeId) -> ControlClient:
        return ControlClient(f"127.0.0.1:{port}", "bed", node, authority.node(node.name))

    nodes = [PlayedNode(name, connect) for name in ("ps:0", "worker:0")]
    warner = threading.Thread(
        target=lambda: coordinator.act(lambda state: [Warn("slow disk")]), daemon=True
    )
    try:
        assert coordinator.wait(lambda state: state.phase is ClusterPhase.RUNNING, WAIT_S)
        told_what_to_send = nodes[1].beats + 2
        wait_until(lambda: nodes[1].beats > told_what_to_send, "heartbeats", WAIT_S)
        for number in range(1500):  # more than a pipe and the queue have room for
            nodes[1].reporter.log((f"{number} " + "x" * 1000,), 0)
        warner.start()
        enough = max(node.beats for node in nodes) + 1.2 * LEASE_S / HEARTBEAT_S
        wait_until(lambda: all(node.beats > enough for node in nodes), "heartbeats", WAIT_S)
        assert coordinator.failures() == ()
        assert coordinator.phase is ClusterPhase.RUNNING
    finally:
        pipe.read()
        warner.join(WAIT_S)
        for node in nodes:
            node.reporter.finish(WAIT_S)
        coordinator.close()
        assert console.flush(WAIT_S)
        shown = pipe.close().splitlines()
    assert "tfos | WARNING: slow disk" in shown
    numbers = [int(line.split()[2]) for line in shown if line.startswith("worker:0@h | ")]
    assert numbers == sorted(numbers)
    told = [int(line.split("(")[1].split()[0]) for line in shown if "lines dropped: nobody" in line]
    assert sum(told) > 0
    assert sum(told) + len(numbers) == 1500
