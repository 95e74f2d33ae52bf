"""Every error of tfos that a program can catch: one tree, ordered by who must act.

TFOSError                        every error of tfos, ps, feeding and rpc
├── SettingsError            impossible arguments (also a ValueError)     → fix the call
│   ├── ConfigError          a Spark setting that the cluster cannot use  → fix the configuration
│   ├── NotCompiled          distribute() before compile()                → compile first
│   ├── NotDistributed       training leaves the parameter servers out    → ctx.distribute(model)
│   ├── VariablesChanged     layers or `trainable` changed afterwards     → distribute last
│   ├── NotPicklable         main_fun cannot travel to the executors      → fix the function
│   └── UnsupportedError     tfos does not do this (yet)                  → choose another way
│       ├── UnsupportedOptimizer   the servers have no such rule          → choose another
│       └── UnsupportedModel       the step cannot be split               → change train_step
├── NotEnoughSlots           Spark cannot run all nodes at once           → fewer nodes, more slots
├── ReservationTimeout       nodes did not register; the text names them  → look at those executors
├── PhaseError               the call does not fit the cluster's phase    → programming error
├── NoResultError            a worker's return value is not at the driver → end main_fun, its return
├── NodeFailedError          a node failed; `failures` has the records    → read the first one
├── FeedError                feeding.errors: rows, chunks, files
│   ├── FeedTimeout          no worker took the rows that were fed        → feed_timeout, main_fun
│   ├── FeedJobError         the Spark job that feeds rows failed         → the data, the executors
│   └── PoisonRows           rows were there each time a worker crashed   → look at these rows
├── PSError                  ps.errors: parameter servers, checkpoints, tables
├── RpcError                 rpc.errors: the data plane below both
├── ExportError              an export or index is damaged or another one → the text names the file
├── CollectiveError          a barrier, broadcast, allreduce or allgather failed
│   ├── RankLost             a rank ended before it made this call        → read that rank's error
│   ├── RankMismatch         ranks make different calls                   → the same calls on each
│   └── CollectiveTimeout    a rank did not make this call in time        → timeout_s
├── MapTrainError            map_train ended early, or an item has failed → the text names the item
├── ShutdownTimeout          nodes did not end in time and were killed    → timeout, main_fun
├── ControlError             the control plane between driver and nodes
│   ├── ControlUnavailable   transient: no reply in time                  → retried by the caller
│   │   └── ControlFailed    the driver could not handle the call         → retried a few times
│   └── ControlRefused       the driver refused this node permanently     → the node ends
└── NodeError                starting and running one node
    ├── NodeStartError       the supervisor did not start                 → read its last output
    │   └── VersionSkew      this executor cannot work with this driver   → the same environment
    ├── LinkError            a child or supervisor sent no valid message  → a defect of tfos
    └── NoServersError       the cluster has no parameter servers         → num_ps >= 1

FeedEndedWarning             fit() has more epochs than were fed
RowsReadAheadWarning         a second dataset of a feed lacks some rows  → use one in every fit
SortedRowsWarning            fit() trains rows that are not shuffled      → shuffle them

The classes of ps.errors, feeding.errors and rpc.errors can also be imported from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from feeding.errors import (
    ChunkError,
    DataError,
    FeedClosed,
    FeedError,
    FeedSettingsError,
    FeedTimeout,
    FileChanged,
    LateChunk,
    MissingPackage,
    NotAuthenticated,
    NoWorkerLeft,
    PathError,
    ResultCountError,
    ResultTypeError,
    RowError,
    RowsChanged,
    SchemaError,
    StorageUnavailable,
    TrainerFailed,
)
from ps.errors import (
    CheckpointError,
    ClosedError,
    IdError,
    ManifestMismatch,
    NonFiniteGradient,
    NonFiniteUpdate,
    PackingError,
    PSError,
    PSSettingsError,
    PushError,
    RequestTimeout,
    RoleError,
    SequenceGap,
    ServerError,
    ServerGone,
    ServerPhaseError,
    ServerRestoring,
    ServerUnavailable,
    ShapeError,
    StaleGeneration,
    TableFull,
    WorkerLost,
)
from rpc.errors import (
    AuthError,
    BusyError,
    ConnectionClosed,
    DeadlineExceeded,
    IntegrityError,
    LimitExceeded,
    PeerGone,
    PortInUse,
    ProtocolError,
    RemoteError,
    RpcError,
    SettingsError,
    TFOSError,
    TransportError,
    Unreachable,
    VersionMismatch,
)
from tfos.failure import NodeFailure

__all__ = [
    "AuthError",
    "BusyError",
    "CheckpointError",
    "ChunkError",
    "ClosedError",
    "CollectiveError",
    "CollectiveTimeout",
    "ConfigError",
    "ConnectionClosed",
    "ControlError",
    "ControlFailed",
    "ControlRefused",
    "ControlUnavailable",
    "DataError",
    "DeadlineExceeded",
    "ExportError",
    "FeedClosed",
    "FeedEndedWarning",
    "FeedError",
    "FeedJobError",
    "FeedSettingsError",
    "FeedTimeout",
    "FileChanged",
    "IdError",
    "IntegrityError",
    "LateChunk",
    "LimitExceeded",
    "LinkError",
    "ManifestMismatch",
    "MapTrainError",
    "MissingPackage",
    "NoResultError",
    "NoServersError",
    "NoWorkerLeft",
    "NodeError",
    "NodeFailedError",
    "NodeStartError",
    "NonFiniteGradient",
    "NonFiniteUpdate",
    "NotAuthenticated",
    "NotCompiled",
    "NotDistributed",
    "NotEnoughSlots",
    "NotPicklable",
    "PSError",
    "PSSettingsError",
    "PackingError",
    "PathError",
    "PeerGone",
    "PhaseError",
    "PoisonRows",
    "PortInUse",
    "ProtocolError",
    "PushError",
    "RankLost",
    "RankMismatch",
    "RemoteError",
    "RemoteTraceback",
    "RequestTimeout",
    "ReservationTimeout",
    "ResultCountError",
    "ResultTypeError",
    "RoleError",
    "RowError",
    "RowsChanged",
    "RowsReadAheadWarning",
    "RpcError",
    "SchemaError",
    "SequenceGap",
    "ServerError",
    "ServerGone",
    "ServerPhaseError",
    "ServerRestoring",
    "ServerUnavailable",
    "SettingsError",
    "ShapeError",
    "ShutdownTimeout",
    "SortedRowsWarning",
    "StaleGeneration",
    "StorageUnavailable",
    "TFOSError",
    "TableFull",
    "TrainerFailed",
    "TransportError",
    "Unreachable",
    "UnsupportedError",
    "UnsupportedModel",
    "UnsupportedOptimizer",
    "VariablesChanged",
    "VersionMismatch",
    "VersionSkew",
    "WorkerLost",
]


class ConfigError(SettingsError):
    """The cluster cannot run with this Spark setting."""


class UnsupportedError(SettingsError):
    """tfos does not support this; the text names an alternative."""


class NotPicklable(SettingsError):
    """`main_fun` or its arguments cannot be pickled; the text names the object."""


class NotEnoughSlots(TFOSError):
    """Spark offers fewer task slots at once than the cluster has nodes."""


class ReservationTimeout(TFOSError):
    """Not every node registered in time.

    Args:
        message: the text of the error.

    Attributes:
        missing: names of the nodes that were not ready.
    """

    def __init__(self, message: str, missing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class PhaseError(TFOSError):
    """The call does not fit the phase that the cluster is in."""


class NoResultError(TFOSError):
    """A worker's return value is not at the driver; the text says whose, and why."""


