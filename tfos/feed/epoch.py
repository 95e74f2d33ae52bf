"""Epoch feed: one running epoch, its workers, their counts and its console lines.

Covers: questions to the cluster's state.      Pure.
Does not: feed or wait (tfos.feed.epoch_feeder), count (tfos.feed.ledger).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from feeding.sender.task import FeedReport, FeedTarget, FeedTask
from feeding.sender.worker_link import process_key
from tfos.console.progress import TrainingProgress
from tfos.control.members import Member, NodeStatus
from tfos.control.messages import EpochRowCounts, FeedEpoch
from tfos.control.state.actions import Action
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import PoisonRows, RemoteTraceback
from tfos.failure import is_crash
from tfos.feed.ledger import EpochLedger
from tfos.feed.request import FeedCall
from tfos.feed.sources import FeedSource
from tfos.feed.suspects import Rows
from tfos.monitor import reports

_LOST = (NodeStatus.LOST, NodeStatus.FAILED)


class EpochFeed:
    """One epoch that is being fed.

    Args:
        source: the rows.
        task: feeds a partition.
        call: the user's call, which may be interrupted.
        progress: the console's live line.
        counts: whether a run that resumes this one leaves the epoch out, if it is fed whole.
        checked_by: the feed and epoch that validate it; None: none.
    """

    def __init__(
        self,
        source: FeedSource,
        task: FeedTask,
        call: FeedCall,
        progress: TrainingProgress,
        *,
        counts: bool,
        checked_by: FeedEpoch | None = None,
    ) -> None:
        self.source = source
        self.task = task
        self.call = call
        self.progress = progress
        self.checked_by = checked_by
        self.num_fed = call.epochs.num_fed + 1 if counts else 0
        """Epochs of train() that are fed whole once this one is; 0: this one does not count."""
        self.ledger = EpochLedger(task.feed, task.epoch)
        self.rounds = 0
        """Rounds of feeding lost rows again that have begun."""
        self.running: FeedTask | None = None
        """What feeds lost rows again now."""
        self._have_ended: set[int] = set()
        """Worker processes that read the epoch's end before its lost rows were fed again."""

    def end(self, state: ClusterState) -> list[Action]:
        """Return the orders to end the epoch after the rows fed so far; the last one counts.

        Args:
            state: the cluster's state.
        """
        task = self.task
        return state.flush(task.feed, task.epoch, self.checked_by, self.rounds, self.num_fed)

    def next_round(self, targets: tuple[FeedTarget, ...], rows: Rows) -> FeedTask:
        """Return the task that feeds lost rows again to these workers.

        Args:
            targets: the workers that still train.
            rows: ranges per partition.
        """
        self.rounds += 1
        self.running = dataclasses.replace(
            self.task, targets=targets, again=rows, round_number=self.rounds
        )
        return self.running

    def take_lost(self, lost: Iterable[Member]) -> Rows:
        """Return the rows, each once, that these workers had not trained or that none took."""
        lost = list(lost)
        crashes = {_process_of(worker): worker.crash for worker in lost}
        texts = {process: crash.message for process, crash in crashes.items() if crash}
        return self.ledger.take_lost(self.last_of(lost), texts)

    def take_crashes(self, state: ClusterView) -> None:
        """Note the rows of the crashes that failed the cluster.

        Args:
            state: the cluster's state.
        """
        self.take_lost(self.new_losses(state))
        if self.running is None or self.running.again is None:
            return
        # Its reports never come, so each of its workers may have had any of its rows.
        targets = {target.process for target in self.running.targets}
        for worker in state.attempts():
            crash = worker.crash
            if crash is not None and _process_of(worker) in targets:
                process = _process_of(worker)
                self.ledger.suspects.note(process, crash.message, self.running.again)

    def poison(self, state: ClusterView) -> PoisonRows | None:
        """Return the error about rows with too many crashes; None: there are none.

        Args:
            state: the cluster's state.
        """
        suspects = self.ledger.suspects
        rows = suspects.blamed()
        if not rows:
            return None
        order = "in the order in which the partition has them"
        if self.task.shuffle is not None:
            order = "in the order of this epoch's shuffle; seed=None leaves the partition's own"
        error = PoisonRows(suspects.text(self.call.title, order), rows)
        dumps = [each.traceback for each in state.failures if is_crash(each) and each.traceback]
        error.__cause__ = RemoteTraceback(dumps[-1]) if dumps else None
        return error

    def was_lost(self, task: FeedTask, state: ClusterView) -> bool:
        """Whether a worker that this task feeds was lost.

        Args:
            task: this epoch's task.
            state: the cluster's state.
        """
        lost = {_process_of(each) for each in state.attempts() if each.status in _LOST}
        return any(target.process in lost for target in task.targets)

    def takers(self, state: ClusterView) -> tuple[FeedTarget, ...]:
        """Return the workers that can train lost rows: those that have not ended the epoch.

        Args:
            state: the cluster's state.
        """
        open_ones = state.unflushed(self.task.feed, self.task.epoch)
        return tuple(
            target for target in _targets_of(open_ones) if target.process not in self._have_ended
        )

    def note_round(self, reports: Iterable[FeedReport]) -> None:
        """Note what the round that has ended reports of its workers.

        Args:
            reports: reports of its tasks.
        """
        self._have_ended.update(process for each in reports for process in each.ended)
        self.running = None

    def last_of(self, workers: Iterable[Member]) -> dict[int, EpochRowCounts]:
        """Return the workers' last counts of this epoch, by their numbers in the ledger."""
        feed, epoch = self.task.feed, self.task.epoch
        return {_process_of(worker): worker.feed(feed).epoch(epoch) for worker in workers}

    def new_losses(self, state: ClusterView) -> list[Member]:
        """Return the lost workers whose rows of this epoch are not assigned to others yet."""
        return [
            worker
            for worker in state.attempts()
            if worker.status in _LOST and self.ledger.counts_on(_process_of(worker))
        ]

    def resent_to_others(self, state: ClusterView) -> str:
        """Return whose rows others got too, though those workers live; empty if there are none.

        Args:
            state: the cluster's state.
        """
        lost = {_process_of(each) for each in state.attempts() if each.status in _LOST}
        resent = self.ledger.resent.items()
        found = [
            f"{rows} rows were on their way to {name} when a feed task lost its connection"
            for (process, name), rows in resent
            if rows and process not in lost
        ]
        return "; ".join(found)

    def report(self, state: ClusterView, *, seconds: float) -> reports.EpochReport:
        """Return the counts of the epoch.

        Args:
            state: the cluster's state.
            seconds: duration of the epoch.
        """
        attempts = state.attempts()
        names = {_process_of(each): each.name for each in attempts}
        return self.ledger.report(self.last_of(attempts), names, seconds=seconds)


