"""Job end: which node, if any, the end of a Spark job that starts nodes is blamed on.      Pure.

Covers: jobs that failed, or ended before their nodes served.
Does not: run jobs (tfos.driver.node_jobs), say what a node's end means (control.restarts.node_end).

Nodes outlive the task that started them, so a job's end alone is no failure of a node that serves.
It is one while nodes are missing, and when Spark gave up or was told to cancel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tfos.control.members import Member, NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.phases import ClusterPhase
from tfos.topology import PlannedNode

_NOT_SERVING = (NodeStatus.MISSING, NodeStatus.REGISTERED, NodeStatus.RESTARTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a Spark job that starts nodes ended, if its cluster did not cancel it."""

    nodes: tuple[PlannedNode, ...]
    first_attempt: int = 0
    """First attempt of its nodes; 0: the job is their first."""
    error: str = ""
    """Why it failed; empty: it did not."""
    failed_partition: int | None = None
    """Number of the task that it failed with, which is its node's number; None: unknown."""
    is_cancelled: bool = False
    """Whether something other than its cluster cancelled it, which is its error."""
    outcomes: Mapping[str, str] = field(default_factory=dict)
    """How each node's task ended, by node, for a job that did not fail."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A node whose job has ended, and why that is a failure."""

    member: Member
    reason: str
    may_restart: bool = False
    """Whether the job was to start the node again, so that this end is that of an attempt."""


def blame_of(end: JobEnd, cluster: ClusterView) -> Blame | None:
    """Return which node failed with a job; None: none did.

    Args:
        end: the job's end.
        cluster: the cluster of the nodes.
    """
    if cluster.is_ending or cluster.phase not in (ClusterPhase.RESERVED, ClusterPhase.RUNNING):
        return None
    if cluster.is_running and all(node.is_evaluator for node in end.nodes):
        return None  # its heartbeats show whether it lives, and nothing waits for it
    known = [cluster.members[node.name] for node in end.nodes]
    # A later job has started the others again.
    members = [member for member in known if member.first_attempt == end.first_attempt]
    missing = [each for each in members if each.status in _NOT_SERVING and not _is_taken(each, end)]
    if missing and end.first_attempt:
        why = f"{end.error or 'its task ended'} before the node served"
        return Blame(missing[0], why, may_restart=True)
    if end.error:
        if all(member.stop_ordered for member in members):
            return None
        gone = [member for member in members if not member.is_live]
        return Blame((_failed(end, known, members) or missing or gone or members)[0], end.error)
    if not missing:
        return None
    outcome = end.outcomes.get(missing[0].name, "no result")
    return Blame(missing[0], f"its task ended before the node served: {outcome}")


def _failed(end: JobEnd, known: list[Member], members: list[Member]) -> list[Member]:
    """Return the node whose task failed, if Spark has reported it and no later job has it."""
    if end.failed_partition is None:
        return []
    return [each for each in known[end.failed_partition :][:1] if each in members]


def _is_taken(member: Member, end: JobEnd) -> bool:
    """Whether Spark's own retry of the first job was there before this one, and is at work."""
    return member.status is NodeStatus.REGISTERED and member.attempt < end.first_attempt
