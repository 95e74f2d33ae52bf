"""NodeFailure, the record of a node's failure, and NodeId, the node's identity.

Covers: NodeId, NodeFailure, the error types that the driver sets, which ones are symptoms, which
are crashes.
Does not: make the record of a dead child (tfos.node.failure), describe it (tfos.errors).
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence

import msgspec

from rpc.field_texts import with_field_texts

TENSORFLOW_ERRORS = "tensorflow.python.framework.errors_impl"
"""The module of TensorFlow's own errors."""


class NodeId(msgspec.Struct, frozen=True):
    """One node: role and index in the plan, and the attempt that Spark is at."""

    role: str
    index: int
    attempt: int = 0

    @property
    def name(self) -> str:
        """`worker:1`, as users see it."""
        return f"{self.role}:{self.index}"


@with_field_texts
class NodeFailure(msgspec.Struct, frozen=True):
    """A node's failure as a record; an error shows the first record as its headline.

    `error_type` is the qualified name of the user's exception, or one of the names below when there
    is no Python exception. The record has no time: arrival order at the driver decides.
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
"""`NodeFailure.error_type`: the node's executor ended."""
NODE_JOB_FAILED = "NodeJobFailed"
"""`NodeFailure.error_type`: Spark gave up on the job that holds this node's task."""


GPU_UNUSABLE = "GpuUnusable"
"""`NodeFailure.error_type`: another process holds a GPU of the node, or there is no such GPU."""


NODE_SILENT = "NodeSilent"
"""`NodeFailure.error_type`: set by the driver for a node without heartbeats."""

_RANK_LOST = "RankLost"
_SERVER_SILENT = ("ServerGone", "RequestTimeout")
_SYMPTOMS = (
    *("WorkerLost", *_SERVER_SILENT),  # of ps
    *("PeerGone", "DeadlineExceeded", NODE_SILENT),
    _RANK_LOST,
)


def is_crash(failure: NodeFailure) -> bool:
    """Whether a signal killed the process that nobody sends to end one in order: SEGV, KILL.

    The kernel kills by KILL what needs too much memory, so what the process did may be the reason.
    """
    return failure.signal not in (None, signal.SIGTERM, signal.SIGINT)


def is_symptom(failure: NodeFailure) -> bool:
    """Whether it follows from the end of another node: no headline while a cause is known."""
    return _kind(failure) in _SYMPTOMS


def cause_at(
    failures: Sequence[NodeFailure], place: int, *, ranks: Collection[str], away: Collection[str]
) -> int:
    """Return the place of the cause of a failure that ended a cluster: its own, unless a symptom.

    A symptom's cause may arrive behind it. What came before, the cluster has survived, so it is the
    cause only where others wait for what was lost: of a lost rank, as late as in their next
    collective call, and of a server that did not answer while it is started again.

    Args:
        failures: in order of arrival.
        place: of the failure, from 0.
        ranks: names of the workers.
        away: names of parameter servers that do not serve: they are started again, or restore.
    """
    if not is_symptom(failures[place]):
        return place
    kind = _kind(failures[place])

    def explains(node: NodeId) -> bool:
        if kind == _RANK_LOST:
            return node.name in ranks
        return kind in _SERVER_SILENT and node.name in away

    causes = [at for at, each in enumerate(failures) if not is_symptom(each)]
    before = [at for at in causes if at < place and explains(failures[at].node)]
    behind = [at for at in causes if at > place]
    return [*before[-1:], *behind[:1], place][0]


def _kind(failure: NodeFailure) -> str:
    return failure.error_type.rpartition(".")[2]