def targets_of(state: ClusterView) -> tuple[FeedTarget, ...]:
    """Return the workers that take rows."""
    return _targets_of(state.training())


def _targets_of(workers: Iterable[Member]) -> tuple[FeedTarget, ...]:
    return tuple(
        FeedTarget(member.planned.rank, member.name, member.endpoint, member.node.attempt)
        for member in workers
        if member.endpoint is not None
    )


def _process_of(worker: Member) -> int:
    return process_key(worker.planned.rank, worker.node.attempt)


def movement(state: ClusterView) -> tuple[float, ...]:
    """Return numbers that change whenever any worker does something."""
    return tuple(worker.movement for worker in state.workers)


_SHOWN_START_S = 1.0
"""A longer wait for the first step explains why rows/s of the epoch are fewer than steps/s say."""


def final_line(report: reports.EpochReport, progress: TrainingProgress) -> str:
    """Return the console line of a finished epoch.

    Args:
        report: the epoch's report.
        progress: progress with rates and loss.
    """
    title = progress.title or f"epoch {progress.epoch + 1} of {progress.num_epochs}"
    parts = [f"{title}: {report.summary}"]
    first_step_s, steps_per_s = progress.first_step_s, progress.epoch_steps_per_s
    if first_step_s is not None and first_step_s >= _SHOWN_START_S:
        parts.append(f"first step after {first_step_s:.1f} s")
    if steps_per_s is not None:
        parts.append(f"{steps_per_s:.1f} steps/s")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4g}")
    return ", ".join(parts)
