"""Error tree of feeding: every error that the room can raise, and its code on the wire.

FeedError (a TFOSError)
├── FeedSettingsError    impossible settings                    → fix the call
├── RowError             a row does not fit a chunk             → fix the data
├── SchemaError          a chunk does not fit what was asked    → fix the data or ask another dtype
├── DataError            a file's content is damaged            → repair it, or skip bad records
├── ChunkError           a peer sent a malformed chunk          → fix the deployment
├── LateChunk            a chunk of an epoch that has ended     → a task outlived its Spark job
├── RowsChanged          a partition computed again is another  → cache or sort the data
├── ResultCountError     not one result per row                 → fix main_fun
├── ResultTypeError      a result does not fit its column       → fix main_fun or output=
├── FeedTimeout          no consumer took rows in time          → slow step or stuck trainer
├── NoWorkerLeft         every worker is gone                   → the workers' own failure says why
├── TrainerFailed        main_fun raised; carries its error     → fix main_fun
├── PathError            a path or name that is refused         → fix the path
├── MissingPackage       what a file system needs is absent     → install it
├── NotAuthenticated     no valid Kerberos ticket or token      → get one; the message says how
├── StorageUnavailable   a file system did not answer in time   → its servers; then run again
├── FileChanged          a file was replaced while it was read  → write files under new names
└── FeedClosed           the cluster is stopping

A worker sends a refusal as the `code` of its class; `from_remote` returns that class.
"""

from __future__ import annotations

from typing import ClassVar

from rpc.errors import RemoteError, SettingsError, TFOSError


class FeedError(TFOSError):
    """Base of all errors of feeding."""

    code: ClassVar[str] = "feed"


class FeedSettingsError(FeedError, SettingsError):
    """The settings cannot work, whatever the data."""

    code = "feed_settings"


class RowError(FeedError):
    """A row does not fit its chunk; names partition, row and column."""

    code = "feed_row"


class SchemaError(FeedError):
    """A chunk's columns differ from those that the consumer requested, or the first chunk's."""

    code = "feed_schema"


class DataError(FeedError):
    """Stored data is damaged or not what it should be; names file, record and byte."""

    code = "feed_data"


class ChunkError(FeedError):
    """A chunk from the wire contradicts itself or exceeds a limit."""

    code = "feed_chunk"


class LateChunk(FeedError):
    """A chunk of an epoch that the driver has ended."""

    code = "feed_late_chunk"


class RowsChanged(FeedError):
    """A partition that was fed in part has other rows after Spark computed it again."""

    code = "feed_rows_changed"


class ResultCountError(FeedError):
    """`batch_results` got more or fewer results than rows were read."""

    code = "feed_results"


class ResultTypeError(FeedError):
    """An inference result does not fit its column; names column, type found and type expected."""

    code = "feed_result_type"


class FeedTimeout(FeedError):
    """Nothing moved within `feed_timeout_s` (feeder) or `starve_timeout_s` (consumer)."""

    code = "feed_timeout"


class NoWorkerLeft(FeedError):
    """Every worker is gone; the message names each with its reason."""

    code = "feed_no_worker"


class TrainerFailed(FeedError):
    """`main_fun` raised in the worker; `error_type` and `remote_traceback` are the user's own.

    Args:
        message: the sentence that the feeder's user reads.
        error_type: name of the user's exception class; "": unknown.
        remote_traceback: text of the user's traceback; "": none.
    """

    code = "feed_trainer_failed"

    def __init__(self, message: str, error_type: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.error_type = error_type
        self.remote_traceback = remote_traceback

    def __reduce__(self) -> tuple[type[TrainerFailed], tuple[str, str, str]]:
        return type(self), (str(self), self.error_type, self.remote_traceback)


class PathError(FeedError, ValueError):
    """A path or name is refused; the message shows it escaped."""

    code = "feed_path"


class MissingPackage(FeedError, ImportError):
    """A path needs a package that is not installed; the message names it."""

    code = "feed_package"


class NotAuthenticated(FeedError, PermissionError):
    """A NameNode asks for Kerberos, and the user has no valid ticket or token for it."""

    code = "feed_credentials"


class StorageUnavailable(FeedError, OSError):
    """The servers of a file system did not answer in time; names the path and the last reason."""

    code = "feed_storage"


class FileChanged(FeedError, OSError):
    """A file was replaced or changed while it was open."""

    code = "feed_file_changed"


class FeedClosed(FeedError):
    """The channel was closed: the cluster is stopping."""

    code = "feed_closed"


_BY_CODE = {kind.code: kind for kind in FeedError.__subclasses__()}


def from_remote(error: RemoteError, peer: str) -> FeedError:
    """Return a worker's refusal as an instance of its local class.

    Args:
        error: as the RPC client raised it.
        peer: the worker that refused, such as "worker:1"; the message begins with it.
    """
    if error.code == TrainerFailed.code:
        details = error.details
        return TrainerFailed(
            f"{peer}: {error.message}",
            details.get("error_type", ""),
            details.get("traceback", ""),
        )
    kind = _BY_CODE.get(error.code, FeedError)
    text = error.message if error.message.startswith(peer) else f"{peer}: {error.message}"
    return kind(text)
