"""The configuration files of a local HDFS.

Pure: ports and directories in, text out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

HOST = "127.0.0.1"

LOG4J = """\
log4j.rootLogger=INFO,out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d{ISO8601} %p %c{1}: %m%n
log4j.logger.org.apache.hadoop.ipc.Client=WARN
"""


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the daemons listen; a daemon that is started again listens there again."""

    namenode: int
    namenode_web: int
    datanodes: tuple[tuple[int, int, int], ...]
    """Data, web and inter-process port of each DataNode."""

    @classmethod
    def of(cls, free: list[int]) -> Ports:
        """Deal out 2 + 3 n free ports."""
        triples = zip(free[2::3], free[3::3], free[4::3], strict=True)
        return cls(free[0], free[1], tuple(triples))


def core_site(ports: Ports, directory: Path) -> dict[str, str]:
    """Return what every client and daemon reads."""
    return {
        "fs.defaultFS": f"hdfs://{HOST}:{ports.namenode}",
        "hadoop.tmp.dir": str(directory / "tmp"),
        # DataNodes that start beside the NameNode find it soon after it listens.
        "ipc.client.connect.retry.interval": "100",
        "ipc.client.connect.max.retries": "600",
    }


def hdfs_site(ports: Ports, directory: Path) -> dict[str, str]:
    """Return small blocks, quick notice of dead DataNodes, and permissions that are enforced."""
    return {
        "dfs.namenode.name.dir": (directory / "name").as_uri(),
        "dfs.namenode.rpc-address": f"{HOST}:{ports.namenode}",
        "dfs.namenode.http-address": f"{HOST}:{ports.namenode_web}",
        "dfs.namenode.fs-limits.min-block-size": "0",
        "dfs.namenode.safemode.extension": "0",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.replication": str(min(2, len(ports.datanodes))),
        "dfs.blocksize": "16m",
        "dfs.heartbeat.interval": "1",
        "dfs.namenode.heartbeat.recheck-interval": "1000",  # dead after 2 x 1 s + 10 x 1 s
        # Before that, one that is silent for 3 s is offered last.
        "dfs.namenode.stale.datanode.interval": "3000",
        "dfs.namenode.avoid.read.stale.datanode": "true",
        "dfs.namenode.avoid.write.stale.datanode": "true",
        "dfs.namenode.write.stale.datanode.ratio": "1.0",
        "dfs.permissions.enabled": "true",
        "dfs.webhdfs.enabled": "false",  # costs seconds at every start
        "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
        "dfs.datanode.du.reserved": "0",
        "dfs.namenode.resource.du.reserved": "0",
    }


def datanode_options(ports: Ports, directory: Path, index: int) -> list[str]:
    """Return what differs between the DataNodes, as arguments of their program."""
    data, web, ipc = ports.datanodes[index]
    values = {
        "dfs.datanode.data.dir": (directory / f"data-{index}").as_uri(),
        "dfs.datanode.address": f"{HOST}:{data}",
        "dfs.datanode.http.address": f"{HOST}:{web}",
        "dfs.datanode.ipc.address": f"{HOST}:{ipc}",
    }
    return [f"-D{name}={value}" for name, value in values.items()]


def site_xml(values: Mapping[str, str]) -> str:
    """Return one of Hadoop's site files."""
    properties = "".join(
        f"  <property><name>{escape(name)}</name><value>{escape(value)}</value></property>\n"
        for name, value in values.items()
    )
    return f"<configuration>\n{properties}</configuration>\n"
