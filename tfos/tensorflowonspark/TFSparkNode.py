"""TFSparkNode: the context class, for programs that build one to run a map_fun by themselves.

Covers: TFNodeContext with TensorFlowOnSpark's constructor.
Does not: start nodes (tfos.node); the ctx of a cluster is tfos.worker.context.NodeContext.
Runs in: any process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tfos.tensorflowonspark import TFNode
from tfos.topology import TRAINING_ROLES
from tfos.worker.ported_context import PortedContext


class TFNodeContext:
    """A context outside of a cluster, with the fields that it is given.

    Args:
        executor_id: number of the node.
        job_name: its role.
        task_index: its index among the nodes of this role.
        cluster_spec: role to `host:port` of each node.
        defaultFS: Hadoop's default file system.
        working_dir: base of relative local paths.
        mgr: what TFManager.start returns, for feeds.
        tmp_socket: a socket that holds a port.
    """

    def __init__(  # noqa: PLR0913 - TensorFlowOnSpark's constructor
        self,
        executor_id: int = 0,
        job_name: str = "",
        task_index: int = 0,
        cluster_spec: Mapping[str, Sequence[str]] | None = None,
        defaultFS: str = "file://",
        working_dir: str = ".",
        mgr: Any = None,
        tmp_socket: Any = None,
    ) -> None:
        self.worker_num = executor_id
        self.executor_id = executor_id
        self.job_name = job_name
        self.task_index = task_index
        self.cluster_spec = dict(cluster_spec or {})
        self.num_workers = sum(len(self.cluster_spec.get(role, ())) for role in TRAINING_ROLES)
        self.defaultFS = defaultFS
        self.working_dir = working_dir
        self.mgr = mgr
        self.tmp_socket = tmp_socket

    def absolute_path(self, path: str) -> str:
        """Return `path` with scheme and directory."""
        return TFNode.hdfs_path(self, path)

    def get_data_feed(
        self,
        train_mode: bool = True,
        qname_in: str = "input",
        qname_out: str = "output",
        input_mapping: Mapping[str, str] | None = None,
    ) -> Any:
        """Return the feed of `mgr`; see TFNode.DataFeed.

        Args:
            train_mode: False: a batch ends with its partition.
            qname_in: name of the feed.
            qname_out: name of the queue of results.
            input_mapping: column name to tensor name.
        """
        return TFNode.DataFeed(self.mgr, train_mode, qname_in, qname_out, input_mapping)

    def release_port(self) -> None:
        """Close `tmp_socket`. Idempotent."""
        if self.tmp_socket is not None:
            self.tmp_socket.close()
            self.tmp_socket = None

    start_cluster_server = PortedContext.start_cluster_server
    export_saved_model = PortedContext.export_saved_model
