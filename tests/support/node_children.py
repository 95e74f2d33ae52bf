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
    """Return the executor of a node, on this host, whoever has started it."""
    (executor_id,) = [node.executor_id for node in cluster.status().nodes if node.name == name]
    application = cluster._reserved.sc.applicationId
    (java,) = (
        each
        for each in psutil.process_iter(["name", "cmdline"])
        if each.info["name"] == "java"
        and application in (words := each.info["cmdline"] or [])
        and words[words.index("--executor-id") + 1] == executor_id
    )
    return java
