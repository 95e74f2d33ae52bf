"""Which node the end of a Spark job that starts nodes is blamed on: a table of ends."""

from __future__ import annotations

from typing import Any

import pytest

from tfos.config import ClusterConfig
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.control.state.job_end import JobEnd, blame_of
from tfos.phases import ClusterPhase
from tfos.topology import plan

FAILED = {"error": "stage failed"}
AGAIN = {"first_attempt": 100}
RUNNING = (NodeStatus.RUNNING, NodeStatus.RUNNING)


def blamed(statuses: tuple[NodeStatus, ...], end: dict[str, Any], **fields: Any) -> Any:
    """Return name and reason for a job of two workers with these statuses; None: no blame."""
    nodes = plan(3, 1)
    cluster = ClusterView(nodes, ClusterConfig(), **{"phase": ClusterPhase.RUNNING} | fields)
    for member, status in zip(cluster.workers, statuses, strict=True):
        member.status, member.attempt = status, end.get("first_attempt", 0)
        member.first_attempt = end.get("first_attempt", 0)
    blame = blame_of(JobEnd(nodes=nodes.workers, **end), cluster)
    return blame and (blame.member.name, blame.reason)


@pytest.mark.fault("F14")
@pytest.mark.parametrize(
    ("statuses", "end", "blame"),
    [
        (RUNNING, {}, None),
        (RUNNING, FAILED, ("worker:0", "stage failed")),
        ((NodeStatus.RUNNING, NodeStatus.LOST), FAILED, ("worker:1", "stage failed")),
        ((NodeStatus.LOST, NodeStatus.MISSING), FAILED, ("worker:1", "stage failed")),
        (RUNNING, FAILED | {"failed_partition": 1}, ("worker:1", "stage failed")),
        (
            (NodeStatus.REGISTERED, NodeStatus.MISSING),
            FAILED | {"failed_partition": 1},
            ("worker:1", "stage failed"),
        ),
        (
            (NodeStatus.MISSING, NodeStatus.REGISTERED),
            FAILED | {"failed_partition": 1},
            ("worker:1", "stage failed"),
        ),
        (RUNNING, FAILED | {"failed_partition": 7}, ("worker:0", "stage failed")),
        (
            (NodeStatus.RUNNING, NodeStatus.REGISTERED),
            {"outcomes": {"worker:1": "no such file"}},
            ("worker:1", "its task ended before the node served: no such file"),
        ),
        (
            (NodeStatus.MISSING, NodeStatus.RUNNING),
            {},
            ("worker:0", "its task ended before the node served: no result"),
        ),
        (
            (NodeStatus.RUNNING, NodeStatus.RESTARTING),
            AGAIN,
            ("worker:1", "its task ended before the node served"),
        ),
        (
            (NodeStatus.RUNNING, NodeStatus.RESTARTING),
            AGAIN | FAILED,
            ("worker:1", "stage failed before the node served"),
        ),
    ],
)
def test_the_end_of_a_job_is_blamed_on(statuses: Any, end: dict[str, Any], blame: Any):
    assert blamed(statuses, end) == blame


@pytest.mark.parametrize(
    "cluster",
    [{"is_ending": True}, {"phase": ClusterPhase.FAILED}, {"phase": ClusterPhase.CLOSED}],
)
def test_a_cluster_that_ends_blames_nobody(cluster: dict[str, Any]):
    assert blamed((NodeStatus.LOST, NodeStatus.MISSING), FAILED, **cluster) is None
