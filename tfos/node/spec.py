"""What the processes of one node are told at their start, as typed structs.

Covers: the bodies of the bootstrap documents (node.bootstrap) and of the status line that a
supervisor writes for its node task.
Does not: read or write them. Imports nothing heavy: node tasks and supervisors use it.

[merged tfos/node/spec.py] What one node task receives from the driver: its identity, its keys and
what it runs.

Covers: the element of the RDD that starts a role; one per node, so a task sees only its own key.
Does not: unpickle `main_fun` (node.worker does, in its own process), start anything (node.task).
Runs in: made in the driver, read in the node task, handed on in a memfd; never argv, environment.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials
from tfos.config import Checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Settings that are the same for every node of a cluster."""

    num_workers: int
    """Workers including the chief."""
    num_ps: int
    input_mode: str = "spark"
    """`spark`: rows come through feeds. `tensorflow`: main_fun reads its own data."""
    feeds: tuple[str, ...] = ("input",)
    """Names of the feeds that the worker accepts rows for."""
    loopback: bool = False
    """Everything runs on the driver's host: bind and advertise 127.0.0.1."""
    default_fs: str = "file://"
    log_dir: str = ""
    """TensorBoard's directory or URL as the user gave it; empty: one of each node's own."""
    tensorboard: bool = False
    tensorboard_host: str = ""
    """Address TensorBoard binds; empty: loopback on the driver's host, else the advertised one."""
    driver_boot_id: str = ""
    """Tells the chief whether it is on the driver's host."""
    max_inflight_bytes: int = 64 << 20
    """Back-pressure bound of a worker's feed; see feeding.config."""
    integrity: Literal["header", "payload"] = "header"
    """What the data plane authenticates on TCP; see rpc.auth.handshake.Credentials."""
    security: Literal["hmac", "tls"] = "hmac"
    """Whether the data plane goes through TLS on TCP; the keys are each node's own."""
    threads: int = 0
    """Compute threads per node (OMP, TensorFlow, numba); 0: the task's cores."""
    abort_s: float = 10.0
    """A supervisor whose node task was cancelled waits this long for orders, then stops."""
    checkpoints: Checkpoints | None = None
    """How the parameters are saved; None: not at all."""
    reservation_timeout_s: float = 600.0
    """How long a node waits for the complete roster before it gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeBundle:
    """One node: who it is, how it proves it, and what it runs."""

    role: str
    """`ps`, `chief`, `master` or `worker`."""
    index: int
    rank: int
    """Among servers for a PS; among workers otherwise, where rank 0 is the chief."""
    is_chief: bool = False
    cert_pem: bytes = field(repr=False)
    key_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)
    rpc_secret: bytes = field(repr=False)
    """Shared by the nodes of this cluster: the data plane's key (`rpc` Credentials)."""
    data_tls: TlsCredentials | None = None
    """This node's own for the data plane; None: that goes without TLS."""
    main_fun: bytes = field(default=b"", repr=False)
    """cloudpickle of `(main_fun, args)`; empty for a PS."""
    settings: NodeSettings

    def data_credentials(self, cluster_id: str) -> Credentials:
        """Return what this node proves itself with on the data plane."""
        return Credentials(cluster_id, self.rpc_secret, self.settings.integrity, self.data_tls)

    @property
    def name(self) -> str:
        """`worker:1`, as users see it."""
        return f"{self.role}:{self.index}"


class Executor(msgspec.Struct, frozen=True):
    """The place where a node runs, as its node task finds it."""

    executor_id: str
    host: str
    """Advertised to the other nodes, and bound."""
    jvm_pid: int
    cores: int
    cwd: str
    spark_files: str
    """Root of the files added by SparkContext.addFile; empty outside of Spark."""
    scratch_dir: str
    """Where private, temporary directories go."""
    log_dir: str
    """Where the node's log file outlives the node; empty: it lies in the temporary directory."""


class SupervisorSpec(msgspec.Struct, frozen=True):
    """Everything that a supervisor needs to know."""

    cluster_id: str
    driver_address: str
    attempt: int
    bundle: NodeBundle
    executor: Executor
    jvm_pidfd: int
    """Inherited; opened by the node task, whose JVM is certainly alive. -1: there is no JVM."""
    status_fd: int
    """Inherited write end; the node task reads LaunchStatus lines from the other."""
    hold_slot: bool
    sys_path: tuple[str, ...]
    skew: str = ""
    """Versions that differ from the driver's without harm, in one line."""


class ChildSpec(msgspec.Struct, frozen=True):
    """Everything that a PS or worker process needs to know."""

    cluster_id: str
    attempt: int
    bundle: NodeBundle
    """Without the control plane's keys: those are the supervisor's."""
    executor: Executor
    link_fd: int
    socket_dir: str
    """Private directory for the Unix socket; the supervisor removes it."""
    log_dir: str
    """For TensorBoard's event files."""
    restart: int = 0
    """How many children of this node came before; above 0 a server loads the last checkpoint."""
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
