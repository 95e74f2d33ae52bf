"""What the processes of one node are told at their start, as typed structs.

Covers: the bodies of the bootstrap documents (node.bootstrap) and of the status line that a
supervisor writes for its node task.
Does not: read or write them. Imports nothing heavy: node tasks and supervisors use it.
"""

from __future__ import annotations

import enum

import msgspec

from tfos.node.bundle import NodeBundle


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
    """Inherited write end; the node task reads Status lines from the other."""
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


class Status(msgspec.Struct, frozen=True):
    """One line on the status pipe, JSON."""

    state: State
    reason: str = ""
