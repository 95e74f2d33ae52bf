"""Epoch feeder: feeds one epoch of a feed until every worker has trained it.

Covers: its Spark job, its end at every worker, rows of lost workers, the log of which transport
(shared memory, Unix socket, TCP) rows take.
Does not: know what is fed (tfos.feed.sources) or which epoch of a call it is
(tfos.feed.cluster_feeder), wait or judge failures (tfos.feed.watch), carry rows
(feeding.sender.task does, from executors straight to workers).
Runs in: the driver.
Threads: several epochs may be fed at once, of different feeds.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from feeding.config import FeedConfig
from feeding.errors import NoWorkerLeft
from feeding.sender.shuffle import WINDOW_ROWS, Shuffle
from feeding.sender.task import FeedReport, FeedTarget, FeedTask
from rpc.auth.handshake import Credentials
from tfos.config import ClusterConfig, chief_limit_s
from tfos.console.console import Console
from tfos.console.progress import TrainingProgress
from tfos.control.coordinator import Coordinator
from tfos.control.messages import FeedEpoch
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import NodeFailedError
from tfos.feed.epoch import EpochFeed, targets_of
from tfos.feed.ledger import num_rows
from tfos.feed.micro_batch import BatchKnown, MicroBatch
from tfos.feed.request import FeedCall, FeedRequest
from tfos.feed.sources import FeedSource
from tfos.feed.suspects import Rows
from tfos.feed.validation import ValidationPlan
from tfos.feed.watch import FeedWatch
from tfos.monitor import reports
from tfos.spark.jobs import SparkJob, Waves
from tfos.spark.locality import no_locality_wait
from tfos.spark.task_secrets import TaskCredentials, give_credentials

_CANCEL_S = 5.0
_WAVE_S = 30.0
"""A new attempt, or the feed of another fit, waits this long for a slot, as for imports. A pause
between two waves is a fraction of a second, in which workers train the rows that they have."""


class TransportLog:
    """The transports that the log already names."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._logged: dict[str, set[str]] = {}

    def tell(self, feed: str, reports: Iterable[FeedReport]) -> None:
        """Show a line if the tasks of a job used a transport that this feed had not used before.

        Args:
            feed: name of the feed.
            reports: reports of the job's tasks.
        """
        found = Counter(transport for report in reports for transport in report.transports)
        logged = self._logged.setdefault(feed, set())
        if found.keys() <= logged:
            return
        logged.update(found)
        counts = "; ".join(f"{count} times {transport}" for transport, count in found.most_common())
        self._console.detail(f"feed {feed!r}: its tasks connected to workers {counts}")