class FeedJobError(FeedError):
    """The Spark job that feeds rows failed, without a failed node."""


class PoisonRows(FeedError):
    """Workers crashed several times, and had the same rows each time.

    Args:
        message: the text of the error.
        rows: see below.

    Attributes:
        rows: ranges (start, stop) of rows, `stop` excluded, by partition.
    """

    def __init__(
        self, message: str, rows: Mapping[int, Sequence[tuple[int, int]]] | None = None
    ) -> None:
        super().__init__(message)
        self.rows = {partition: tuple(spans) for partition, spans in (rows or {}).items()}

    def __reduce__(self) -> tuple[type[PoisonRows], tuple[str, dict[int, Any]]]:
        return PoisonRows, (str(self), self.rows)


class ExportError(TFOSError):
    """An export cannot be written, read or served; the text names the file and the reason."""


class CollectiveError(TFOSError):
    """A collective call of several ranks failed."""

    code: ClassVar[str] = "collective"


class RankLost(CollectiveError):
    """A rank has ended before it made this collective call; its own error is the cause."""

    code = "rank_lost"


class RankMismatch(CollectiveError):
    """Ranks make different collective calls, or with arrays that differ in shape or dtype."""

    code = "rank_mismatch"


class CollectiveTimeout(CollectiveError):
    """A rank did not make this collective call in time; the text names it.

    Args:
        text: the text of the error.
        late: the ranks that did not make the call.
    """

    code = "collective_timeout"

    def __init__(self, text: str, late: Iterable[int] = ()) -> None:
        super().__init__(text)
        self.late = tuple(sorted(late))


class MapTrainError(TFOSError):
    """`map_train` ended early, or an item has failed; the text names it."""


