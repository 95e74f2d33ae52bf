"""Error tree of ps: every error of the parameter server, ordered by who must act.

PSError (a TFOSError)
├── PSSettingsError          impossible settings                 → fix the call
├── ManifestMismatch         two sides mean different parameters → fix the deployment
├── RoleError                this role may not call that         → fix the call
├── ServerPhaseError         the shard is in the wrong phase     → wait, seed or restart it
│   └── ServerRestoring      it reads its checkpoint             → asked again; then RequestTimeout
├── PushError                a push was refused                  → each class says what has changed
│   ├── ShapeError           size or dtype of a tensor is wrong
│   ├── NonFiniteGradient    NaN or infinity in a gradient
│   │   └── NonFiniteUpdate  a finite gradient, whose update overflows
│   ├── PackingError         a packed gradient that no packer makes
│   ├── IdError              an id that its table does not take
│   ├── TableFull            a table has no room for new rows
│   ├── StaleGeneration     a newer attempt of this worker is registered
│   └── SequenceGap          a push is missing before this one
├── WorkerLost               a barrier lost a member             → from the last checkpoint
├── CheckpointError          a checkpoint cannot be written or read
├── ServerUnavailable        network or peer failed              → retried; then this
│   ├── RequestTimeout
│   └── ServerGone
├── ClosedError              *this side* closed it earlier       → programming error
└── ServerError              the server failed for a reason of its own

Each class has a `code`, its name on the wire: a handler's exception travels as (code, message,
details) and `from_remote` makes it the same class at the client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from rpc.errors import SettingsError, TFOSError

if TYPE_CHECKING:
    from typing import Self

    from rpc.errors import RemoteError


class PSError(TFOSError):
    """Base of all errors of the parameter server.

    Args:
        message: what was got, what was expected and the next step.
        details: the same as strings by name, for programs; travels with the error frame.
    """

    code: ClassVar[str] = "ps"

    def __init__(self, message: str, details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, str] = dict(details or {})

    def again(self) -> Self:
        """Return the same error without its traceback, to keep it and raise it again."""
        return type(self)(self.message, self.details)


class PSSettingsError(PSError, SettingsError):
    """Settings that cannot work, for any caller.

    A `ValueError` too, so that decoding a manifest reports it with the path of the field.
    """

    code = "settings"


class ManifestMismatch(PSError):
    """Client and server, or server and checkpoint, describe different parameters."""

    code = "manifest_mismatch"


class RoleError(PSError):
    """The caller's role may not make this call."""

    code = "role"


class ServerPhaseError(PSError):
    """The shard is in a phase in which this call is illegal; the message names both."""

    code = "phase"


class ServerRestoring(ServerPhaseError):
    """The server fills itself from a checkpoint; the same request is answered once it has."""

    code = "restoring"


class PushError(PSError):
    """A push was refused; nothing has changed, unless the class says otherwise."""

    code = "push"


class ShapeError(PushError):
    """A tensor has another size or dtype than the manifest says."""

    code = "shape"


class NonFiniteGradient(PushError):
    """A gradient holds NaN or infinity.

    From a server: that bucket or segment is unchanged. In async and ssp, and in tables, those that
    came before it have changed; the message says how many.
    """

    code = "non_finite"


class NonFiniteUpdate(NonFiniteGradient):
    """The update of a finite gradient would make parameters or slots NaN or infinite.

    Those elements keep their values and slots; all others are updated.
    """

    code = "non_finite_update"


class PackingError(PushError):
    """A packed bucket has content that no packer makes. What has changed: see NonFiniteGradient."""

    code = "packing"


class IdError(PushError):
    """An id that its table does not take: wrong type, out of range, or twice in one push."""

    code = "id"


class TableFull(PushError):
    """A table has no room for the rows of new ids; the message says how many it holds."""

    code = "table_full"


class StaleGeneration(PushError):
    """The push came from an attempt of a worker that a newer attempt has replaced."""

    code = "stale_generation"


class SequenceGap(PushError):
    """The push's sequence number does not follow the last one of this worker."""

    code = "sequence_gap"


class WorkerLost(PSError):
    """A member of the sync barrier is gone, so the step cannot be completed."""

    code = "worker_lost"


class CheckpointError(PSError):
    """A checkpoint is incomplete, damaged, of another model, or cannot be written."""

    code = "checkpoint"


class ServerUnavailable(PSError):
    """The network or the peer failed and retries did not help."""

    code = "transport"


class RequestTimeout(ServerUnavailable):
    """No answer within the deadline."""

    code = "request_timeout"


class ServerGone(ServerUnavailable):
    """The peer closed or reset the connection and could not be reached again."""

    code = "peer_gone"


class ClosedError(PSError):
    """This side was closed earlier."""

    code = "closed"


class ServerError(PSError):
    """The server failed for a reason of its own; its log has the traceback."""

    code = "internal"


def _tree(root: type[PSError]) -> Iterator[type[PSError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_BY_CODE = {error.code: error for error in _tree(PSError)}


def from_remote(error: RemoteError) -> PSError:
    """Return the exception that the server raised, as the class its code names.

    A code that is unknown here becomes `ServerError` and keeps the code in the text.
    """
    found = _BY_CODE.get(error.code)
    if found is None:
        return ServerError(f"{error.message} (code {error.code!r})", error.details)
    return found(error.message, error.details)


def client_closed() -> ClosedError:
    """What a call at a closed client raises."""
    return ClosedError("this client is closed; make a new one")
