"""Settings of a cluster, checked once on the driver.

Covers: how rows reach the workers, timeouts of the control plane, what is shown.
Does not: hold settings of the data plane (rpc), of servers (ps) or of chunks (feeding.config).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from os.path import isabs
from typing import Literal

from tfos.checkpoints import Checkpoints
from tfos.errors import SettingsError


class InputMode(enum.IntEnum):
    """Where a worker's rows come from. The numbers are TensorFlowOnSpark's."""

    TENSORFLOW = 0
    """main_fun reads its own data."""
    SPARK = 1
    """`cluster.train(rdd)` feeds rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Timeouts and limits; the defaults suit clusters from a laptop to some hundred nodes."""

    reservation_timeout_s: float = 600.0
    """All nodes must serve within this time after start(). Default: TensorFlowOnSpark's."""
    slot_wait_s: float = 60.0
    """reserve() waits this long for executors that are still registering (tens of s on YARN)."""
    slot_settle_s: float = 4.0
    """Too few slots and no new executor for this long: reserve() fails."""
    heartbeat_s: float = 2.0
    """Every node shows a sign of life this often. Smaller: fresher progress, more driver load."""
    hang_s: float = 20.0
    """A node that is silent for longer has failed: frozen or cut off. At least 3 heartbeats. A
    worker's or server's process that somebody suspends (SIGSTOP) is ended within this time too."""
    reconnect_s: float = 3.0
    """A node whose connection broke has this long to come back before it counts as dead."""
    lease_s: float = 20.0
    """A node that cannot reach the driver for longer ends by itself. At least 3 heartbeats."""
    abort_s: float = 10.0
    """From the decision to stop until every process is gone."""
    max_inflight_bytes: int = 64 << 20
    """Unread bytes per worker at which feeding waits. Larger: steadier, more worker memory."""
    tolerate_lost_workers: bool = True
    """A worker killed from outside is a warning while others remain; the chief never is."""
    save_on_interrupt: str | None = None
    """Directory in which the servers save the parameters when a running cluster is aborted: Ctrl-C,
    an exception in the `with` block, abort(), cancelled Spark jobs, a shutdown() that is late. The
    servers and the driver must see it under this path. The save takes at most half of abort_s or
    so; a model that needs longer needs a larger abort_s."""
    threads_per_node: int = 0
    """Compute threads (OMP, TensorFlow, numba) per node; 0: the cores of its Spark task."""
    allow_dynamic: bool = False
    """Accept dynamic allocation although it may remove an executor under a node."""
    allow_speculation: bool = False
    """Accept speculative execution although it starts nodes twice."""
    checkpoints: Checkpoints | None = None
    """Where and when parameters are saved; None: never, and a dead server fails the cluster."""
    integrity: Literal["header", "payload"] = "header"
    """What is authenticated on TCP between workers, servers and feed tasks: frames' headers and
    metas, or every byte. `payload` finds changed tensors too, and costs speed."""
    security: Literal["hmac", "tls"] = "hmac"
    """How the same processes speak over TCP. `hmac`: they prove by the cluster's secret who they
    are, and rows and tensors can be read on the way. `tls`: all of that inside TLS 1.3 with a
    certificate on both sides, so every byte is encrypted and authenticated; costs more speed.
    Processes of one host keep to shared memory or the Unix socket, which no network sees."""
    verbose: bool = True
    """Show progress and the nodes' output on the driver's standard error."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_s") and not _is_time(value):
                raise SettingsError(f"{each.name} must be > 0 seconds and finite, got {value!r}.")
        if not isinstance(self.checkpoints, Checkpoints | None):
            raise SettingsError(f"checkpoints must be a tfos.Checkpoints, got {self.checkpoints!r}")
        for name in ("hang_s", "lease_s"):
            if getattr(self, name) < 3 * self.heartbeat_s:
                raise SettingsError(
                    f"{name}={getattr(self, name)} is less than 3 heartbeats of "
                    f"{self.heartbeat_s} s: one lost message would end a node. "
                    f"Use {name} >= {3 * self.heartbeat_s}."
                )
        self._check_data_plane()
        for name, at_least in (("max_inflight_bytes", 1), ("threads_per_node", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
                raise SettingsError(f"{name} must be an int >= {at_least}, got {value!r}.")
        if self.save_on_interrupt is not None and not isabs(self.save_on_interrupt):
            raise SettingsError(
                f"save_on_interrupt must be an absolute path, got {self.save_on_interrupt!r}: the "
                "servers run in other directories than the driver."
            )

    def _check_data_plane(self) -> None:
        if self.integrity not in ("header", "payload"):
            raise SettingsError(f"integrity must be 'header' or 'payload', got {self.integrity!r}.")
        if self.security not in ("hmac", "tls"):
            raise SettingsError(f"security must be 'hmac' or 'tls', got {self.security!r}.")
        if self.security == "tls" and self.integrity == "payload":
            raise SettingsError(
                "integrity='payload' and security='tls' authenticate every byte twice; "
                "leave integrity at 'header' with security='tls'."
            )


def _is_time(value: object) -> bool:
    """Whether a wait can take it as its timeout."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf
