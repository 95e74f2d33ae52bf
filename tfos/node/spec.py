"""What a node's processes receive at their start: bundle, supervisor's and child's documents.

Covers: NodeSettings (the same for every node, with the user's ClusterConfig as it is), NodeBundle
(one node: its identity, its own keys, its pickled main_fun), the bodies of the bootstrap documents
(tfos.node.bootstrap), the status line that a supervisor writes for its node task.
Does not: read or write them, unpickle `main_fun` (tfos.worker.process), start anything
(tfos.node.task). Imports nothing heavy: node tasks and supervisors use it.
Runs in: made in the driver, read in the node task, handed on in a memfd; never argv, environment.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import msgspec

from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials
from tfos.config import ClusterConfig, TensorBoardConfig
from tfos.topology import PlannedNode

NO_KEYS = TlsCredentials(b"", b"", b"")
"""Used instead of the control plane's keys where a process does not need them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What is the same for every node of a cluster: the configuration and the driver's facts."""

    cluster_id: str
    driver_address: str
    """`host:port` of the control server."""
    config: ClusterConfig
    """The user's configuration: a node reads settings there, so a new one needs no field here."""
    tensorboard: TensorBoardConfig
    num_workers: int
    """Workers including the chief."""
    num_ps: int
    feeds: tuple[str, ...] = ("input",)
    """Names of the feeds that workers accept rows for; empty: main_fun reads its own data."""
    loopback: bool = False
    """Everything runs on the driver's host: bind and advertise 127.0.0.1."""
    default_fs: str = "file://"
    driver_loopback: str = ""
    """The driver's network namespace: shows the chief whether the driver reaches its loopback."""
    has_tensorflow_servers: bool = False
    """Whether other nodes run TensorFlow's servers, for a strategy that main_fun builds."""
    is_mirrored: bool = False
    """Whether main_fun is to build a strategy that sums gradients among all workers."""
    legacy_keras: str = ""
    """The driver's TF_USE_LEGACY_KERAS, which says what `tf.keras` is; empty: it has none."""
    release_port: bool = True
    """Whether main_fun leaves the reserved port alone; False: `ctx.tmp_socket` is its socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBundle:
    """One node: who it is, how it proves it, and what it runs."""

    node: PlannedNode
    settings: NodeSettings
    control_keys: TlsCredentials = field(repr=False)
    """This node's own for the control plane; its children get NO_KEYS."""
    rpc_secret: bytes = field(repr=False)
    """Shared by the nodes of this cluster: the data plane's key (`rpc` Credentials)."""
    data_tls: TlsCredentials | None = field(default=None, repr=False)
    """This node's own for the data plane; None: the data plane has no TLS."""
    main_fun: bytes = field(default=b"", repr=False)
    """cloudpickle of `(main_fun, args)`; empty for a PS."""
    threads: int = 0
    """Compute threads, by the resources of its role; 0: nothing is stated there."""
    shares_gpus: bool = False
    """Spark gives its task a part of a GPU, whose other parts are other tasks'."""

    @property
    def data_credentials(self) -> Credentials:
        """What this node proves itself with on the data plane."""
        settings = self.settings
        return Credentials(
            settings.cluster_id, self.rpc_secret, settings.config.integrity, self.data_tls
        )

    @property
    def name(self) -> str:
        """`worker:1`, as users see it."""
        return self.node.name


class Executor(msgspec.Struct, frozen=True):
    """The place where a node runs, as its node task finds it."""

    executor_id: str
    host: str
    """Advertised to the other nodes, and bound."""
    jvm_pid: int
    """Pid of the process that the node ends with: the executor's JVM, or the driver. 0: none."""
    cores: int
    cwd: str
    spark_files: str
    """Root of the files added by SparkContext.addFile; empty outside of Spark."""
    scratch_dir: str
    """Where private, temporary directories go."""
    log_dir: str
    """Where the node's log file outlives the node; empty: it lies in the temporary directory."""
    gpus: tuple[str, ...] = ()
    """Addresses of the GPUs that Spark gave the task; empty: it schedules none."""


class SupervisorSpec(msgspec.Struct, frozen=True):
    """Everything that a supervisor needs to know."""

    attempt: int
    bundle: NodeBundle
    executor: Executor
    jvm_pidfd: int
    """Inherited; opened by the node task, whose JVM is certainly alive. -1: there is no JVM."""
    status_fd: int
    """Inherited write end; the node task reads LaunchStatus lines from the other."""
    hold_slot: bool
    sys_path: tuple[str, ...]
    value_fd: int = -1
    """Inherited memfd for the bytes that main_fun hands to its task; -1: nobody reads them."""
    skew: str = ""
    """Versions that differ from the driver's without harm, in one line."""


class ChildSpec(msgspec.Struct, frozen=True):
    """Everything that a PS or worker process needs to know."""

    attempt: int
    bundle: NodeBundle
    """Without the control plane's keys: those are the supervisor's."""
    executor: Executor
    link_fd: int
    socket_dir: str
    """Private directory for the Unix socket; the supervisor removes it."""
    log_dir: str
    """Directory for TensorBoard's event files."""
    files_dir: str = ""
    """Private directory for files of the job; the supervisor removes it."""
    restart: int = 0
    """How many children of this node came before; above 0 a server loads the last checkpoint."""
    value_fd: int = -1
    """See SupervisorSpec."""
    rows_fd: int = -1
    """Inherited memfd for the marks of fed rows; -1: the node takes none."""
    listen_fds: tuple[int, ...] = ()
    """Inherited TCP and Unix sockets to listen on; empty: bind your own."""


class State(enum.StrEnum):
    """How far a supervisor is, for its node task."""

    REGISTERED = "registered"
    """The driver knows this node; it must stay on this slot until the roster is complete."""
    RELEASED = "released"
    """The roster is complete."""
    ENDED = "ended"
    """Everything that the supervisor started is gone; it exits now."""


class LaunchStatus(msgspec.Struct, frozen=True):
    """One line on the status pipe, JSON."""

    state: State
    reason: str = ""
    is_cut_off: bool = False
    """Whether it ended because it never reached the driver, or by a signal."""
