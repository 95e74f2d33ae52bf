"""A NameNode and DataNodes on loopback in one private directory, to be started, broken and ended.

Covers: the life of the processes, and a file that says which they are, so that another program
can end them.
Does not: fetch Hadoop (artifacts), decide its settings (sites).
Threads: one at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from scripts.local_hdfs.artifacts import class_path, java
from scripts.local_hdfs.daemon import Daemon, reap, spawn
from scripts.local_hdfs.errors import LocalHdfsError, last_lines
from scripts.local_hdfs.kdc import Kdc
from scripts.local_hdfs.kerberos_sites import (
    SERVICES,
    USERS,
    secure_core_site,
    secure_datanode_options,
    secure_hdfs_site,
    ssl_server,
)
from scripts.local_hdfs.keystore import make_keystore
from scripts.local_hdfs.sites import (
    HOST,
    LOG4J,
    Ports,
    core_site,
    datanode_options,
    hdfs_site,
    site_xml,
)
from scripts.local_hdfs.yarn_sites import YarnPorts

START_TIMEOUT_S = 120.0
POLL_S = 0.05
STATE = "state.json"
NAMENODE = "namenode"
KDC = "kdc"
_MAIN = "org.apache.hadoop.hdfs.server"
# Short lives: quick to start beats quick to run.
_JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData")
_FIRST_PORT = 10_000


@dataclass(frozen=True, slots=True)
class State:
    """What another program needs to know of a running HDFS."""

    ports: Ports
    daemons: tuple[Daemon, ...]
    yarn: YarnPorts | None = None
    kdc_port: int | None = None
    """Port of its Kerberos KDC; None: there is none, and users are not authenticated."""

    def to_json(self) -> str:
        """Return the text of the state file."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> State:
        """Read the text of a state file."""
        values = json.loads(text)
        ports = values["ports"]
        triples = tuple((data, web, ipc) for data, web, ipc in ports["datanodes"])
        return cls(
            Ports(ports["namenode"], ports["namenode_web"], triples),
            tuple(Daemon(**daemon) for daemon in values["daemons"]),
            YarnPorts.from_values(values["yarn"]) if values.get("yarn") else None,
            values.get("kdc_port"),
        )


