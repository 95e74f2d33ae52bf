"""Handle of a training stream: counters, history, the wait for its end, the ordered stop.

Covers: StreamTraining; the end of the query when the cluster ends.
Does not: train batches (tfos.streaming).
Runs in: the driver.
Threads: any; one per handle watches the query and the cluster. What waits runs on a thread of its
own (tfos.spark.interruptible), so that Ctrl-C finds the user's thread waiting.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from tfos.control.coordinator import Coordinator
from tfos.control.members import mean_loss
from tfos.control.state.cluster_view import ClusterView
from tfos.driver import preflight
from tfos.driver.shutdown import Shutdown
from tfos.errors import FeedJobError, TFOSError
from tfos.monitor.history import History, history_of
from tfos.phases import ClusterPhase
from tfos.spark.interruptible import CancelToken, InterruptibleCall
from tfos.streaming.state import QueryState, RunPhase, StreamLag, StreamRun

DEFAULT_STOP_S = 600.0
"""As long as a batch without progress takes to fail, by the default of `feed_timeout`."""
_LOOK_S = 0.5
_POLL_S = 0.02
_COMMIT_S = 5.0
"""Seconds for Spark to mark a batch as done once train_batch has returned."""
_END_S = 30.0
"""Seconds for a query to end after the order to stop, once no batch runs."""
_SAVE_SHARE = 0.25
"""Share of the time that the cluster's end leaves a stream: kept from the running batch and Spark
for the save after it."""


class StreamTraining:
    """A streaming query that trains a cluster; made by `TFCluster.stream`.

    A context manager: leaving the block stops the stream in order.

    Attributes:
        query: Spark's own StreamingQuery.

    Args:
        query: Spark's own StreamingQuery.
        state: which batches are in the parameters.
        run: the batches of this run of the query.
        coordinator: the cluster's coordinator.
        ending: raises the cluster's failure.
        save: saves the parameters after the last batch, and waits for the end of its epoch, within
            this many seconds.
    """

    def __init__(
        self,
        query: Any,
        state: QueryState,
        run: StreamRun,
        coordinator: Coordinator,
        ending: Shutdown,
        save: Callable[[float], None],
    ) -> None:
        self.query = query
        self._state = state
        self._run = run
        self._coordinator = coordinator
        self._ending = ending
        self._save = save
        self._is_raised = self._is_read = False
        self._stopping = threading.Lock()
        self._stop_error: TFOSError | None = None
        """Error of a stop that another thread asked for."""
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="tfos-stream", daemon=True).start()

    @property
    def is_active(self) -> bool:
        """Whether the query runs."""
        return bool(self.query.isActive)

    @property
    def last_batch_id(self) -> int | None:
        """The last micro-batch that is over: in the parameters, or empty; None: none yet."""
        return self._state.last_id if self._state.last_id >= 0 else None

    @property
    def num_batches(self) -> int:
        """Micro-batches trained since this program began; empty ones do not count."""
        return self._state.num_batches

    @property
    def rows(self) -> int:
        """Rows trained since this program began."""
        return self._state.rows

    @property
    def dropped_rows(self) -> int:
        """Rows of these batches that no worker trained, and that Spark does not bring again."""
        return self._state.dropped_rows

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the last micro-batch, from its call to its end with its save."""
        return self._state.rows_per_s

    @property
    def loss(self) -> float | None:
        """Mean over the workers of the loss they reported last, a heartbeat (2 s) old at most."""
        return self._coordinator.read(lambda state: mean_loss(state.workers))

    @property
    def history(self) -> History:
        """Metrics of `fit`, an epoch per micro-batch with rows, the newest 10,000.

        A batch is in it once `fit` has ended its epoch, with validation and callbacks. Empty if
        main_fun reads the feed by other means than `fit` of a distributed model.
        """
        feed, own = self._state.feed, set(self._state.epochs.copy())
        found = self._coordinator.read(lambda state: state.epochs.since(0, feed))
        return history_of(each for each in found if each.fed_epoch in own)

    @property
    def last_progress(self) -> Any:
        """Spark's progress of the query's last micro-batch; None before the first."""
        return self.query.lastProgress

    @property
    def lag(self) -> StreamLag | None:
        """Backlog of the source; None before the first micro-batch."""
        progress = self.last_progress
        return None if progress is None else StreamLag.of(progress)

    @property
    def error(self) -> BaseException | None:
        """Why the query ended; None while it runs, and after an ordered stop."""
        found = self._error
        self._is_read = self._is_read or found is not None
        return found

    @property
    def is_settled(self) -> bool:
        """Whether the query has ended, with nothing unsaved and no error that nobody has seen."""
        if not self._ended.is_set() or self._state.num_unsaved:
            return False
        return self._is_seen or self._error is None

    def is_newest(self, query: Any) -> bool:
        """Whether this is not an older run of a query that has just been started."""
        return self.query is query or str(self.query.id) != str(query.id)

    @property
    def _is_seen(self) -> bool:
        return self._is_raised or self._is_read

    @property
    def _error(self) -> BaseException | None:
        known = self._run.error or self._stop_error
        if known is not None:
            return known
        if self._run.is_stopping or self.query.isActive:
            return None
        found: BaseException | None = self.query.exception()
        return found

    def await_end(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the query; returns whether it came in time.

        Raises:
            NodeFailedError: the cluster failed; the node's own traceback is the cause.
            FeedJobError, FeedTimeout: a batch could not be fed or saved.
            StreamingQueryException: the query failed on its own; pyspark's.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

        cancel = CancelToken()

        def wait() -> None:
            while not self._ended.wait(_LOOK_S) and not cancel.is_set:
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    return

        InterruptibleCall("tfos-await_end()", wait, cancel=cancel).result()
        if self._ended.is_set():
            self._raise_error()
        return self._ended.is_set()

    def stop(self, timeout_s: float = DEFAULT_STOP_S) -> None:
        """Let the running micro-batch finish, end the query, save what is not saved yet.

        The cluster goes on: other data can be fed, or the next stream. Idempotent.

        Args:
            timeout_s: seconds for the running batch.

        Raises:
            FeedJobError: the batch or the query did not end in time, or a save failed.
            NodeFailedError: the cluster failed meanwhile.
        """
        limit_s = preflight.check_timeout("timeout_s", timeout_s)

        def stop() -> None:
            self._stop(limit_s, saves_again=True)

        InterruptibleCall("tfos-stop()", stop).result()
        self._raise_error()

    def end(self, timeout_s: float = math.inf) -> BaseException | None:
        """Stop before the cluster's end; return an error that the user has not seen.

        Args:
            timeout_s: seconds for the running batch and the save after it; a quarter is for
                the save if saves do not follow each batch.
        """
        by_s, share = time.monotonic() + timeout_s, _SAVE_SHARE if self._run.saves_behind else 0.0
        spark_s = timeout_s * (1.0 - share)
        try:
            self._stop(min(spark_s, threading.TIMEOUT_MAX), time.monotonic() + spark_s, by_s)
        except Exception as error:  # noqa: BLE001  # the cluster has to end all the same
            return error
        return None if self._is_seen else self._error

    def __enter__(self) -> StreamTraining:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.stop()

    def __str__(self) -> str:
        batch, loss, lag = self.last_batch_id, self.loss, self.lag
        parts = [
            "no batch yet" if batch is None else f"batch {batch}",
            f"{self.rows} rows",
            *([f"{self.dropped_rows} dropped"] if self.dropped_rows else []),
            f"{self.rows_per_s:.0f} rows/s",
            "loss -" if loss is None else f"loss {loss:.4g}",
            *([] if lag is None else [str(lag)]),
        ]
        return ", ".join(parts)

    def _raise_error(self) -> None:
        error = self._error
        if error is not None and not self._is_raised:
            self._is_raised = True
            with self._ending.raising():
                raise error

    def _stop(
        self,
        timeout_s: float,
        spark_by_s: float = math.inf,
        save_by_s: float = math.inf,
        *,
        is_asked: bool = False,
        saves_again: bool = False,
    ) -> None:
        """End the query, one thread at a time; another thread finds it ended and saved.

        Args:
            timeout_s: seconds for the running batch.
            spark_by_s: monotonic time until which Spark may take to end the query before the save.
            save_by_s: monotonic time until which the save after it may take.
            is_asked: something else asked for it; the user of the handle sees the error.
            saves_again: save also after a query that has ended, perhaps with something unsaved.
        """
        deadline_s = time.monotonic() + timeout_s
        is_free = self._stopping.acquire(timeout=timeout_s)
        try:
            if is_free and not self.query.isActive:
                if saves_again:
                    self._save_again()
                return
            if not is_free:
                raise FeedJobError(
                    f"another stop() of this stream, which {self._run.stop_waits_for}, did not end "
                    f"within {timeout_s:.4g} s; call stop() again with more seconds, or end the "
                    "cluster with abort()"
                )
            if not self._run.stop(max(0.0, deadline_s - time.monotonic())):
                kept = ""
                if self._run.saves_behind and not math.isinf(save_by_s):
                    kept = f", as shutdown(timeout=...) kept {_SAVE_SHARE:.0%} for the save"
                raise FeedJobError(
                    f"the running micro-batch did not end within {timeout_s:.0f} s{kept}; call "
                    "stop() again, or end the cluster with abort()"
                )
            self._stop_query(spark_by_s, save_by_s)
            self._stop_error = None
        except TFOSError as error:
            if is_asked:
                self._stop_error = error  # before a thread that waits here goes on to look
            raise
        finally:
            if is_free:
                self._stopping.release()

    def _save_again(self) -> None:
        """Save after a query that ended without stop(), or whose stop() could not save."""
        if self._run.error is not None or self._coordinator.read(_has_ended):
            return
        is_unsaved = self._state.num_unsaved > 0
        self._save(math.inf)
        if is_unsaved:
            self._stop_error = None  # what is lost stays lost

    def _stop_query(self, spark_by_s: float, save_by_s: float) -> None:
        self._await_commit(spark_by_s)
        # On a thread of its own: it returns when the query has ended, which a held batch prevents;
        # and that batch may end only after Spark knows of the stop.
        stopping = threading.Thread(target=self.query.stop, name="tfos-query-stop", daemon=True)
        stopping.start()
        began_s = time.monotonic()
        deadline_s = min(began_s + _END_S, spark_by_s)
        while self.query.isActive and time.monotonic() < deadline_s:
            stopping.join(_POLL_S)
        self._run.let_go.set()
        try:
            # Before the query's end, which may take Spark long: no batch is trained any more.
            if self._run.error is None:
                self._save(max(0.0, save_by_s - time.monotonic()))
        finally:
            stopping.join(min(_END_S, max(0.0, save_by_s - time.monotonic())))
        if self.query.isActive:
            raise FeedJobError(
                f"query {self.query.id} is still active {time.monotonic() - began_s:.0f} s after "
                "the order to stop; call query.stop()"
            )

    def _await_commit(self, by_s: float) -> None:
        """Wait until Spark marks the last batch as done; it would be repeated at the next start."""
        last_id = self._state.last_id
        deadline_s = min(time.monotonic() + _COMMIT_S, by_s)
        while last_id >= 0 and self.query.isActive and time.monotonic() < deadline_s:
            progress = self.last_progress
            if self._run.phase is RunPhase.HELD or (
                progress is not None and progress.batchId >= last_id
            ):
                return
            self._run.let_go.wait(_POLL_S)

    def _watch(self) -> None:
        with contextlib.suppress(Exception):  # py4j's many errors: the SparkContext has stopped
            while self.query.isActive:
                if self._coordinator.wait(_is_to_end, _LOOK_S):
                    if self._coordinator.read(_has_ended):
                        self._end_idle()
                    else:
                        with contextlib.suppress(TFOSError):  # it is kept
                            self._stop(DEFAULT_STOP_S, is_asked=True)
                    if self.query.isActive:  # it was ordered to stop, and takes its time
                        self._ended.wait(_LOOK_S)
        self._ended.set()

    def _end_idle(self) -> None:
        """End a query that waits for data, with the cluster's error; a batch fails on its own."""
        failure: TFOSError | None = None
        try:
            self._ending.raise_failure()
        except TFOSError as error:
            failure = error
        if self._run.end_idle(failure):
            self.query.stop()


def _has_ended(state: ClusterView) -> bool:
    return state.phase is not ClusterPhase.RUNNING


def _is_to_end(state: ClusterView) -> bool:
    return bool(state.streams_stop) or _has_ended(state)
