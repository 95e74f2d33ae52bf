"""The configuration files of a local YARN, beside those of its HDFS.

Pure: ports, sizes and directories in, settings out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.local_hdfs.sites import HOST

_EXPIRY_MS = 10_000
"""After this long without a heartbeat a NodeManager is lost; Hadoop's default is 600 s."""
_MASTER_EXPIRY_MS = 600_000
"""Hadoop's default. An ApplicationMaster registers within it: in cluster mode its host unpacks the
environment before, and the driver starts."""


@dataclass(frozen=True, slots=True)
class YarnPorts:
    """Where YARN's daemons listen; a NodeManager's first port is its name to YARN."""

    resource_manager: tuple[int, int, int, int, int]
    """Clients, ApplicationMasters, NodeManagers, administration, web."""
    node_managers: tuple[tuple[int, int, int, int], ...]
    """Containers, localizer, web and collector port of each NodeManager."""

    @classmethod
    def of(cls, free: list[int]) -> YarnPorts:
        """Deal out 5 + 4 n free ports."""
        clients, masters, nodes, administration, web, *rest = free
        nodes_ports = zip(rest[::4], rest[1::4], rest[2::4], rest[3::4], strict=True)
        return cls((clients, masters, nodes, administration, web), tuple(nodes_ports))

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> YarnPorts:
        """Return what `dataclasses.asdict` and JSON made lists of."""
        clients, masters, nodes, administration, web = values["resource_manager"]
        quadruples = tuple((a, b, c, d) for a, b, c, d in values["node_managers"])
        return cls((clients, masters, nodes, administration, web), quadruples)

    @property
    def web(self) -> str:
        """URL of the ResourceManager's page."""
        return f"http://{HOST}:{self.resource_manager[4]}"


def yarn_site(ports: YarnPorts, node_memory_mib: int) -> dict[str, str]:
    """Return small allocations and quick notice of lost nodes; memory is not enforced.

    Args:
        ports: where the ResourceManager listens.
        node_memory_mib: what containers may ask for in sum on each NodeManager; reserves nothing.
    """
    clients, masters, nodes, administration, web = ports.resource_manager
    manager, node = "yarn.resourcemanager", "yarn.nodemanager"
    checker = f"{node}.disk-health-checker"
    return {
        f"{manager}.hostname": HOST,
        f"{manager}.address": f"{HOST}:{clients}",
        f"{manager}.scheduler.address": f"{HOST}:{masters}",
        f"{manager}.resource-tracker.address": f"{HOST}:{nodes}",
        f"{manager}.admin.address": f"{HOST}:{administration}",
        f"{manager}.webapp.address": f"{HOST}:{web}",
        f"{manager}.nodemanagers.heartbeat-interval-ms": "200",
        "yarn.nm.liveness-monitor.expiry-interval-ms": str(_EXPIRY_MS),
        "yarn.am.liveness-monitor.expiry-interval-ms": str(_MASTER_EXPIRY_MS),
        "yarn.scheduler.minimum-allocation-mb": "128",
        "yarn.scheduler.maximum-allocation-mb": str(node_memory_mib),
        f"{node}.resource.memory-mb": str(node_memory_mib),
        f"{node}.resource.cpu-vcores": "4",
        f"{node}.vmem-check-enabled": "false",
        f"{node}.pmem-check-enabled": "false",
        # A disk that is 90 % full would make a node unhealthy, and applications wait for ever.
        f"{checker}.enable": "false",
        # The check at the start is made all the same; applications then fail with "No space".
        f"{checker}.max-disk-utilization-per-disk-percentage": "100.0",
        # SPARK_LOCAL_IP keeps the containers' sockets on loopback.
        f"{node}.env-whitelist": "JAVA_HOME,HADOOP_CONF_DIR,PATH,LANG,TZ,SPARK_LOCAL_IP",
        "yarn.timeline-service.enabled": "false",
    }


def capacity_scheduler() -> dict[str, str]:
    """Return one queue for everything; ApplicationMasters may take all of it."""
    scheduler = "yarn.scheduler.capacity"
    queue = f"{scheduler}.root.default"
    return {
        f"{scheduler}.root.queues": "default",
        f"{scheduler}.maximum-am-resource-percent": "1.0",
        f"{scheduler}.node-locality-delay": "-1",
        f"{queue}.capacity": "100",
        f"{queue}.maximum-capacity": "100",
        f"{queue}.user-limit-factor": "1",
        f"{queue}.state": "RUNNING",
        f"{queue}.acl_submit_applications": "*",
        f"{queue}.acl_administer_queue": "*",
    }


def node_manager_options(ports: YarnPorts, directory: Path, index: int) -> list[str]:
    """Return what differs between the NodeManagers, as arguments of their program."""
    containers, localizer, web, collector = ports.node_managers[index]
    home = directory / f"node-{index}"
    node = "yarn.nodemanager"
    values = {
        f"{node}.address": f"{HOST}:{containers}",
        f"{node}.localizer.address": f"{HOST}:{localizer}",
        f"{node}.webapp.address": f"{HOST}:{web}",
        f"{node}.collector-service.address": f"{HOST}:{collector}",
        f"{node}.local-dirs": str(home / "local"),
        f"{node}.log-dirs": str(home / "logs"),
    }
    return [f"-D{name}={value}" for name, value in values.items()]