class ShutdownTimeout(TFOSError):
    """Nodes did not end within the timeout; they were stopped by force.

    Args:
        text: the text of the error.
        nodes: the nodes that did not end, each with its host and phase.
    """

    def __init__(self, text: str, nodes: str = "") -> None:
        super().__init__(text)
        self.nodes = nodes


class ControlError(TFOSError):
    """The control plane failed."""


class ControlUnavailable(ControlError):
    """No reply arrived within the deadline; a retry may help."""


class ControlFailed(ControlUnavailable):
    """The driver answered that it could not handle the call; a retry rarely helps."""


class ControlRefused(ControlError):
    """The driver refused this node: wrong certificate, replaced attempt or closing cluster."""


class RemoteTraceback(Exception):
    """The traceback of an exception in a node's process, as text; a `__cause__`."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


class NodeFailedError(TFOSError):
    """A node failed: the first failure is the headline, the rest are counted.

    The node's own traceback is `__cause__`, so Python prints it first.

    Attributes:
        failures: every failure record; the first is the root cause.

    Args:
        failures: the records, the root cause first.
        num_earlier: how many of them, the last ones, came before the root cause: losses that the
            cluster went on after.
    """

    def __init__(self, failures: Sequence[NodeFailure], num_earlier: int = 0) -> None:
        self.failures: list[NodeFailure] = list(failures)
        self.num_earlier = num_earlier
        super().__init__(describe_failures(self.failures, num_earlier))
        if self.failures and self.failures[0].traceback:
            self.__cause__ = RemoteTraceback(self.failures[0].traceback)

    def __reduce__(self) -> tuple[type[NodeFailedError], tuple[list[NodeFailure], int]]:
        return NodeFailedError, (self.failures, self.num_earlier)


def describe_failures(failures: Sequence[NodeFailure], num_earlier: int = 0) -> str:
    """Return the text of a NodeFailedError: root cause, where it was raised, how many more.

    Args:
        failures: the root cause, then what came after it, then what came before.
        num_earlier: how many came before.
    """
    if not failures:
        return "a node failed without a record"
    first = failures[0]
    lines = [_headline(first), _where(first)]
    if not first.traceback and first.log_tail:
        lines += ["last lines of its output:", *(f"    {line}" for line in first.log_tail)]
    first_earlier = len(failures) - num_earlier
    for when, others in (
        ("after", failures[1:first_earlier]),
        ("before", failures[max(1, first_earlier) :]),
    ):
        if others:
            names = ", ".join(sorted({other.node.name for other in others}))
            plural = "s" if len(others) > 1 else ""
            lines.append(f"{len(others)} more failure{plural} {when} it: {names}")
    return "\n".join(lines)


def _headline(failure: NodeFailure) -> str:
    if not failure.error_type:
        return failure.message or "ended without a reason"
    return f"{failure.error_type}: {failure.message}" if failure.message else failure.error_type


def _where(failure: NodeFailure) -> str:
    verb = "raised in" if failure.traceback else "failed:"
    where = [
        f"executor {failure.executor_id}" if failure.executor_id else "",
        failure.host,
        f"pid {failure.pid}" if failure.pid else "",
        f"phase {failure.phase}" if failure.phase else "",
    ]
    known = ", ".join(part for part in where if part)
    text = f"{verb} {failure.node.name}" + (f" ({known})" if known else "")
    return f"{text}; log: {failure.log_path}" if failure.log_path else text


class NotCompiled(SettingsError):
    """The model has no optimizer yet."""


class NotDistributed(SettingsError):
    """A worker trains alone although the cluster has parameter servers."""


class VariablesChanged(SettingsError):
    """The model's variables are not the ones that were distributed."""


class UnsupportedOptimizer(UnsupportedError):
    """The servers have no update rule for this optimizer or for one of its settings."""


class UnsupportedModel(UnsupportedError):
    """The training step cannot be split into the worker's gradients and the servers' update."""

    _keras_call_info_injected = True
    """Keras raises it as it is, without the arguments of the calls around it."""


class FeedEndedWarning(UserWarning):
    """The feed ended before `fit` had run all its epochs."""


class RowsReadAheadWarning(UserWarning):
    """Another dataset of a feed has read rows ahead, which this one does not get."""


class SortedRowsWarning(UserWarning):
    """The rows of an epoch look sorted, which makes training worse."""


class NodeError(TFOSError):
    """Base of the errors of a node's processes."""


class NodeStartError(NodeError):
    """The supervisor of a node did not start."""


class VersionSkew(NodeStartError):
    """This executor has another Python or another tfos than the driver."""


class LinkError(NodeError):
    """The peer of the link sent bytes that are not a valid message."""


class NoServersError(NodeError):
    """A call needs parameter servers, and the cluster has none."""
