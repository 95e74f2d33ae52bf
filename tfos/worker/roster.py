"""Roster of a worker: which nodes train with it, and where they and the servers are.

Covers: pure functions of the roster, which the driver sends to every node.
Does not: connect to any node.      Threads: any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rpc.endpoint import Endpoint, bracketed
from tfos.control.messages import RosterEntry
from tfos.topology import EVALUATOR_ROLE, PS_ROLE, WORKER_ROLE


def server_endpoints(roster: Sequence[RosterEntry]) -> list[Endpoint]:
    """Return the parameter servers' endpoints in rank order."""
    servers = (entry for entry in roster if entry.node.role == PS_ROLE)
    return [entry.endpoint for entry in sorted(servers, key=lambda entry: entry.rank)]


def training_nodes(
    roster: Sequence[RosterEntry], *, has_tensorflow_servers: bool
) -> dict[int, RosterEntry]:
    """Return the nodes that train in main_fun, by rank.

    Args:
        roster: every node of the cluster.
        has_tensorflow_servers: whether the nodes named `worker` are TensorFlow's servers.
    """
    others = {PS_ROLE, EVALUATOR_ROLE} | ({WORKER_ROLE} if has_tensorflow_servers else set())
    return {each.rank: each for each in roster if each.node.role not in others}


def rank_on_host(workers: Mapping[int, RosterEntry], rank: int) -> int:
    """Return a worker's number among those on its host, from 0.

    Args:
        workers: workers by rank.
        rank: rank of the worker.
    """
    host = workers[rank].host
    return sum(each.host == host for other, each in workers.items() if other < rank)


def cluster_spec(roster: Sequence[RosterEntry]) -> dict[str, list[str]]:
    """Return role -> `host:port` of each node by index, as TensorFlow and its programs know it."""
    spec: dict[str, list[str]] = {}
    for entry in sorted(roster, key=lambda entry: (entry.node.role, entry.node.index)):
        host = bracketed(entry.endpoint.host)
        address = f"{host}:{entry.free_port or entry.endpoint.port}"
        spec.setdefault(entry.node.role, []).append(address)
    return spec
