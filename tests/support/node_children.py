"""The processes of a running cluster's nodes, for tests that end them."""

from __future__ import annotations

import psutil

from tfos import TFCluster


def child_of(cluster: TFCluster, name: str) -> psutil.Process:
    """Return the one child of a node's supervisor: a server, or a worker's process."""
    (supervisor,) = [node.pid for node in cluster.status().nodes if node.name == name]
    (child,) = psutil.Process(supervisor).children()
    return child


def java_of(cluster: TFCluster, name: str) -> psutil.Process:
    """Return the executor of a node, which this process's Spark has started."""
    (executor_id,) = [node.executor_id for node in cluster.status().nodes if node.name == name]
    (java,) = (
        each
        for each in psutil.Process().children(recursive=True)
        if each.name() == "java" and f"--executor-id {executor_id} " in " ".join(each.cmdline())
    )
    return java
