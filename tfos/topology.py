"""Topology: roles, indexes and ranks of a cluster's nodes, planned before anything starts.

Covers: the arithmetic of cluster_size and num_ps and its refusals.
Does not: know Spark (tfos.spark.slots), start anything (tfos.spark.jobs). Pure.

The order is TensorFlowOnSpark's: parameter servers first, then the chief under the name the user
chose (`chief` or `master`), then workers. Without such a name `worker:0` is the chief. Worker ranks
count the chief as 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from tfos.errors import SettingsError, UnsupportedError

PS_ROLE = "ps"
CHIEF_ROLES = ("chief", "master")
WORKER_ROLE = "worker"


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node of the plan; `rank` counts servers for a PS and workers otherwise."""

    role: str
    index: int
    rank: int
    is_chief: bool = False

    @property
    def name(self) -> str:
        """`worker:1`, as users see it."""
        return f"{self.role}:{self.index}"

    @property
    def is_ps(self) -> bool:
        """Whether this is a parameter server."""
        return self.role == PS_ROLE


@dataclass(frozen=True, slots=True)
class Plan:
    """All nodes of a cluster, parameter servers first."""

    servers: tuple[PlannedNode, ...]
    workers: tuple[PlannedNode, ...]

    @property
    def nodes(self) -> tuple[PlannedNode, ...]:
        """Servers, then workers in rank order."""
        return self.servers + self.workers

    @property
    def num_ps(self) -> int:
        """Parameter servers."""
        return len(self.servers)

    @property
    def num_workers(self) -> int:
        """Workers including the chief."""
        return len(self.workers)

    @property
    def chief(self) -> PlannedNode:
        """The worker of rank 0."""
        return self.workers[0]

    def __str__(self) -> str:
        workers = f"{self.num_workers} worker{'s' if self.num_workers > 1 else ''}"
        return f"{self.num_ps} ps + {workers}"


def plan(cluster_size: int, num_ps: int, *, master_node: str | None = None) -> Plan:
    """Return the nodes of a cluster.

    Args:
        cluster_size: nodes in total, >= 1.
        num_ps: number of parameter servers among them, 0 <= num_ps < cluster_size.
        master_node: role name of the chief, `chief` or `master`; None: `worker:0` is the chief.

    Raises:
        SettingsError: an argument is no integer, or the numbers leave no worker.
        UnsupportedError: an unknown role.
    """
    _check_count("cluster_size", cluster_size, at_least=1)
    _check_count("num_ps", num_ps, at_least=0)
    if num_ps >= cluster_size:
        hint = (
            f"Use num_ps <= {cluster_size - 1}"
            if cluster_size > 1
            else "Use cluster_size >= 2 for one ps and one worker"
        )
        raise SettingsError(
            f"num_ps={num_ps} leaves no worker: cluster_size={cluster_size}. {hint}."
        )
    if master_node is not None and master_node not in CHIEF_ROLES:
        raise UnsupportedError(
            f"master_node={master_node!r} is no role of tfos. Use 'chief', 'master', or None, with "
            "which worker:0 is the chief."
        )
    servers = tuple(PlannedNode(PS_ROLE, index, index) for index in range(num_ps))
    named_chief = [PlannedNode(master_node, 0, 0, is_chief=True)] if master_node else []
    first = len(named_chief)
    workers = [
        PlannedNode(WORKER_ROLE, rank - first, rank, is_chief=rank == 0)
        for rank in range(first, cluster_size - num_ps)
    ]
    return Plan(servers, (*named_chief, *workers))


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SettingsError(
            f"{name} must be an int >= {at_least}, got {value!r} ({type(value).__name__})."
        )
    if value < at_least:
        raise SettingsError(f"{name} must be >= {at_least}, got {value}.")
