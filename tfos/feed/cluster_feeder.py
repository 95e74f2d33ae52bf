"""Cluster feeder: the calls that feed the workers of one cluster, epoch by epoch.

Covers: train(), micro-batches and inference() below the public API; the epochs that a resumed run
leaves out; validation after each epoch; what users read about epochs.
Runs in: the driver.
Threads: several calls may run at once, for different feeds; each feed has one call at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from feeding.sender.task import InferenceTask
from tfos.config import ClusterConfig, chief_limit_s, worker_limit_s
from tfos.console.console import Console
from tfos.console.progress import TrainingProgress
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import FeedJobError, FeedTimeout
from tfos.feed.epoch import final_line, targets_of
from tfos.feed.epoch_feeder import EpochFeeder, feed_config
from tfos.feed.micro_batch import MicroBatch, answer_to
from tfos.feed.request import FeedCall, FeedCalls, FeedRequest
from tfos.feed.sources import FeedSource, answers_of, source_of
from tfos.feed.validation import ValidationPlan, validating
from tfos.feed.watch import FeedWatch
from tfos.monitor import reports
from tfos.monitor.history import history_of
from tfos.spark.task_secrets import TaskCredentials

_READS_ALL = "as fit(ctx.dataset(...), epochs=n) does for train(..., num_epochs=n)"


class ClusterFeeder:
    """Feeds the workers of one cluster.

    Args:
        cluster_id: the cluster's id.
        epochs: feeds the epochs, one after another.
        watch: the cluster's watch.
        coordinator: the cluster's coordinator.
        config: how rows travel.
        console: where progress goes.
    """

    def __init__(
        self,
        cluster_id: str,
        epochs: EpochFeeder,
        watch: FeedWatch,
        coordinator: Coordinator,
        config: ClusterConfig,
        console: Console,
    ) -> None:
        self._cluster_id = cluster_id
        self._epochs = epochs
        self._watch = watch
        self._coordinator = coordinator
        self._config = config
        self._console = console
        self._calls = FeedCalls()

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
        source, progress = source_of(request), TrainingProgress(request.num_epochs)
        count = self._coordinator.read(lambda state: state.epochs.count)
        with (
            self._calls.enter(request.feed, is_abandoned, request.feed_timeout_s) as call,
            validating(request, self._calls, is_abandoned) as validation,
        ):
            try:
                done = self._feed_epochs(source, call, request, progress, validation)
                if done:
                    self._await_metrics(call, progress, call.limit_s)
            finally:
                self._console.end_progress()
        told = self._coordinator.read(lambda state: state.epochs.since(count, request.feed))
        return reports.TrainReport(
            tuple(done), tuple(validation.reports) if validation else (), history_of(told)
        )

    def _feed_epochs(
        self,
        source: FeedSource,
        call: FeedCall,
        request: FeedRequest,
        progress: TrainingProgress,
        validation: ValidationPlan | None,
    ) -> list[reports.EpochReport]:
        """Feed the epochs that are left of a call, and validate each, while workers read them."""
        done: list[reports.EpochReport] = []
        first = trained = self._resume(call, request, progress)
        for number in range(first, request.num_epochs):
            report = self._feed_epoch(number, source, call, request, progress, validation)
            if report is None:
                self._tell_unfed(trained, request, is_fed=bool(done))
                break
            progress.add(self._watch.sample(call.feed))
            done.append(dataclasses.replace(report, epoch=call.shown_epoch))
            self._console.progress(final_line(report, progress), final=True)
            # A worker reports its end some time after it: an epoch may be fed until then.
            is_left_out = not report.trained_rows and self._is_terminated(call.feed)
            if is_left_out and trained > first:
                self._tell_unfed(trained, request)
                break
            self._warn_untrained(report, call.title)
            if report.trained_rows:
                trained = number + 1
            # Nobody reads the validation of an epoch that no worker trains.
            if validation is not None and not is_left_out:
                self._validate(validation, number, call.left_out)
        return done

    def _feed_epoch(
        self,
        number: int,
        source: FeedSource,
        call: FeedCall,
        request: FeedRequest,
        progress: TrainingProgress,
        validation: ValidationPlan | None,
    ) -> reports.EpochReport | None:
        """Feed the epoch of this number in its call; None: no worker reads rows of the feed."""
        if self._has_ended(call.feed):
            return None
        progress.start_epoch(number, self._watch.sample(call.feed))
        self._begin_epoch(call)
        if validation is not None:
            self._begin_epoch(validation.call)
        self._set_limit(call)
        report = self._epochs.feed(source, call, request, progress, validation)
        if report is None or report.dropped_rows:
            self._watch.check_not_ending(call)
        return report

    def _resume(self, call: FeedCall, request: FeedRequest, progress: TrainingProgress) -> int:
        """Wait until the chief has restored; return how many epochs of this call are trained.

        The interrupted run had trained them, which a line reports.
        """
        plan, feed, num_epochs = self._config.checkpoints, request.feed, request.num_epochs
        if plan is None or not plan.resume:
            return 0

        def is_known(state: ClusterView) -> bool:
            return answer_to(state, "", 0) is not None or not state.awaited()

        stall_s = chief_limit_s(plan, request.feed_timeout_s)
        # Until then the chief restores. A chief whose workers have the parameters reports at once.
        self._watch.until(is_known, call, progress, stall_s=stall_s, of_chief=True)
        if not plan.resumes_epochs or request.is_interval:
            return 0
        begun = self._coordinator.read(lambda state: answer_to(state, "", 0))
        first = call.epochs.leave_out(begun.epochs.get(feed, 0) if begun else 0, num_epochs)
        call.left_out = call.epochs.left_out
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

    def _has_ended(self, feed: str) -> bool:
        """Whether workers run on, and main_fun reads no more rows of a feed on any of them."""
        return self._coordinator.read(
            lambda state: bool(state.training()) and not state.reading(feed)
        )

    def _is_terminated(self, feed: str) -> bool:
        return self._coordinator.read(lambda state: state.is_terminated(feed))

    def _tell_unfed(self, number: int, request: FeedRequest, *, is_fed: bool = True) -> None:
        """Tell why epochs were not fed.

        Args:
            number: number of epochs that were trained.
            request: the call's request.
            is_fed: whether the call has fed an epoch.
        """
        feed, num_epochs = request.feed, request.num_epochs
        after = f"after {number} of {num_epochs} epochs of {feed!r}: the rest was not fed"
        if self._coordinator.read(lambda state: state.training_stop):
            self._console.line(f"the training was stopped on request {after}")
        elif not self._is_terminated(feed):
            self._console.warn(
                f"main_fun has returned on every worker {after}; to train them, it must read the "
                f"feed to its end, {_READS_ALL}"
            )
        elif is_fed:
            how = f"after epoch {number} of {num_epochs}"
            if not number:
                how = f"before epoch 1 of {num_epochs} had trained a row"
            self._console.line(f"feeding ended {how}: no worker reads further rows of {feed!r}")
        else:
            self._console.warn(
                f"nothing of {feed!r} was fed: main_fun has called terminate() on every worker, "
                "so no worker reads further rows of it"
            )

    def _warn_untrained(self, report: reports.EpochReport, what: str) -> None:
        """Name what a user may have overlooked: no rows, or rows that nobody trained.

        Args:
            report: the epoch's report.
            what: what the epoch is, for the user.
        """
        if not report.fed_rows:
            self._console.warn(f"{what}: the data has no rows, so nothing was trained")
            return
        untold = report.dropped_rows - report.skipped_rows  # of the others, _without_poison
        if untold and self._coordinator.read(lambda state: state.training_stop):
            self._console.line(
                f"{what}: {untold} of {report.fed_rows} rows came after the requested stop"
            )
        elif untold:
            ended = self._coordinator.read(lambda state: not state.training())
            why = (
                "main_fun had called terminate() or returned on every worker; to train them, it "
                f"must read the feed to its end, {_READS_ALL}"
                if ended
                else "main_fun stopped reading, another dataset of the feed had read them ahead, "
                "or they were lost with a worker"
            )
            self._console.warn(
                f"{what}: {untold} of {report.fed_rows} rows were not trained: {why}"
            )

    def _validate(self, validation: ValidationPlan, number: int, left_out: int) -> None:
        """Feed the rows that validate an epoch, which the workers have ended.

        Args:
            validation: the rows.
            number: number of the epoch in its call, from 0.
            left_out: epochs that were not fed again, nor validated.
        """
        call, progress = validation.call, validation.progress
        call.left_out = left_out
        progress.title = f"validation of epoch {number + 1} of {progress.num_epochs}"
        progress.start_epoch(number, self._watch.sample(call.feed))
        self._set_limit(call)
        report = self._epochs.feed(validation.source, call, validation.request, progress)
        if report is not None:
            report = dataclasses.replace(report, epoch=call.shown_epoch)
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
        request = dataclasses.replace(request, batch=batch)
        progress = TrainingProgress(1, title=f"batch {batch.batch_id}")
        with self._calls.enter(request.feed, is_abandoned, request.feed_timeout_s) as call:
            try:
                progress.start_epoch(0, self._watch.sample(request.feed))
                self._begin_epoch(call)
                self._set_limit(call)
                report = self._epochs.feed(source_of(request), call, request, progress)
                if report is not None and report.fed_rows:
                    progress.add(self._watch.sample(request.feed))
                    self._console.progress(final_line(report, progress), final=True)
                    self._warn_untrained(report, f"{progress.title} of {request.feed!r}")
                return report
            finally:
                self._console.end_progress()

    def inference(self, request: FeedRequest) -> Any:
        """Return a lazy collection of results; see TFCluster.inference."""
        targets = self._coordinator.read(targets_of)
        if not targets:
            raise FeedJobError(
                "no worker takes rows: main_fun has returned on every worker. It must read "
                "the feed until feed.should_stop(), and so answer each inference()"
            )
        task = InferenceTask(
            targets=targets,
            credentials=TaskCredentials(self._cluster_id),
            feed=request.feed,
            config=feed_config(request.feed_timeout_s, self._config),
        )
        return answers_of(request, task)

    def _set_limit(self, call: FeedCall) -> None:
        """Set the limit of the next epoch: workers may stand still while others work."""
        call.limit_s = self._coordinator.read(
            lambda state: worker_limit_s(
                self._config,
                call.feed_timeout_s,
                has_servers=bool(state.servers),
                has_stepped=state.has_stepped,
            )
        )

    def _begin_epoch(self, call: FeedCall) -> None:
        call.epoch = call.epochs.take()
        self._coordinator.act(lambda state: state.come_to(call.feed, call.epoch))
