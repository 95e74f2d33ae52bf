"""State of a streaming query: its last trained batch, its speed, its stop.

Covers: which batches are repeated or missing, holding a batch back while the query stops.
Does not: call Spark or the cluster (tfos.streaming.streaming, tfos.streaming.handle).
Runs in: the driver.      Threads: any; each run's condition guards its phase.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from rpc.field_texts import with_field_texts
from tfos.control.epoch_log import MAX_EPOCHS
from tfos.errors import FeedJobError
from tfos.monitor.reports import EpochReport

_INTERRUPTED = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling train_batch: "
    "java.lang.InterruptedException: the query is stopped"
)
"""With this text in a Python function's error, Spark ends a query that has the order to stop
without marking the batch as done or failed (StreamExecution.isInterruptionException)."""
_HELD_S = 600.0
"""Seconds for stop() to reach Spark; it takes a few."""


class StreamStopped(Exception):
    """This batch is not trained: the query is being stopped."""


class BatchStopped(FeedJobError):
    """A batch was not trained to its end: main_fun had been asked to end its training."""


class StreamFailed(Exception):
    """The text of an error for Spark: its kind and message, in few lines."""


@dataclass
class QueryState:
    """One query over all its runs in this program; one batch at a time changes it."""

    query: str
    """Spark's id; the same after a restart from the same checkpoint location."""
    feed: str = ""
    last_id: int = -1
    """Id of the last batch that is over; -1: none, ever."""
    is_known: bool = False
    """Whether `last_id` includes the batches of a restored checkpoint."""
    trained_id: int = -1
    """Id of the last batch with rows that is in the parameters; -1: none in this program."""
    num_unsaved: int = 0
    """Batches trained since the last save."""
    first_unsaved_id: int = -1
    """Id of the first of them."""
    num_batches: int = 0
    """Batches with rows trained in this program."""
    rows: int = 0
    dropped_rows: int = 0
    rows_per_s: float = 0.0
    has_warned: bool = False
    epochs: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))
    """Epochs of the feed that were the newest batches with rows."""

    def know(self, restored_id: int) -> None:
        """Go on from a restored batch."""
        self.last_id = max(self.last_id, restored_id)
        self.is_known = True

    def take_back(self) -> None:
        """The last batch with rows is not whole in the parameters: Spark brings it again."""
        self.last_id = self.trained_id = self.trained_id - 1
        self.num_unsaved -= 1

    def know_trained(self, batch_id: int) -> None:
        """A batch whose end this driver did not wait for is in the parameters, perhaps in no save.

        Args:
            batch_id: Spark's number of the micro-batch.
        """
        if not self.num_unsaved:
            self.first_unsaved_id = batch_id
        self.num_unsaved += 1
        self.last_id = self.trained_id = batch_id

    @property
    def unsaved(self) -> str:
        """The names of the batches trained since the last save; empty ones may be among them."""
        return _names(self.first_unsaved_id, self.trained_id)

    def missing(self, batch_id: int) -> str:
        """Return the names of the batches between the last one and this one; empty without any."""
        first, last = self.last_id + 1, batch_id - 1
        return _names(first, last) if first <= last else ""

    def note(self, batch_id: int, report: EpochReport) -> None:
        """A batch is over; without rows it changed nothing that had to be saved.

        Args:
            batch_id: Spark's number of the micro-batch.
            report: report of the epoch that fed it.
        """
        if report.fed_rows:
            if not self.num_unsaved:
                self.first_unsaved_id = batch_id
            self.trained_id = batch_id
            self.num_unsaved += 1
            self.num_batches += 1
            self.rows += report.trained_rows
            self.dropped_rows += report.dropped_rows
            self.rows_per_s = report.trained_rows / max(report.seconds, 1e-9)
            self.epochs.append(report.epoch)
        self.last_id = batch_id  # last: a reader that sees it also sees the numbers of this batch


class RunPhase(Enum):
    """What one run of a query does."""

    IDLE = auto()
    TRAINING = auto()
    STOPPING = auto()
    """No batch is trained any more."""
    HELD = auto()
    """Like STOPPING, but Spark waits for a batch that must not be trained, or only was in part."""