class LocalHdfs:
    """`with LocalHdfs.started(directory) as hdfs: …  hdfs.url …  hdfs.kill_datanode(0)`."""

    def __init__(self, directory: Path, state: State, *, with_parent: bool = False) -> None:
        self.directory = directory
        self._begun_as = state
        self._ports = state.ports
        self._daemons = {daemon.name: daemon for daemon in state.daemons}
        self._with_parent = with_parent
        port = state.kdc_port
        self.kdc = Kdc(directory / KDC, port) if port is not None else None
        """Its Kerberos realm."""

    @classmethod
    def started(
        cls,
        directory: Path,
        *,
        num_datanodes: int = 2,
        with_parent: bool = False,
        kerberos: bool = False,
    ) -> Self:
        """Start a new, empty HDFS in `directory` and return when files can be written.

        Args:
            directory: made if absent, for this user alone; empty, since `stop` removes it.
            num_datanodes: at least 1; files have 2 replicas, or 1 with one DataNode.
            with_parent: end the processes also when the calling thread dies without `stop`.
            kerberos: start a realm as well; clients then need its tickets.

        Raises:
            MissingTool: Java, Maven or Kerberos is absent.
            LocalHdfsError: something did not come up; holds the end of its log.
        """
        if num_datanodes < 1:
            raise LocalHdfsError(f"an HDFS needs at least 1 DataNode, got {num_datanodes}")
        class_path()  # downloads before anything is made
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise LocalHdfsError(
                f"{directory} is not empty, and would be removed with the HDFS; remove it if a"
                " killed start has left it, or choose another --directory"
            )
        state = cls._free_state(num_datanodes, kerberos=kerberos)
        hdfs = cls(directory, state, with_parent=with_parent)
        try:
            hdfs._configure()
            hdfs.start_kdc()
            hdfs._format()
            hdfs._start_all()
        except BaseException:
            hdfs.stop()
            raise
        return hdfs

    @classmethod
    def found(cls, directory: Path) -> Self | None:
        """Return the HDFS that was started in `directory`, or None; it may have ended since."""
        try:
            text = (directory / STATE).read_text()
        except FileNotFoundError:
            return None
        return cls(directory, State.from_json(text))

    @classmethod
    def _free_state(cls, num_datanodes: int, *, kerberos: bool) -> State:
        """Return a state with ports for the NameNode and this many DataNodes, and no process."""
        kdc, *ports = free_ports(3 + 3 * num_datanodes)
        return State(Ports.of(ports), (), kdc_port=kdc if kerberos else None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """`hdfs://host:port` of the NameNode."""
        return f"hdfs://{HOST}:{self._ports.namenode}"

    @property
    def conf_dir(self) -> Path:
        """What HADOOP_CONF_DIR should be."""
        return self.directory / "conf"

    @property
    def num_datanodes(self) -> int:
        """How many DataNodes belong to it, running or not."""
        return len(self._ports.datanodes)

    @property
    def daemons(self) -> list[Daemon]:
        """Its processes, as last started."""
        return list(self._daemons.values())

    def start_namenode(
        self, *, wait: bool = True, settings: Mapping[str, str] | None = None
    ) -> None:
        """Start the NameNode (again), and wait until it serves all live DataNodes' files.

        Args:
            wait: False returns at once.
            settings: over those of the files, until it is started again.
        """
        options = [f"-Ddfs.namenode.http-address={HOST}:{self._ports.namenode_web}"]
        options += [f"-D{name}={value}" for name, value in (settings or {}).items()]
        self._start(NAMENODE, f"{_MAIN}.namenode.NameNode", options)
        if wait:
            self.await_datanodes(self._num_running_datanodes())

    def start_datanode(self, index: int, *, wait: bool = True) -> None:
        """Start a DataNode (again) on what is on its disk, and wait until the NameNode has it."""
        options = datanode_options(self._ports, self.directory, index)
        if self.kdc is not None:
            options += secure_datanode_options(self._ports.datanodes[index][1])
        self._start(f"datanode-{index}", f"{_MAIN}.datanode.DataNode", options)
        if wait:
            self._await_registered(index)

    def kill_namenode(self) -> None:
        """End the NameNode without warning; its ports refuse from now on."""
        self._daemons[NAMENODE].kill()

    def kill_kdc(self) -> None:
        """End the KDC without warning."""
        self._daemons[KDC].kill()

    def kill_datanode(self, index: int) -> None:
        """End a DataNode without warning."""
        self._daemons[f"datanode-{index}"].kill()

    def freeze_namenode(self) -> None:
        """Suspend the NameNode: connections are accepted and nothing is answered."""
        self._daemons[NAMENODE].freeze()

    def thaw_namenode(self) -> None:
        """Let a frozen NameNode go on."""
        self._daemons[NAMENODE].signal(signal.SIGCONT)

    def num_live_datanodes(self) -> int:
        """How many DataNodes the NameNode heard of lately; -1 while it cannot be written to."""
        state = self._namesystem()
        if state.get("FSState") != "Operational":
            return -1
        return int(state["NumLiveDataNodes"]) - int(state["NumStaleDataNodes"])

    def await_datanodes(self, count: int) -> None:
        """Wait until the NameNode writes and has exactly `count` live DataNodes."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while (live := self.num_live_datanodes()) != count:
            self._check_alive()
            if time.monotonic() > deadline_s:
                raise LocalHdfsError(
                    f"{live} of {count} DataNodes after {START_TIMEOUT_S:.0f} s:{self._log_ends()}"
                )
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End its processes and forget its files."""
        for daemon in self.daemons:
            daemon.signal(signal.SIGCONT)
            daemon.signal(signal.SIGTERM)
        for daemon in self.daemons:
            daemon.end()
        reap()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _configure(self) -> None:
        self.conf_dir.mkdir()
        (self.directory / "logs").mkdir()
        (self.conf_dir / "log4j.properties").write_text(LOG4J)
        core = core_site(self._ports, self.directory)
        hdfs = hdfs_site(self._ports, self.directory)
        if self.kdc is not None:
            self.kdc.create([*SERVICES, *USERS])
            core |= secure_core_site()
            hdfs |= secure_hdfs_site(self.kdc)
            server = ssl_server(*make_keystore(self.kdc.directory))
            (self.conf_dir / "ssl-server.xml").write_text(site_xml(server))
        (self.conf_dir / "core-site.xml").write_text(site_xml(core))
        (self.conf_dir / "hdfs-site.xml").write_text(site_xml(hdfs))

    def start_kdc(self) -> None:
        """Start the KDC (again), where there is one, and wait until it answers."""
        if self.kdc is None:
            return
        command = [*self._before(KDC), *self.kdc.command]
        env = {**self._environ(), **self.kdc.environ()}
        self._daemons[KDC] = spawn(KDC, command, log=self._log(KDC), env=env)
        self._save()
        self._await_listening(KDC, self.kdc.port)

    def _start_all(self) -> None:
        """Start all daemons at once, and wait until files can be written."""
        self.start_namenode(wait=False)
        for index in range(self.num_datanodes):
            self.start_datanode(index, wait=False)
        self.await_datanodes(self.num_datanodes)

    def _num_running_datanodes(self) -> int:
        names = [f"datanode-{index}" for index in range(self.num_datanodes)]
        return sum(name in self._daemons and self._daemons[name].is_alive() for name in names)

    def _format(self) -> None:
        main = f"{_MAIN}.namenode.NameNode"
        formatting = self._spawn("format", main, ["-format", "-nonInteractive"])
        done = formatting.wait(START_TIMEOUT_S)
        formatting.kill()
        if not done or not (self.directory / "name" / "current" / "VERSION").exists():
            raise LocalHdfsError(f"the NameNode was not formatted:{self._log_end('format')}")

    def _start(self, name: str, main: str, options: list[str]) -> None:
        running = self._daemons.get(name)
        if running is not None and running.is_alive():
            raise LocalHdfsError(f"{name} runs already, as process {running.pid}")
        reap()
        self._daemons[name] = self._spawn(name, main, options)
        self._save()

    def _spawn(self, name: str, main: str, options: list[str]) -> Daemon:
        command = [*self._before(name), *self.java_command(main), *options]
        return spawn(name, command, log=self._log(name), env=self._environ())

    def java_command(self, main: str) -> list[str]:
        """Return the command of one of Hadoop's programs with this HDFS's configuration.

        Args:
            main: class of the program.
        """
        path = f"{self.conf_dir}:{self._class_path()}"
        places = {"hadoop.log.dir": self.directory / "logs", "java.io.tmpdir": self.directory}
        values = [f"-D{key}={place}" for key, place in places.items()]
        values += ["-Djava.net.preferIPv4Stack=true", *self.java_options]
        return [java(), *_JVM, *values, "-cp", path, main]

    @property
    def java_options(self) -> list[str]:
        """What a client's Java needs to find its Kerberos realm, if it has one."""
        return [f"-Djava.security.krb5.conf={self.kdc.krb5_conf}"] if self.kdc else []

    def _before(self, name: str) -> list[str]:  # noqa: ARG002 - of one daemon, in subclasses
        """Return the program that becomes the daemon's Java, or nothing."""
        setpriv = shutil.which("setpriv") if self._with_parent else None
        return [setpriv, "--pdeathsig", "KILL"] if setpriv else []

    def _class_path(self) -> str:
        return class_path()

    def _environ(self) -> dict[str, str]:
        """Return the environment of each daemon."""
        env = {name: value for name, value in os.environ.items() if name != "JAVA_TOOL_OPTIONS"}
        return {**env, "HADOOP_CONF_DIR": str(self.conf_dir)}

    def _save(self) -> None:
        staging = self.directory / f".{STATE}"
        staging.write_text(self._state().to_json())
        staging.rename(self.directory / STATE)

    def _state(self) -> State:
        return replace(self._begun_as, daemons=tuple(self.daemons))

    def _log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def _log_end(self, name: str) -> str:
        with contextlib.suppress(OSError):
            return last_lines(self._log(name).read_text(errors="replace"))
        return ""

    def _log_ends(self) -> str:
        return "".join(f"\n  {name}:{self._log_end(name)}" for name in self._daemons)

    def _check_alive(self) -> None:
        if not self._daemons[NAMENODE].is_alive():
            raise LocalHdfsError(f"the NameNode ended:{self._log_end(NAMENODE)}")

    def _namesystem(self) -> dict[str, Any]:
        query = "jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
        address = f"http://{HOST}:{self._ports.namenode_web}/{query}"
        try:
            with urllib.request.urlopen(address, timeout=5) as answer:
                beans = json.load(answer)["beans"]
        except (OSError, ValueError):
            return {}
        return dict(beans[0]) if beans else {}

    def _await_registered(self, index: int) -> None:
        """Wait until the DataNode listens and the NameNode counts all running ones."""
        self._await_listening(f"datanode-{index}", self._ports.datanodes[index][0])
        self.await_datanodes(self._num_running_datanodes())

    def _await_listening(self, name: str, port: int) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not _listens(port):
            if time.monotonic() > deadline_s or not self._daemons[name].is_alive():
                raise LocalHdfsError(f"{name} did not come up:{self._log_end(name)}")
            time.sleep(POLL_S)


def _listens(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1):
            return True
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Return free ports below those that the kernel assigns itself.

    Java's daemons want numbers, so their ports have to be free a second later.
    """
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    last = max(_FIRST_PORT + 10 * count, int(text.split()[0]) - 1)
    free: list[int] = []
    for port in random.sample(range(_FIRST_PORT, last), k=min(1000, last - _FIRST_PORT)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            free.append(port)
        if len(free) == count:
            return free
    raise LocalHdfsError(f"only {len(free)} of {count} ports are free on {HOST}")
