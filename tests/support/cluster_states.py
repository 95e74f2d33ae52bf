"""States of a driver's cluster: a node by its name, and a cluster whose nodes all serve."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from rpc.endpoint import Endpoint
from tfos.config import ClusterConfig
from tfos.control import messages
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_state import ClusterState
from tfos.failure import NodeId
from tfos.phases import ClusterPhase
from tfos.topology import Plan


def node_id(name: str, attempt: int = 0) -> NodeId:
    """Return the id of `worker:1`."""
    role, _, index = name.partition(":")
    return NodeId(role, int(index), attempt)


def report_to(coordinator: Coordinator, node: NodeId, event: messages.Event) -> None:
    """Let a driver hear of an event, as its node would report it."""
    coordinator.act(lambda state: state.on_event(node, event, coordinator.now_s()))


def running(
    nodes: Plan,
    *,
    now_s: float = 0.0,
    executors: Sequence[str] = (),
    rooms_mib: dict[str, float] | None = None,
    config: ClusterConfig | None = None,
) -> ClusterState:
    """Return the state of a cluster whose nodes have registered and listen.

    Args:
        nodes: of the cluster.
        now_s: when all of it happened.
        executors: one per node; none: "1" for each.
        rooms_mib: memory beside Java's heap, by node.
        config: of the cluster; None: the defaults.
    """
    state = ClusterState(nodes, config or ClusterConfig(), rooms_mib=rooms_mib or {})
    state.move(ClusterPhase.RESERVED)
    for name, executor in zip(state.members, executors or repeat("1"), strict=False):
        state.on_register(messages.Register(node_id(name), executor, "host-b", 7), now_s)
    for name in state.members:
        state.on_event(node_id(name), messages.Listening(Endpoint("h", 1)), now_s)
    assert state.phase is ClusterPhase.RUNNING
    return state