@dataclass
class StreamRun:
    """One run of a query, from its start to its end."""

    run: str = ""
    """Spark's id of it."""
    error: BaseException | None = None
    """Why train_batch failed, or the query was ended without a batch."""
    has_handle: bool = False
    """Whether a StreamTraining ends the query in order."""
    saves_behind: bool = False
    """Whether its stop may have to save: saves do not follow each batch."""
    phase: RunPhase = RunPhase.IDLE
    let_go: threading.Event = field(default_factory=threading.Event)
    """Set once the query has the order to stop: batches that are held back may end."""
    _num_stops: int = 0
    """Calls of `stop` that wait for the end of the running batch."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def is_stopping(self) -> bool:
        """Whether no batch is trained any more."""
        return self.phase in (RunPhase.STOPPING, RunPhase.HELD)

    @property
    def stop_waits_for(self) -> str:
        """What a stop in progress does, for another stop at the same time."""
        if self.phase is RunPhase.TRAINING:
            return "waits for the running micro-batch"
        return "ends the query and saves what is not saved yet"

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Train a batch inside.

        Raises:
            StreamStopped: it must not be trained, or not to its end; raised once Spark knows why.
        """
        if self._begin_batch():
            try:
                yield
            except BaseException as error:
                if not self._end_batch(error):
                    raise
            else:
                self._end_batch(None)
                return
        self.let_go.wait(_HELD_S)
        raise StreamStopped(_INTERRUPTED)

    def stop(self, timeout_s: float) -> bool:
        """Prevent further batches; False, and they go on: the running one did not end in time."""
        with self._changed:
            self._num_stops += 1
            is_over = self._changed.wait_for(lambda: self.phase is not RunPhase.TRAINING, timeout_s)
            self._num_stops -= 1
            if self.phase is RunPhase.IDLE:
                self.phase = RunPhase.STOPPING
            return is_over

    def end_idle(self, error: BaseException | None) -> bool:
        """Note why the query ends without a batch; False: a batch runs, or an end is known."""
        with self._changed:
            if self.phase is not RunPhase.IDLE or self.error is not None:
                return False
            self.error = error
            return True

    def _begin_batch(self) -> bool:
        with self._changed:
            self.phase = RunPhase.HELD if self.is_stopping else RunPhase.TRAINING
            return self.phase is RunPhase.TRAINING

    def _end_batch(self, error: BaseException | None) -> bool:
        """Note the end of a batch; return whether it is held because it ended in part."""
        with self._changed:
            is_held = self._num_stops > 0 and isinstance(error, BatchStopped)
            if is_held:
                self.phase = RunPhase.HELD
            else:
                self.phase = RunPhase.STOPPING if self._num_stops else RunPhase.IDLE
                self.error = self.error or error
            self._changed.notify_all()
            return is_held


@with_field_texts
@dataclass(frozen=True, slots=True)
class StreamLag:
    """Backlog of the source, from Spark's progress of the last micro-batch."""

    input_rows_per_s: float
    """Rows per second that arrived between the last two triggers; 0 for a first micro-batch."""
    processed_rows_per_s: float
    """Rows trained per second; fewer than arrive: the stream falls behind."""
    batch_s: float
    """Total seconds of the last micro-batch."""
    behind: dict[str, str]
    """The backlog that the source itself reports, under its own names: `numFilesOutstanding` of
    files, `avgOffsetsBehindLatest` of Kafka."""

    @classmethod
    def of(cls, progress: Any) -> StreamLag:
        """Read pyspark's StreamingQueryProgress."""
        behind: dict[str, str] = {}
        for source in progress.sources:
            behind.update(source.metrics or {})
        return cls(
            _rate(progress.inputRowsPerSecond),
            _rate(progress.processedRowsPerSecond),
            progress.batchDuration / 1000,
            behind,
        )

    @property
    def is_growing(self) -> bool:
        """Whether more rows arrived than were trained in the same time."""
        return self.input_rows_per_s > self.processed_rows_per_s > 0

    def __str__(self) -> str:
        trained = f"{self.processed_rows_per_s:.0f}"
        if self.processed_rows_per_s > 0 and not self.input_rows_per_s:
            # Spark has no rate of a first micro-batch, though its rows came.
            text = f"{trained} rows/s are trained"
        else:
            text = f"{self.input_rows_per_s:.0f} rows/s come, {trained} are trained"
        behind = ", ".join(f"{name} {value}" for name, value in sorted(self.behind.items()))
        return f"{text} ({behind})" if behind else text


def _names(first: int, last: int) -> str:
    return f"batch {first}" if first == last else f"batches {first} to {last}"


def _rate(value: float | None) -> float:
    """Return a rate, 0 if it is None or NaN, as for a first micro-batch."""
    return 0.0 if value is None or math.isnan(value) else value
