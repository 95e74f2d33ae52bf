"""The record of a node's failure, and who the node is.

Covers: NodeId, NodeFailure and the error types that the driver sets.
Does not: make the record of a dead child (tfos.node.failure), describe it (tfos.errors).
"""

from __future__ import annotations

import msgspec


class NodeId(msgspec.Struct, frozen=True):
    """One node: role and index in the plan, and the attempt that Spark is at."""

    role: str
    index: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """`worker:1`, as users see it."""
        return f"{self.role}:{self.index}"


class NodeFailure(msgspec.Struct, frozen=True):
    """Why a node failed: a record, so that the first one can be the headline.

    `error_type` is the qualified name of the user's exception, or one of the names below when no
    Python exception tells the reason. Times are not in it: arrival order at the driver decides.
    """

    node: NodeId
    host: str
    pid: int
    executor_id: str = ""
    phase: str = ""
    exit_code: int | None = None
    signal: int | None = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    log_tail: tuple[str, ...] = ()
    log_path: str = ""
    """The node's full output on its own host."""


EXECUTOR_LOST = "ExecutorLost"
"""`NodeFailure.error_type`: the node's executor ended under it."""


NODE_SILENT = "NodeSilent"
"""`NodeFailure.error_type`: set by the driver for a node that it no longer hears."""
