"""Structured Streaming: each micro-batch trains the cluster once, also after a restart.

Covers: TFCluster's calls for streams, the function of foreachBatch, batches that are repeated or
missing, saves after batches.
Does not: feed (tfos.feed.epoch_feeder), note or save (tfos.worker.trained.feeds in the chief's
process), watch or stop a query (tfos.streaming.handle).
Runs in: the driver.
Threads: Spark calls `train_batch` on a thread of each query; the rest comes from the user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfos.config import chief_limit_s
from tfos.control.members import NodeStatus
from tfos.control.messages import BatchReport, SaveBatches
from tfos.control.state.actions import Send
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.reservation import Reservation
from tfos.driver.shutdown import Shutdown
from tfos.errors import FeedJobError, PhaseError, SettingsError, TFOSError
from tfos.feed.entry import FeedService
from tfos.feed.micro_batch import BatchKnown, MicroBatch, answer_to, chief_trains
from tfos.feed.request import FeedRequest
from tfos.phases import ClusterPhase
from tfos.spark.interruptible import InterruptibleCall
from tfos.spark.jobs import JOB_GROUP, QUERY_ID
from tfos.streaming.handle import StreamTraining
from tfos.streaming.state import BatchStopped, QueryState, StreamFailed, StreamRun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

_FEED_TIMEOUT_S = 600.0
_ANSWER_S = 600.0
"""Seconds for the chief to begin without checkpoints; as long as a start may take."""

_START_AGAIN = "Spark does not mark the batch as done: start the query again with another cluster"


class Streams:
    """All streams that train one cluster.

    Args:
        reserved: the reserved cluster.
        feed_service: feeds its workers.
        ending: raises the failure of the cluster.
    """

    def __init__(self, reserved: Reservation, feed_service: FeedService, ending: Shutdown) -> None:
        self._sc = reserved.sc
        self._coordinator = reserved.coordinator
        self._console = reserved.console
        self._checkpoints = reserved.config.checkpoints
        self._feed_service = feed_service
        self._ending = ending
        self._lock = threading.Lock()
        self._queries: dict[str, QueryState] = {}
        self._runs: dict[str, StreamRun] = {}
        """The newest run of each query, by query."""
        self._numbers = 0
        self._trainings: list[StreamTraining] = []

    def start(
        self, source: Any, checkpoint_location: str | None, request: FeedRequest
    ) -> StreamTraining:
        """Start a query that trains, or take charge of one; see TFCluster.stream.

        Args:
            source: a streaming DataFrame, its writer, or a running query.
            checkpoint_location: Spark's directory of the query; None: the session's.
            request: the call's arguments.

        Raises:
            SettingsError: the source is not a stream, a query with settings that it cannot take, or
                the cluster has no such feed.
            NodeFailedError, PhaseError: the cluster has failed, or does not run.
        """
        query = source
        is_query = hasattr(query, "awaitTermination")
        if is_query:
            _refuse_settings(checkpoint_location, request)
        check = functools.partial(self._check, request)
        with self._ending.raising():
            InterruptibleCall("tfos-stream()", check).result()
        if not is_query:
            writer = source if hasattr(source, "foreachBatch") else _writer_of(source)
            if checkpoint_location is not None:
                writer = writer.option("checkpointLocation", checkpoint_location)
            query = writer.foreachBatch(functools.partial(self.train_batch, request)).start()
        state, run = self._state_of(str(query.id), str(query.runId))
        run.has_handle = True
        run.saves_behind = self._checkpoints is not None and self._save_every != 1
        save = functools.partial(self._save_last, state, request.feed_timeout_s)
        training = StreamTraining(query, state, run, self._coordinator, self._ending, save)
        with self._lock:
            before = list(self._trainings)
        # An older run of the same query is the new handle's business, its unsaved batches too.
        over = {id(each) for each in before if not each.is_newest(query) or each.is_settled}
        with self._lock:
            self._trainings = [each for each in self._trainings if id(each) not in over]
            self._trainings.append(training)
        return training

    def train_batch(self, request: FeedRequest, df: Any, batch_id: int) -> None:
        """Train the rows of one micro-batch once; see TFCluster.train_batch.

        Args:
            request: the call's arguments.
            df: the micro-batch.
            batch_id: Spark's number of it.
        """
        sc = self._sc
        query = sc.getLocalProperty(QUERY_ID) or ""
        state, run = self._state_of(query, sc.getLocalProperty(JOB_GROUP) if query else "")
        try:
            with run.batch():
                if not run.has_handle:
                    self._refuse_stopped(batch_id)
                self._train_once(state, dataclasses.replace(request, data=df), batch_id)
        except TFOSError as error:
            if not query:
                raise
            # Spark shows the whole Python traceback, twice; the typed error is for the handle.
            raise StreamFailed(f"{type(error).__qualname__}: {error}") from None

    @contextlib.contextmanager
    def stopped(self, timeout_s: float, failure: Exception | None = None) -> Iterator[None]:
        """Stop every query in order before the block; then raise what the user has not seen.

        An error of the block comes first; unseen errors become its notes.

        Args:
            timeout_s: seconds for all of them; may be infinite.
            failure: failure of a DStream, which the user has not seen either.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            trainings = list(self._trainings)
        ends = (each.end(max(0.0, deadline_s - time.monotonic())) for each in trainings)
        unseen = [error for error in (*ends, failure) if error is not None]
        try:
            yield
            if unseen:
                raise unseen.pop(0)
        except BaseException as error:
            for each in unseen:
                if str(each) not in str(error):  # it may be the cluster's own failure
                    error.add_note(f"Before that: {each}")
            raise

    # ---- inside ----

    @property
    def _save_every(self) -> int:
        """Batches from one save to the next; 0: saves do not follow batches."""
        return self._checkpoints.every_batches if self._checkpoints is not None else 0

    def _check(self, request: FeedRequest) -> None:
        """Refuse a stream if no batch of it could be trained."""
        self._feed_service.check("stream()", request)
        if stop := self._coordinator.read(lambda cluster: cluster.streams_stop):
            raise PhaseError(
                f"stream() comes after a stop that this cluster's streams were asked for ({stop}): "
                "train the stream with another cluster"
            )

    def _state_of(self, query: str, run: str) -> tuple[QueryState, StreamRun]:
        with self._lock:
            found = self._runs.get(query)
            if found is None or found.run != run:  # Spark runs a query once at a time
                found = self._runs[query] = StreamRun(run)
            return self._queries.setdefault(query, QueryState(query)), found

    def _next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def _train_once(self, state: QueryState, request: FeedRequest, batch_id: int) -> None:
        self._feed_service.check("train_batch()", request)
        state.feed = request.feed
        if not state.is_known:
            begun = self._await_answer("", 0)
            if begun is None:
                raise self._untrained(batch_id)
            state.know(begun.trained.get(state.query, -1))
        if batch_id > state.last_id:
            try:
                self._train(state, request, batch_id)
                return
            except BatchKnown:
                state.know_trained(batch_id)
        self._console.line(f"batch {batch_id} is in the parameters already: skipped")
        if self._save_every:
            self._save(state, batch_id)

    def _train(self, state: QueryState, request: FeedRequest, batch_id: int) -> None:
        missing = state.missing(batch_id)
        if missing:
            self._console.warn(
                f"Spark goes on with batch {batch_id}; {missing}, which it marks as done, "
                "had no rows, or were trained after the last save or in another model"
            )
        saves = 0 < self._save_every <= state.num_unsaved + 1
        batch = MicroBatch(
            feed=request.feed,
            query=state.query,
            batch_id=batch_id,
            number=self._next_number(),
            holds=bool(self._save_every),
            saves=saves,
        )
        report = self._feed_service.train_batch(request, batch)
        answer = self._answer(request.feed, batch.number)
        if report is None or (report.fed_rows and (answer is None or not answer.is_done)):
            raise self._untrained(batch_id)
        state.note(batch_id, report)
        if not report.fed_rows:
            return
        if self._checkpoints is not None and answer is not None and not answer.is_noted:
            self._warn_unnoted(state)
        if saves:
            self._check_saved(state, answer, batch_id)

    def _refuse_stopped(self, batch_id: int) -> None:
        """Refuse a batch after a stop, of a query that no handle ends."""
        if stop := self._coordinator.read(lambda cluster: cluster.streams_stop):
            raise BatchStopped(
                f"batch {batch_id} is not trained: the streams that train this cluster were asked "
                f"to stop ({stop}). {_START_AGAIN}"
            )

    def _untrained(self, batch_id: int) -> TFOSError:
        """Return why a batch was not trained to its end: no main_fun is left to do it."""
        if self._coordinator.read(lambda cluster: cluster.is_ending):
            return PhaseError(f"the cluster was stopped while it trained batch {batch_id}")
        if stop := self._coordinator.read(lambda cluster: cluster.training_stop):
            return BatchStopped(
                f"batch {batch_id} was not trained: the training was asked to stop ({stop}) "
                f"and has ended. {_START_AGAIN}"
            )
        return FeedJobError(
            f"batch {batch_id} was not trained: main_fun has returned on the chief. Train "
            "with fit(epochs=ctx.all_epochs)"
        )

    def _save(
        self, state: QueryState, awaited_id: int | None = None, limit_s: float = math.inf
    ) -> None:
        """Save what was trained since the last save.

        Args:
            state: the query's state.
            awaited_id: the batch that Spark waits for; None: it has marked all as done.
            limit_s: seconds to wait at most, if the plan allows more.

        Raises:
            FeedJobError: the batches were not saved; the text says why.
        """
        if self._checkpoints is None or not state.num_unsaved:
            return
        order = SaveBatches(state.feed, self._next_number())
        self._coordinator.act(lambda cluster: [Send(cluster.workers[0].node, order)])
        answer = self._await_answer(state.feed, order.number, limit_s)
        if answer is None and self._coordinator.read(_chief_has_returned):
            return  # the chief saves after main_fun, before it reports the return
        self._check_saved(state, answer, awaited_id)

    def _save_last(self, state: QueryState, feed_timeout_s: float, limit_s: float) -> None:
        """Save after the last batch of a run, then wait for the end of its epoch in `fit`.

        Args:
            state: the query's state.
            feed_timeout_s: the stream's feed timeout.
            limit_s: seconds for both.

        Raises:
            FeedJobError: see `_save`.
        """
        by_s = time.monotonic() + limit_s
        self._save(state, None, limit_s)
        if not state.epochs:
            return
        # The epoch ends with validation and callbacks, and with the save of the best checkpoint.
        epoch = state.epochs[-1]
        most_s = min(
            max(0.0, by_s - time.monotonic()), chief_limit_s(self._checkpoints, feed_timeout_s)
        )
        is_told = self._coordinator.wait(
            lambda cluster: (
                not cluster.epochs.is_awaited(state.feed, epoch)
                or cluster.phase is not ClusterPhase.RUNNING
                or not chief_trains(cluster)
            ),
            most_s,
        )
        if not is_told:
            self._console.warn(
                f"the metrics of batch {state.trained_id} are not in the handle's history yet: fit "
                f"has not ended its epoch {most_s:.4g} s after its rows were trained and saved"
            )

    def _check_saved(
        self, state: QueryState, answer: BatchReport | None, awaited_id: int | None
    ) -> None:
        """Take an answer about a save; raises as `_save`, with the same arguments."""
        if answer is not None and not answer.error:
            state.num_unsaved = 0
            return
        why = answer.error if answer is not None else "the chief takes no orders any more"
        is_lost, unsaved = answer is not None and answer.is_lost, state.unsaved
        if is_lost and awaited_id == state.trained_id:  # it comes again
            state.take_back()
            rest = f"; {state.unsaved}, marked as done, may be lost" if state.num_unsaved else ""
            raise FeedJobError(
                f"{why}. The query ends before Spark marks the batch as done; start it again: "
                f"the batch is trained once more{rest}"
            )
        if is_lost:
            state.num_unsaved = 0  # no save can have them any more
            raise FeedJobError(
                f"{why}. Spark does not repeat what it has marked as done: what the last save "
                f"lacks of {unsaved} is lost. A save after every batch, "
                "Checkpoints(every_batches=1), lets such a batch come again"
            )
        if awaited_id is None:
            raise FeedJobError(
                f"{unsaved} could not be saved: {why}. Spark has marked what it brought as done: "
                "call stop() again once the directory can be written, or it is missing in a run "
                "that resumes this one"
            )
        raise FeedJobError(
            f"{unsaved} could not be saved: {why}. The query ends before Spark marks batch "
            f"{awaited_id} as done; start it again once the directory can be written: what is "
            "trained already is not trained again"
        )

    def _warn_unnoted(self, state: QueryState) -> None:
        if not state.has_warned:
            state.has_warned = True
            self._console.warn(
                "after a restart no batch of this stream is skipped: its ids are not saved with "
                "the parameters, because main_fun does not read this feed by fit() of a "
                "distributed model"
            )

    def _answer(self, feed: str, number: int) -> BatchReport | None:
        return self._coordinator.read(lambda cluster: answer_to(cluster, feed, number))

    def _await_answer(self, feed: str, number: int, most_s: float = math.inf) -> BatchReport | None:
        """Wait until the chief has carried out an order; number 0: until main_fun begins.

        Args:
            feed: name of the feed; empty for number 0.
            number: the order's number.
            most_s: seconds to wait at most, if the plan allows more.

        Returns:
            None: the chief takes no orders any more.

        Raises:
            FeedJobError: the chief is silent.
        """

        def is_over(cluster: ClusterView) -> bool:
            found = answer_to(cluster, feed, number)
            return (
                (found is not None and found.is_done)
                or cluster.phase is not ClusterPhase.RUNNING
                or not chief_trains(cluster)
            )

        limit_s = chief_limit_s(self._checkpoints, _ANSWER_S)
        came = self._coordinator.wait(is_over, min(most_s, limit_s))
        self._ending.raise_failure()
        if not came and most_s < limit_s:
            raise FeedJobError(
                f"the chief has not saved within {most_s:.4g} s, which is what "
                f"shutdown(timeout=...) left of the {limit_s:.0f} s that a save may take. "
                "Call shutdown() with a longer timeout, or with None for no limit"
            )
        if not came:
            doing = "has not saved" if number else "has not begun, or has not restored a checkpoint"
            raise FeedJobError(
                f"the chief {doing} within {limit_s:.0f} s: look at its log. Where "
                "saves or a restore take that long, raise Checkpoints(timeout_s=...)"
            )
        return self._answer(feed, number)


