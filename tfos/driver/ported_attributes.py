"""Attributes of a cluster that TensorFlowOnSpark's programs read.

Covers: cluster_info, cluster_meta, nodeRDD, server and similar ones, as views of what tfos knows.
Does not: hand out keys, or change anything but by `server.stop()`.
Runs in: the driver.      Threads: any.
"""

from __future__ import annotations

from typing import Any

from tfos.config import InputMode
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.preflight import RESERVED_QUEUES, VALIDATION_FEED
from tfos.driver.reservation import Reservation
from tfos.phases import ClusterPhase


class ClusterServer:
    """The driver's control server, as far as programs use `cluster.server`.

    Args:
        coordinator: the cluster's coordinator.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @property
    def done(self) -> bool:
        """Whether a stream was asked to stop, or the cluster has ended."""
        ended = self._coordinator.phase in (ClusterPhase.CLOSED, ClusterPhase.FAILED)
        return ended or bool(self._coordinator.read(lambda state: state.streams_stop))

    def stop(self) -> None:
        """Ask the cluster's stream to stop; `shutdown(ssc)` then returns."""
        self._coordinator.act(lambda state: state.end_streams("server.stop() was called"))


class PortedAttributes:
    """TensorFlowOnSpark's attributes of TFCluster."""

    _reserved: Reservation

    @property
    def sc(self) -> Any:
        """The SparkContext."""
        return self._reserved.sc

    @property
    def input_mode(self) -> InputMode:
        """Whether rows are fed or main_fun reads its own."""
        return InputMode.SPARK if self._reserved.settings.feeds else InputMode.TENSORFLOW

    @property
    def queues(self) -> list[str]:
        """Names that `train(qname=…)` takes, and those that carry no rows."""
        feeds = [name for name in self._reserved.settings.feeds if name != VALIDATION_FEED]
        return [*feeds, *RESERVED_QUEUES]

    @property
    def nodeRDD(self) -> Any:
        """An RDD of the nodes' numbers, one partition each."""
        count = len(self._reserved.plan.nodes)
        return self._reserved.sc.parallelize(range(count), count)

    @property
    def server(self) -> Any:
        """A ClusterServer: `server.done` and `server.stop()`, for streams."""
        return ClusterServer(self._reserved.coordinator)

    @property
    def cluster_info(self) -> list[dict[str, Any]]:
        """The nodes that serve: role, index, host and port of each, without any key."""
        return self._reserved.coordinator.read(_nodes)

    @property
    def cluster_meta(self) -> dict[str, Any]:
        """The cluster's id, size, roles, address of the driver and default file system."""
        settings, plan = self._reserved.settings, self._reserved.plan
        roles: dict[str, list[int]] = {}
        for number, node in enumerate(plan.nodes):
            roles.setdefault(node.role, []).append(number)
        host, _, port = settings.driver_address.rpartition(":")
        return {
            "id": settings.cluster_id,
            "cluster_template": roles,
            "num_executors": len(plan.nodes),
            "default_fs": settings.default_fs,
            "working_dir": ".",
            "server_addr": (host, int(port)),
            "release_port": settings.release_port,
        }

    @property
    def meta(self) -> dict[str, Any]:
        """Another name of `cluster_meta`."""
        return self.cluster_meta


def _nodes(state: ClusterView) -> list[dict[str, Any]]:
    up = state.tensorboard
    found = []
    for number, entry in enumerate(state.roster()):
        name, index = entry.node.role, entry.node.index
        is_chief = state.members[f"{name}:{index}"].planned.is_chief
        found.append(
            {
                "executor_id": number,
                "host": entry.host,
                "job_name": name,
                "task_index": index,
                "port": entry.free_port or entry.endpoint.port,
                "tb_pid": 0,
                "tb_port": _port_of(up.url) if up is not None and is_chief else 0,
                "addr": "",
                "authkey": b"",
            }
        )
    return found


def _port_of(url: str) -> int:
    port = url.rstrip("/").rpartition(":")[2]
    return int(port) if port.isdecimal() else 0
