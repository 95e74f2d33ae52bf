"""What one node task receives from the driver: its identity, its keys and what it runs.

Covers: the element of the RDD that starts a role; one per node, so a task sees only its own key.
Does not: unpickle `main_fun` (node.worker does, in its own process), start anything (node.task).
Runs in: made in the driver, read in the node task, handed on in a memfd; never argv, environment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import Credentials
from tfos.checkpoints import Checkpoints


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