class EpochFeeder:
    """Feeds epochs to the workers of one cluster.

    Args:
        sc: the SparkContext.
        coordinator: the cluster's coordinator.
        credentials: credentials of feed tasks, which take them from their job.
        config: how rows travel.
        console: where warnings go.
        watch: the cluster's watch.
    """

    def __init__(
        self,
        sc: Any,
        coordinator: Coordinator,
        credentials: Credentials,
        config: ClusterConfig,
        console: Console,
        watch: FeedWatch,
    ) -> None:
        self._sc = sc
        self._coordinator = coordinator
        self._credentials = credentials
        self._config = config
        self._console = console
        self._watch = watch
        self._transport_log = TransportLog(console)

    def feed(
        self,
        source: FeedSource,
        call: FeedCall,
        request: FeedRequest,
        progress: TrainingProgress,
        validation: ValidationPlan | None = None,
    ) -> reports.EpochReport | None:
        """Feed the epoch that the call is at; None: main_fun has returned on every worker.

        Args:
            source: the rows.
            call: the user's call, which may be interrupted.
            request: its arguments.
            progress: the console's live line.
            validation: the feed and epoch that validate this epoch.
        """
        batch = request.batch
        try:
            targets = self._await_targets(call, progress)
            call.check_wanted()
        except BaseException:
            if request.is_validation:
                self._end_unfed((call.feed, call.epoch))
            else:
                call.epochs.give_back(call.epoch)
            raise
        if not targets:
            return None
        checked_by = validation.feed_epoch if validation is not None else None
        stall_s = chief_limit_s(self._config.checkpoints, call.limit_s)
        if batch is not None:
            self._begin(batch, call, progress, stall_s)
        started_s = time.monotonic()
        counts = batch is None and not request.is_interval and not request.is_validation
        task = self._task(call, request, targets)
        run = EpochFeed(source, task, call, progress, counts=counts, checked_by=checked_by)
        with self._blaming(run):
            is_empty = self._run(run, batch)
        if batch is not None and not is_empty:
            self._watch.until(batch.is_over, call, progress, stall_s=stall_s, of_chief=True)
        if resent := self._coordinator.read(run.resent_to_others):
            self._console.warn(
                f"{call.title}: {resent}, and went to another worker. It lives and may have "
                "them too, so some train twice. If that happens again check the network to its host"
            )
        seconds = time.monotonic() - started_s
        return self._coordinator.read(lambda state: run.report(state, seconds=seconds))

    def _run(self, run: EpochFeed, batch: MicroBatch | None) -> bool:
        """Feed an epoch until every worker has trained it; return whether a batch had no rows."""
        feed, epoch = run.task.feed, run.task.epoch
        try:
            results = self._feed(run, run.task)
            run.ledger.add(results)
            count = run.progress.rows_per_epoch = sum(result.rows for result in results)
            self._transport_log.tell(feed, results)
            self._feed_lost(run)
        except BaseException:
            self._fail(run, batch)
            raise
        if batch is not None and not count:
            self._coordinator.act(lambda state: batch.leave(state, in_part=False))
            run.call.epochs.give_back(epoch)
            return True
        self._coordinator.act(run.end)
        try:
            self._end(run)
        except BaseException:
            self._fail(run, batch)
            raise
        run.call.epochs.num_fed = run.num_fed or run.call.epochs.num_fed
        self._coordinator.act(lambda state: state.come_to(feed, epoch + 1))
        return False

    def _fail(self, run: EpochFeed, batch: MicroBatch | None) -> None:
        """End an epoch that failed: the chief records neither it nor its batch.

        Rows of a later call wait after its end, also if a round has revoked the order for it.

        Args:
            run: the epoch.
            batch: the micro-batch that it feeds; None: none.
        """
        if batch is not None:  # before the end: after it the chief would record the batch
            self._coordinator.act(lambda state: batch.leave(state, in_part=True))
        run.num_fed = 0
        self._coordinator.act(run.end)
        if run.checked_by is not None:
            self._end_unfed(run.checked_by)

    def _end_unfed(self, validation: FeedEpoch) -> None:
        """End a validation without rows: workers that have ended its epoch may wait for it."""
        self._coordinator.act(lambda state: state.flush(*validation))

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

    def _await_targets(self, call: FeedCall, progress: TrainingProgress) -> tuple[FeedTarget, ...]:
        """Return the workers that take rows; wait for one that is started again if none is left."""

        def is_known(state: ClusterView) -> bool:
            return bool(targets_of(state)) or not state.awaited()

        if not self._coordinator.read(is_known):
            self._watch.until(is_known, call, progress, stall_s=call.limit_s)
        return self._coordinator.read(targets_of)

    def _begin(
        self, batch: MicroBatch, call: FeedCall, progress: TrainingProgress, stall_s: float
    ) -> None:
        """Announce a micro-batch to the chief; return once its rows may be fed.

        Raises:
            BatchKnown: they were trained before.
        """
        self._coordinator.act(lambda state: batch.begin(state, call.epoch))
        try:
            self._watch.until(batch.may_begin, call, progress, stall_s=stall_s, of_chief=True)
            if self._coordinator.read(batch.is_known):
                raise BatchKnown
        except BaseException:
            self._coordinator.act(lambda state: batch.leave(state, in_part=False))
            call.epochs.give_back(call.epoch)
            raise

    def _end(self, run: EpochFeed) -> None:
        """Wait until every worker has trained the epoch; feed lost rows again."""
        feed, epoch = run.task.feed, run.task.epoch
        while True:
            self._watch.until(
                lambda state: not state.unflushed(feed, epoch) or bool(run.new_losses(state)),
                run.call,
                run.progress,
                stall_s=run.call.limit_s,
            )
            if self._feed_lost(run):
                self._coordinator.act(run.end)
            elif not self._coordinator.read(lambda state: state.unflushed(feed, epoch)):
                return

    def _feed_lost(self, run: EpochFeed) -> bool:
        """Feed again what lost workers had not trained, or none took; False: there was nothing.

        Raises:
            PoisonRows: too many crashes had the same rows.
        """
        fed = False
        while (lost := self._coordinator.read(run.new_losses)) or run.ledger.has_unsent:
            names = ", ".join(worker.name for worker in lost) or "a lost worker"
            rows = self._coordinator.read(lambda _: run.take_lost(lost))
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
            self._watch.until(is_known, run.call, run.progress, stall_s=run.call.limit_s)
        return self._coordinator.read(run.takers)

    def _without_poison(self, run: EpochFeed, rows: Rows) -> Rows:
        """Return lost rows without those of too many crashes.

        Raises:
            PoisonRows: there are such rows, and the user has not asked to skip them.
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
            config=feed_config(call.limit_s, self._config),
            shuffle=None
            if seed is None
            else Shuffle(seed, window_rows, first_epoch=call.epochs.before or 0),
            exactly_once=request.exactly_once,
            keeps_unsent=self._config.restarts.workers > 0,
        )

    def _feed(self, run: EpochFeed, task: FeedTask) -> list[FeedReport]:
        call, source = run.call, run.source
        tag = f"tfos-{self._credentials.cluster_id}-{call.feed}-{call.epoch}"
        what = call.title
        if task.again is not None:
            tag, what = f"{tag}-{task.round_number}", f"{what}, lost rows again"
        waves = self._waves()
        job = SparkJob(
            self._sc,
            tag,
            f"tfos {self._credentials.cluster_id}: {what}",
            lambda: source.reports(task, waves),
            lambda _: self._coordinator.wake(),
            waves,
        )
        give_credentials(self._sc, self._credentials)
        with no_locality_wait(self._sc):
            job.start(count_tasks=True)
            try:
                self._watch.until(
                    lambda _: job.is_ended, call, run.progress, job=job, stall_s=call.limit_s
                )
            except BaseException:
                job.cancel(_CANCEL_S)
                raise
        if job.error is not None:
            raise self._watch.failure(call, job.error) from None
        reports = job.result()
        self._check_unsent(run, task, reports)
        return reports

    def _waves(self) -> Waves | None:
        """Return how the feed leaves slots to new attempts and other clusters; None: not at all."""
        if not self._config.replaces_nodes and not self._config.shares_slots:
            return None
        return Waves(min(_WAVE_S, self._config.reservation_timeout_s / 4))

    def _check_unsent(self, run: EpochFeed, task: FeedTask, reports: list[FeedReport]) -> None:
        """Raise if no worker took rows although none of them was lost: they cannot be reached."""
        reason = next((report.no_worker for report in reports if report.no_worker), "")
        if reason and not self._watch.sees(lambda state: run.was_lost(task, state)):
            raise self._watch.failure(run.call, NoWorkerLeft(reason))


def feed_config(feed_timeout_s: float, config: ClusterConfig) -> FeedConfig:
    """Return how the rows of a call travel.

    Args:
        feed_timeout_s: seconds without any worker taking a row.
        config: the cluster's config.
    """
    return FeedConfig(feed_timeout_s=feed_timeout_s, max_inflight_bytes=config.max_inflight_bytes)
