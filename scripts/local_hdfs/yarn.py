"""A ResourceManager and NodeManagers beside a local HDFS, in the same directory.

Covers: the life of YARN's processes and when containers can be asked for.
Does not: enforce the memory of containers; decide YARN's settings (yarn_sites).
Threads: one at a time.
"""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

from scripts.local_hdfs.artifacts import class_path
from scripts.local_hdfs.cluster import POLL_S, START_TIMEOUT_S, LocalHdfs, State, free_ports
from scripts.local_hdfs.errors import LocalHdfsError
from scripts.local_hdfs.kerberos_sites import secure_yarn_site
from scripts.local_hdfs.sites import HOST, Ports, site_xml
from scripts.local_hdfs.yarn_sites import (
    YarnPorts,
    capacity_scheduler,
    node_manager_options,
    yarn_site,
)

RESOURCE_MANAGER = "resourcemanager"
NUM_NODES = 2
NODE_MEMORY_MIB = 4096
_MAIN = "org.apache.hadoop.yarn.server"


class LocalYarn(LocalHdfs):
    """`with LocalYarn.started(directory) as yarn: …  HADOOP_CONF_DIR=yarn.conf_dir …`."""

    def __init__(self, directory: Path, state: State, *, with_parent: bool = False) -> None:
        super().__init__(directory, state, with_parent=with_parent)
        if state.yarn is None:
            raise LocalHdfsError(
                f"{directory} holds an HDFS without YARN; run scripts/hdfs down --directory"
                f" {directory}, or choose another --directory"
            )
        self._yarn_ports = state.yarn

    @classmethod
    def _free_state(cls, num_datanodes: int, *, kerberos: bool) -> State:
        """Return a state with ports for this many daemons of HDFS and for all of YARN."""
        num_hdfs = 2 + 3 * num_datanodes
        kdc, *ports = free_ports(1 + num_hdfs + 5 + 4 * NUM_NODES)
        yarn = YarnPorts.of(ports[num_hdfs:])
        return State(Ports.of(ports[:num_hdfs]), (), yarn, kdc if kerberos else None)

    @property
    def page(self) -> str:
        """URL of the ResourceManager's page, and of its REST interface below `/ws/v1`."""
        return self._yarn_ports.web

    @property
    def num_nodes(self) -> int:
        """How many NodeManagers belong to it, running or not."""
        return len(self._yarn_ports.node_managers)

    def start_resource_manager(self) -> None:
        """Start the ResourceManager (again)."""
        main = f"{_MAIN}.resourcemanager.ResourceManager"
        self._start(RESOURCE_MANAGER, main, [])

    def start_node_manager(self, index: int) -> None:
        """Start a NodeManager (again); YARN knows it by its port as the node it was."""
        options = node_manager_options(self._yarn_ports, self.directory, index)
        self._start(f"nodemanager-{index}", f"{_MAIN}.nodemanager.NodeManager", options)

    def kill_node_manager(self, index: int) -> None:
        """End a NodeManager without warning; its containers go on until they notice."""
        self._daemons[f"nodemanager-{index}"].kill()

    def num_active_nodes(self) -> int:
        """How many NodeManagers can run containers; -1 while the ResourceManager is silent."""
        try:
            with urllib.request.urlopen(f"{self.page}/ws/v1/cluster/metrics", timeout=5) as answer:
                return int(json.load(answer)["clusterMetrics"]["activeNodes"])
        except (OSError, ValueError, KeyError):
            return -1

    def await_nodes(self, count: int) -> None:
        """Wait until exactly `count` NodeManagers can run containers."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (active := self.num_active_nodes()) != count:
            ended = [daemon.name for daemon in self.daemons if not daemon.is_alive()]
            if ended or time.monotonic() > deadline_s:
                raise LocalHdfsError(
                    f"{active} of {count} NodeManagers, ended: {', '.join(ended) or 'none'}, waited"
                    f" at most {START_TIMEOUT_S:.0f} s:{self._log_ends()}"
                )
            time.sleep(POLL_S)

    def _configure(self) -> None:
        super()._configure()
        yarn = yarn_site(self._yarn_ports, NODE_MEMORY_MIB)
        if self.kdc is not None:
            yarn |= secure_yarn_site(self.kdc)
        (self.conf_dir / "yarn-site.xml").write_text(site_xml(yarn))
        (self.conf_dir / "capacity-scheduler.xml").write_text(site_xml(capacity_scheduler()))

    def _start_all(self) -> None:
        self.start_resource_manager()
        for index in range(self.num_nodes):
            self.start_node_manager(index)
        super()._start_all()
        self.await_nodes(self.num_nodes)

    def _class_path(self) -> str:
        return class_path(yarn=True)

    def _environ(self) -> dict[str, str]:
        return {**super()._environ(), "SPARK_LOCAL_IP": HOST}