class StreamCalls:
    """What TFCluster offers for streams."""

    _streams: Streams

    def train_batch(self, df: DataFrame, batch_id: int) -> None:
        """Train one micro-batch of a Structured Stream, for `writeStream.foreachBatch`.

        Each batch with rows is one epoch. A batch that Spark repeats after a restart is skipped
        if the parameters, also restored ones, contain it. Returns once every row was trained and,
        with checkpoints, saved (`Checkpoints.every_batches`), so Spark marks only those as done.

        Args:
            df: the micro-batch, as Spark hands it over.
            batch_id: Spark's number of it, from 0 in each query.

        Raises:
            NodeFailedError, FeedJobError, FeedTimeout: as train; the query ends with that error.
        """
        self._streams.train_batch(
            FeedRequest(data=None, feed="input", feed_timeout_s=_FEED_TIMEOUT_S), df, batch_id
        )

    def stream(
        self,
        source: DataFrame | DataStreamWriter | StreamingQuery,
        checkpoint_location: str | None = None,
        *,
        feed_timeout: float = _FEED_TIMEOUT_S,
        qname: str = "input",
        columns: Sequence[str] | None = None,
        nulls: object = "error",
    ) -> StreamTraining:
        """Train on a stream, micro-batch by micro-batch, until it is stopped; returns at once.

        Args:
            source: a streaming DataFrame; its `writeStream` with a trigger and options; or a query
                that was started with `foreachBatch(cluster.train_batch)`, without more arguments.
            checkpoint_location: directory in which Spark notes how far the query is.
            feed_timeout: seconds without any worker taking a row until feeding fails.
            qname: which feed.
            columns: columns of the DataFrame, in this order; None: all of them.
            nulls: what missing values become, as for `train`.

        Raises:
            SettingsError: the source is not a stream, a query with settings that it cannot take, or
                the cluster takes no rows or has no such feed.
            NodeFailedError, PhaseError: the cluster has failed, or does not run.
        """
        request = FeedRequest(
            data=None, feed=qname, feed_timeout_s=feed_timeout, columns=columns, nulls=nulls
        )
        return self._streams.start(source, checkpoint_location, request)


def _chief_has_returned(cluster: ClusterView) -> bool:
    return cluster.workers[0].status is NodeStatus.DONE


def _refuse_settings(checkpoint_location: str | None, request: FeedRequest) -> None:
    """Refuse settings that a running query has already fixed."""
    given = {
        "checkpoint_location": checkpoint_location is not None,
        "columns": request.columns is not None,
        "feed_timeout": request.feed_timeout_s != _FEED_TIMEOUT_S,
        "nulls": not isinstance(request.nulls, str) or request.nulls != "error",
        "qname": request.feed != "input",
    }
    if any(given.values()):
        names = ", ".join(name for name, is_given in given.items() if is_given)
        raise SettingsError(
            f"stream(query, {names}): the query runs already, and trains all its columns by the "
            "feed 'input' from its own checkpoint. Leave these settings out, or pass them with the "
            "DataFrame or its writeStream, before the query is started"
        )


def _writer_of(data: Any) -> Any:
    if getattr(data, "isStreaming", False) is not True:
        raise SettingsError(
            "stream() takes a streaming DataFrame (spark.readStream...), its writeStream with "
            f"options, or a started query, got {type(data).__qualname__}; feed other data "
            "by train()"
        )
    return data.writeStream
