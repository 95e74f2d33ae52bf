"""Epochs of a feed at the driver: one Spark job per epoch, its end at every worker, its counts.

Covers: train() and inference() below the public API, rows of lost workers, the log of which route
(shared memory, Unix socket, TCP) rows take.
Does not: know what is fed (tfos.feed.sources), wait or judge failures (tfos.feed.watch), carry rows
(feeding.sender.task does, from executors straight to workers).
Runs in: the driver.
Threads: several calls may run at once, for different feeds; each feed has one call at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from feeding.config import FeedConfig
from feeding.errors import NoWorkerLeft
from feeding.sender.shuffle import WINDOW_ROWS, Shuffle
from feeding.sender.task import FeedReport, FeedTarget, FeedTask, InferenceTask
from rpc.auth.handshake import Credentials
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.console.progress import TrainingProgress
from tfos.control.coordinator import Coordinator
from tfos.control.messages import FeedEpoch
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import FeedJobError, FeedTimeout, NodeFailedError
from tfos.feed.epoch import EpochFeed, final_line, targets_of
from tfos.feed.ledger import num_rows
from tfos.feed.micro_batch import MicroBatch
from tfos.feed.request import FeedCall, FeedCalls, FeedRequest
from tfos.feed.sources import FeedSource, answers_of, source_of
from tfos.feed.suspects import Rows
from tfos.feed.validation import ValidationPlan, validating
from tfos.feed.watch import FeedWatch
from tfos.monitor import reports
from tfos.monitor.history import history_of
from tfos.spark.jobs import SparkJob
from tfos.spark.task_secrets import TaskCredentials, give_credentials


class RouteLog:
    """The routes that the log already names."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._logged: dict[str, set[str]] = {}

    def tell(self, feed: str, reports: Iterable[FeedReport]) -> None:
        """Show a line if the tasks of a job used a route that this feed had not used before.

        Args:
            feed: name of the feed.
            reports: of the job's tasks.
        """
        ways = Counter(way for report in reports for way in report.ways)
        logged = self._logged.setdefault(feed, set())
        if ways.keys() <= logged:
            return
        logged.update(ways)
        counts = "; ".join(f"{count} times {way}" for way, count in ways.most_common())
        self._console.detail(f"feed {feed!r}: its tasks connected to workers {counts}")


_CANCEL_S = 5.0


