"""Everything that feeding can raise.

FeedError (a TFOSError)
├── FeedSettingsError    impossible settings                    → fix the call
├── RowError             a row does not fit a chunk             → fix the data
├── SchemaError          a chunk does not fit what was asked    → fix the data or ask another dtype
├── DataError            a file's content is damaged           → repair it, or skip bad records
├── ChunkError           a peer sent a malformed chunk          → fix the deployment
├── LateChunk            a chunk of an epoch that has ended     → a task outlived its job
├── RowsChanged          a partition computed again is another  → cache or sort the data
├── ResultCountError     not one result per row                 → fix main_fun
├── ResultTypeError      a result does not fit its column       → fix main_fun or output=
├── FeedTimeout          nobody consumed anything for too long  → slow step or stuck trainer
├── NoWorkerLeft         every worker is gone                   → the workers' own failure says why
├── TrainerFailed        main_fun raised; carries its error     → fix main_fun
├── PathError            a path or name that is refused         → fix the path
├── MissingPackage       what a file system needs is absent     → install it
├── StorageUnavailable   a file system did not answer in time   → its servers; then run again
├── FileChanged          a file was replaced while it was read  → write files under new names
└── FeedClosed           the cluster is stopping

A refusal travels as its class's `code` and comes back as that class (`from_remote`).
"""

from __future__ import annotations

from typing import ClassVar

from rpc.errors import RemoteError, SettingsError, TFOSError


class FeedError(TFOSError):
    """Base of all errors of this package."""

    code: ClassVar[str] = "feed"


class FeedSettingsError(FeedError, SettingsError):
    """The settings cannot work, whatever the data."""

    code = "feed_settings"


class RowError(FeedError):
    """A row does not fit its chunk; names partition, row and column."""

    code = "feed_row"


class SchemaError(FeedError):
    """A chunk's columns are not what the consumer asked for or what the feed began with."""

    code = "feed_schema"


class DataError(FeedError):
    """Stored data is damaged or not what it should be; names file, record and byte."""

    code = "feed_data"


class ChunkError(FeedError):
    """A chunk that came over the wire contradicts itself or a limit."""

    code = "feed_chunk"


class LateChunk(FeedError):
    """A chunk arrived for an epoch whose end was already ordered."""

    code = "feed_late_chunk"


class RowsChanged(FeedError):
    """A partition that was fed in part had other rows when it was computed again."""

    code = "feed_rows_changed"


class ResultCountError(FeedError):
    """`batch_results` got more or fewer results than rows were handed out."""

    code = "feed_results"


class ResultTypeError(FeedError):
    """A result of inference does not fit its column; names column, what came and what fits."""

    code = "feed_result_type"


class FeedTimeout(FeedError):
    """Nothing moved within `feed_timeout_s` (feeder) or `starve_timeout_s` (consumer)."""

    code = "feed_timeout"


class NoWorkerLeft(FeedError):
    """Every worker that could take rows is gone; the message names each with its reason."""

    code = "feed_no_worker"


class TrainerFailed(FeedError):
    """`main_fun` raised in the worker; `error_type` and `remote_traceback` are the user's own."""

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
    """A path needs a package that is not installed; the message says which."""

    code = "feed_package"


class StorageUnavailable(FeedError, OSError):
    """The servers of a file system did not answer in time; names the path and the last reason."""

    code = "feed_storage"


class FileChanged(FeedError, OSError):
    """A file that is open is not the one any more that was opened."""

    code = "feed_file_changed"


class FeedClosed(FeedError):
    """The channel was closed: the cluster is stopping."""

    code = "feed_closed"


_BY_CODE: dict[str, type[FeedError]] = {
    kind.code: kind
    for kind in (
        FeedError,
        FeedSettingsError,
        RowError,
        SchemaError,
        ChunkError,
        LateChunk,
        ResultCountError,
        FeedTimeout,
        NoWorkerLeft,
        FeedClosed,
    )
}


def from_remote(error: RemoteError, peer: str) -> FeedError:
    """Return the local class of a worker's refusal; `peer` ("worker:1") leads the message."""
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