class EpochFeeder:
    """Feeds the workers of one cluster.

    Args:
        sc: the SparkContext.
        coordinator: of the cluster.
        credentials: of feed tasks; these take them from their job.
        config: how rows travel.
        console: where progress goes.
    """

    def __init__(
        self,
        sc: Any,
        coordinator: Coordinator,
        credentials: Credentials,
        config: ClusterConfig,
        console: Console,
    ) -> None:
        self._sc = sc
        self._coordinator = coordinator
        self._credentials = credentials
        self._config = config
        self._console = console
        self._lock = threading.Lock()
        self._epochs: dict[str, int] = {}
        self._before: dict[str, int] = {}
        """By feed, epochs that the interrupted run had trained which this one resumes."""
        self._left_out: dict[str, int] = {}
        """Those of them that calls of this run have not fed again."""
        self._calls = FeedCalls()
        self._ways = RouteLog(console)
        self._watch = FeedWatch(coordinator, config, console)

    def train(
        self,
        request: FeedRequest,
        is_abandoned: Callable[[], bool] = lambda: False,
    ) -> reports.TrainReport:
        """Feed the data `num_epochs` times; see TFCluster.train.

        Args:
            request: what to feed.
            is_abandoned: whether the user's thread no longer waits for this call; wake the
                coordinator once it changes.
        """
        feed, num_epochs = request.feed, request.num_epochs
        source = source_of(request)
        progress = TrainingProgress(num_epochs)
        count = self._coordinator.read(lambda state: state.epochs.count)
        done: list[reports.EpochReport] = []
        with (
            self._calls.enter(feed, is_abandoned) as call,
            validating(request, self._calls, is_abandoned) as validation,
        ):
            try:
                first = self._resume(call, request, progress)
                for number in range(first, num_epochs):
                    progress.start_epoch(number, self._watch.sample(feed))
                    call.epoch = self._next_epoch(feed)
                    if validation is not None:
                        validation.call.epoch = self._next_epoch(validation.call.feed)
                    report = self._epoch(source, call, request, progress, validation)
                    if report is None or report.dropped_rows:
                        self._watch.check_not_ending(call)
                    if report is None:
                        after = f"after {number} of {num_epochs} epochs of {feed!r}"
                        self._tell_unfed(f"{after}: the rest was not fed")
                        break
                    progress.add(self._watch.sample(feed))
                    done.append(report)
                    self._console.progress(final_line(report, progress), final=True)
                    self._warn_untrained(report)
                    if validation is not None:
                        self._validate(validation, number)
                if done:
                    self._await_metrics(call, progress, request.feed_timeout_s)
            finally:
                self._console.end_progress()
        trained = self._coordinator.read(lambda state: state.epochs.since(count, feed))
        return reports.TrainReport(
            tuple(done), tuple(validation.reports) if validation else (), history_of(trained)
        )

    def _resume(self, call: FeedCall, request: FeedRequest, progress: TrainingProgress) -> int:
        """Return how many epochs of this call the interrupted run had trained; tell of them."""
        plan, feed, num_epochs = self._config.checkpoints, request.feed, request.num_epochs
        if plan is None or not plan.resumes_epochs or request.is_interval:
            return 0

        def is_known(state: ClusterView) -> bool:
            return "" in state.workers[0].batches or not state.awaited()

        self._watch.until(is_known, call, progress, stall_s=request.feed_timeout_s)
        begun = self._coordinator.read(lambda state: state.workers[0].batches.get(""))
        with self._lock:
            before = self._before.setdefault(feed, begun.epochs.get(feed, 0) if begun else 0)
            first = min(before - self._left_out.get(feed, 0), num_epochs)
            self._left_out[feed] = self._left_out.get(feed, 0) + first
        if first:
            self._console.line(
                f"{feed!r}: the run that this one resumes had trained {first} of {num_epochs} "
                "epochs; they are not fed again (they are with resume_epochs=False)"
            )
        return first

    def _await_metrics(self, call: FeedCall, progress: TrainingProgress, stall_s: float) -> None:
        """Wait until `fit` has ended the last epoch, with its validation and callbacks."""

        def is_told(state: ClusterView) -> bool:
            return not state.awaited() or not state.epochs.is_awaited(call.feed, call.epoch)

        try:
            self._watch.until(is_told, call, progress, stall_s=stall_s)
        except FeedTimeout:
            self._console.warn(
                f"the metrics of {call.title} are not in the report: fit has trained its rows "
                f"{stall_s:g} s ago, and the epoch has not ended"
            )

    def _tell_unfed(self, after: str) -> None:
        if self._coordinator.read(lambda state: state.training_stop):
            self._console.line(f"the training was stopped, as it was asked to, {after}")
        else:
            self._console.warn(f"main_fun has returned on every worker {after}")

    def _warn_untrained(self, report: reports.EpochReport) -> None:
        """Name what a user may have overlooked: no rows, or rows that nobody trained."""
        what = f"epoch {report.epoch + 1} of {report.feed!r}"
        if not report.fed_rows:
            self._console.warn(f"{what}: the data has no rows, so nothing was trained")
            return
        untold = report.dropped_rows - report.skipped_rows  # of the others, _without_poison
        if untold and self._coordinator.read(lambda state: state.training_stop):
            self._console.line(
                f"{what}: {untold} of {report.fed_rows} rows came after the stop that was asked for"
            )
        elif untold:
            ended = self._coordinator.read(lambda state: not state.training())
            why = (
                "main_fun had returned on every worker; it must read the feed to its end, as "
                "fit(ctx.dataset(...), epochs=n) does for train(..., num_epochs=n)"
                if ended
                else "main_fun stopped reading, or they were lost with a worker"
            )
            self._console.warn(
                f"{what}: {untold} of {report.fed_rows} rows were not trained: {why}"
            )

    def _validate(self, validation: ValidationPlan, number: int) -> None:
        """Feed the rows that validate an epoch, which the workers have ended."""
        call, progress = validation.call, validation.progress
        progress.title = f"validation of epoch {number + 1} of {progress.num_epochs}"
        progress.start_epoch(number, self._watch.sample(call.feed))
        report = self._epoch(validation.source, call, validation.request, progress)
        if report is not None:
            self._console.progress(validation.add(report), final=True)

    def feed_interval(self, request: FeedRequest) -> None:
        """Feed an interval of a DStream; one without rows is no epoch."""
        if not request.data.isEmpty():
            self.train(request)

    def train_batch(
        self, request: FeedRequest, batch: MicroBatch, is_abandoned: Callable[[], bool]
    ) -> reports.EpochReport | None:
        """Feed a micro-batch of a Structured Stream; None if main_fun has returned everywhere.

        Returns once the chief has reported it as trained, and saved if due, or never will.

        Args:
            request: the call's arguments.
            batch: the micro-batch and its state.
            is_abandoned: whether the user's call was interrupted.
        """
        progress = TrainingProgress(1, title=f"batch {batch.batch_id}")
        with self._calls.enter(request.feed, is_abandoned) as call:
            try:
                progress.start_epoch(0, self._watch.sample(request.feed))
                call.epoch = self._next_epoch(request.feed)
                report = self._epoch(source_of(request), call, request, progress)
                if report is not None and report.fed_rows:
                    progress.add(self._watch.sample(request.feed))
                    self._console.progress(final_line(report, progress), final=True)
                return report
            finally:
                self._console.end_progress()

    def inference(self, request: FeedRequest) -> Any:
        """Return a lazy collection of results; see TFCluster.inference."""
        targets = self._coordinator.read(targets_of)
        if not targets:
            raise FeedJobError("no worker takes rows: main_fun has returned on every worker")
        task = InferenceTask(
            targets=targets,
            credentials=TaskCredentials(self._credentials.cluster_id),
            feed=request.feed,
            config=self._feed_config(request.feed_timeout_s),
        )
        return answers_of(request, task)

    def _epoch(
        self,
        source: FeedSource,
        call: FeedCall,
        request: FeedRequest,
        progress: TrainingProgress,
        validation: ValidationPlan | None = None,
    ) -> reports.EpochReport | None:
        feed, batch, stall_s = call.feed, request.batch, request.feed_timeout_s
        targets = self._await_targets(call, progress, stall_s)
        if not targets:
            return None
        call.check_wanted()
        checked_by = validation.feed_epoch if validation is not None else None
        if batch is not None:
            self._begin(batch, call, progress, stall_s)
        started_s = time.monotonic()
        task, counts = self._task(call, request, targets), batch is None and not request.is_interval
        run = EpochFeed(source, task, call, progress, counts=counts)
        with self._blaming(run):
            is_empty = self._run(run, batch, checked_by)
        if batch is not None and not is_empty:
            self._watch.until(
                lambda state: batch.is_over(state, feed), call, progress, stall_s=stall_s
            )
        seconds = time.monotonic() - started_s
        return self._coordinator.read(lambda state: run.report(state, seconds=seconds))

    def _run(self, run: EpochFeed, batch: MicroBatch | None, checked_by: FeedEpoch | None) -> bool:
        """Feed an epoch until every worker has trained it; return whether a batch had no rows."""
        feed, epoch = run.task.feed, run.task.epoch
        is_empty = is_fed = False
        try:
            results = self._feed(run, run.task)
            run.ledger.add(results)
            run.progress.rows_per_epoch = sum(result.rows for result in results)
            self._ways.tell(feed, results)
            self._feed_lost(run)
            is_empty = batch is not None and not any(result.rows for result in results)
            is_fed = not is_empty
        finally:
            if batch is not None and not is_fed:
                self._coordinator.act(lambda state: batch.leave(state, feed, in_part=not is_empty))
            # Also if it failed: the rows of a later call wait behind the end of this epoch.
            if is_empty:
                self._epochs[feed] = epoch
            else:
                self._coordinator.act(lambda state: run.end(state, checked_by))
        if not is_empty:
            self._end(run)
            self._coordinator.act(lambda state: state.come_to(feed, epoch + 1))
        return is_empty

    @contextlib.contextmanager
    def _blaming(self, run: EpochFeed) -> Iterator[None]:
        """Raise PoisonRows if the cluster fails by one crash too many with the same rows."""
        try:
            yield
        except NodeFailedError as error:
            self._coordinator.read(run.take_crashes)
            poison = self._coordinator.read(run.poison)
            if poison is None:
                raise
            raise poison from (poison.__cause__ or error)

    def _await_targets(
        self, call: FeedCall, progress: TrainingProgress, stall_s: float
    ) -> tuple[FeedTarget, ...]:
        """Return the workers that take rows; wait for one that is started again if none is left."""

        def is_known(state: ClusterView) -> bool:
            return bool(targets_of(state)) or not state.awaited()

        if not self._coordinator.read(is_known):
            self._watch.until(is_known, call, progress, stall_s=stall_s)
        return self._coordinator.read(targets_of)

    def _begin(
        self, batch: MicroBatch, call: FeedCall, progress: TrainingProgress, stall_s: float
    ) -> None:
        """Announce a micro-batch to the chief; return once its rows may be fed."""
        feed, act = call.feed, self._coordinator.act
        act(lambda state: batch.begin(state, feed, call.epoch))
        try:
            self._watch.until(
                lambda state: batch.may_begin(state, feed), call, progress, stall_s=stall_s
            )
        except BaseException:
            act(lambda state: batch.leave(state, feed, in_part=False))
            raise

    def _end(self, run: EpochFeed) -> None:
        """Wait until every worker has trained the epoch; feed lost rows again."""
        feed, epoch = run.task.feed, run.task.epoch
        while True:
            self._watch.until(
                lambda state: not state.unflushed(feed, epoch) or bool(run.new_losses(state)),
                run.call,
                run.progress,
                stall_s=run.task.config.feed_timeout_s,
            )
            try:
                is_open = self._feed_lost(run)
            except BaseException:
                # A round may have revoked the order: rows of later epochs would never be read.
                self._coordinator.act(run.end)
                raise
            if is_open:
                self._coordinator.act(run.end)
            elif not self._coordinator.read(lambda state: state.unflushed(feed, epoch)):
                return

    def _feed_lost(self, run: EpochFeed) -> bool:
        """Feed again what lost workers had not trained, or none took; False if there was nothing.

        Raises:
            PoisonRows: the same rows were at too many crashes.
        """
        fed = False
        while (lost := self._coordinator.read(run.new_losses)) or run.ledger.has_unsent:
            names = ", ".join(worker.name for worker in lost) or "a lost worker"
            rows = self._coordinator.read(lambda state: run.take_lost(state, lost))
            rows = self._without_poison(run, rows)
            if not rows:
                continue
            fed = True
            count, what = num_rows(rows), run.call.title
            self._console.line(f"{what}: feeding again {count} rows of {names}, not known trained")
            self._coordinator.act(lambda state: state.feed_again(run.task.feed, run.task.epoch))
            targets = self._await_takers(run)
            reports = self._feed(run, run.next_round(targets, rows)) if targets else []
            run.note_round(reports)
            dropped = run.ledger.add(reports, again=True)
            dropped += count - sum(report.rows for report in reports)
            if dropped:
                self._console.warn(
                    f"{what}: {dropped} of {count} rows that were lost with {names} count as "
                    "dropped: the other workers had ended the epoch, or the partitions had other "
                    "rows when they were computed again"
                )
        return fed

    def _await_takers(self, run: EpochFeed) -> tuple[FeedTarget, ...]:
        """Return the workers that can train lost rows; wait for lost ones if none can.

        The others have ended the epoch by then if they had no rows of it left.
        """

        def is_known(state: ClusterView) -> bool:
            return bool(run.takers(state)) or not state.restarting()

        if not self._coordinator.read(is_known):
            stall_s = run.task.config.feed_timeout_s
            self._watch.until(is_known, run.call, run.progress, stall_s=stall_s)
        return self._coordinator.read(run.takers)

    def _without_poison(self, run: EpochFeed, rows: Rows) -> Rows:
        """Return lost rows without those that were at too many crashes.

        Raises:
            PoisonRows: there are such rows, and the user has not said that they are skipped.
        """
        poison = self._coordinator.read(run.poison)
        if poison is None:
            return rows
        if self._config.restarts.on_poison == "error":
            raise poison
        kept = run.ledger.leave_out(rows, poison.rows)
        count = num_rows(rows) - num_rows(kept)
        self._console.warn(f"{poison}. They are skipped: {count} rows count as dropped")
        return kept

    def _task(
        self, call: FeedCall, request: FeedRequest, targets: tuple[FeedTarget, ...]
    ) -> FeedTask:
        seed, window_rows = request.seed, request.shuffle_rows or WINDOW_ROWS
        return FeedTask(
            targets=targets,
            credentials=TaskCredentials(self._credentials.cluster_id),
            feed=call.feed,
            epoch=call.epoch,
            config=self._feed_config(request.feed_timeout_s),
            shuffle=None
            if seed is None
            else Shuffle(seed, window_rows, first_epoch=self._before.get(call.feed, 0)),
            exactly_once=request.exactly_once,
            keeps_unsent=self._config.restarts.workers > 0,
        )

    def _feed(self, run: EpochFeed, task: FeedTask) -> list[FeedReport]:
        call, source = run.call, run.source
        tag = f"tfos-{self._credentials.cluster_id}-{call.feed}-{call.epoch}"
        what = call.title
        if task.again is not None:
            tag, what = f"{tag}-{task.round_number}", f"{what}, lost rows again"
        job = SparkJob(
            self._sc,
            tag,
            f"tfos {self._credentials.cluster_id}: {what}",
            lambda: source.reports(task),
            lambda _: self._coordinator.wake(),
        )
        give_credentials(self._sc, self._credentials)
        job.start(count_tasks=True)
        stall_s = task.config.feed_timeout_s
        try:
            self._watch.until(lambda _: job.is_ended, call, run.progress, job=job, stall_s=stall_s)
        except BaseException:
            job.cancel(_CANCEL_S)
            raise
        if job.error is not None:
            raise self._watch.failure(call, job.error) from None
        reports = job.result()
        self._check_unsent(run, task, reports)
        return reports

    def _check_unsent(self, run: EpochFeed, task: FeedTask, reports: list[FeedReport]) -> None:
        """Refuse that no worker took rows if none of them was lost: they are out of reach."""
        reason = next((report.no_worker for report in reports if report.no_worker), "")
        if reason and not self._watch.sees(lambda state: run.was_lost(task, state)):
            raise self._watch.failure(run.call, NoWorkerLeft(reason))

    def _next_epoch(self, feed: str) -> int:
        with self._lock:
            epoch = self._epochs.get(feed, 0)
            self._epochs[feed] = epoch + 1
        self._coordinator.act(lambda state: state.come_to(feed, epoch))
        return epoch

    def _feed_config(self, feed_timeout_s: float) -> FeedConfig:
        return FeedConfig(
            feed_timeout_s=feed_timeout_s, max_inflight_bytes=self._config.max_inflight_bytes
        )
