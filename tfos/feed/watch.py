"""Watch of a running feed: what train() waits for, and the error if it does not happen.

Covers: progress output, stalls, a cluster that fails or ends, the cause of a failed job.
Does not: feed (tfos.feed.epoch_feeder), count rows (tfos.feed.ledger), draw (tfos.console).
Runs in: the driver.
Threads: several calls may wait at once, for different feeds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from feeding.errors import RowError
from tfos.config import SHARED_SLOTS_S, ClusterConfig
from tfos.console.console import Console
from tfos.console.progress import Sample, TrainingProgress
from tfos.console.progress_lines import ProgressLines
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import FeedJobError, FeedTimeout, PhaseError, TFOSError
from tfos.feed.epoch import movement
from tfos.feed.request import FeedCall
from tfos.monitor import training
from tfos.monitor.stragglers import server_counters
from tfos.phases import ClusterPhase
from tfos.spark.jobs import SparkJob, TaskCounts, reason_of

_LOOK_S = 1.0
"""Interval of progress checks; events end a wait at once."""
_BLAME_S = 5.0
"""A failed feed job is a symptom if a node's failure arrives within this time."""
_OF_THE_DATA = f"{RowError.__module__}.{RowError.__qualname__}: "
"""A reason with this prefix is a cause, not the symptom of another failure."""

_NOBODY_TOOK = f"{FeedTimeout.__module__}.{FeedTimeout.__qualname__}: "
_BEGINS_TOGETHER = (
    "a fit begins once the slowest worker has come to it, and no worker takes a row before; look "
    "at the workers that are waited for, or let feed_timeout cover their way there"
)
"""The text after the names of those whom workers wait for."""


class FeedWatch:
    """Watches one cluster while it is fed.

    Args:
        coordinator: the cluster's coordinator.
        config: timeouts.
        console: where warnings go.
    """

    def __init__(self, coordinator: Coordinator, config: ClusterConfig, console: Console) -> None:
        self._coordinator = coordinator
        self._config = config
        self._console = console

    def until(
        self,
        done: Callable[[ClusterView], bool],
        call: FeedCall,
        progress: TrainingProgress,
        *,
        job: SparkJob[Any] | None = None,
        stall_s: float,
        of_chief: bool = False,
    ) -> None:
        """Wait until `done`, showing progress.

        Args:
            done: the condition on the cluster's state.
            call: the running call.
            progress: counters that the console shows.
            job: the Spark job that feeds; None: none runs.
            stall_s: seconds without any movement until FeedTimeout.
            of_chief: the chief is to do something that is not to train rows.

        Raises:
            NodeFailedError, PhaseError: the cluster failed, or was stopped.
            FeedJobError: the call's user was interrupted.
            FeedTimeout: nothing moved for `stall_s`.
        """
        moved_s = time.monotonic()
        last: tuple[float, ...] = ()
        lines, is_told = ProgressLines(self._console), False
        while True:
            finished = self._coordinator.wait(
                lambda state: done(state) or call.is_abandoned() or _has_ended(state), _LOOK_S
            )
            if self._coordinator.read(_has_ended):
                raise self._end()
            call.check_wanted()
            if finished:
                return
            now_s = time.monotonic()
            progress.add(self.sample(call.feed))
            tasks = job.tasks if job is not None else None
            if tasks is not None:
                progress.epoch_fraction = tasks.fraction
            lines.show(str(progress), is_start=progress.is_starting)
            mark = self._coordinator.read(movement)
            if mark != last or (tasks is not None and tasks.active):
                # While feed tasks run, they watch the workers themselves.
                last, moved_s = mark, now_s
            elif now_s - moved_s > stall_s:
                limit_s = self._slots_limit_s(tasks, stall_s)
                if now_s - moved_s > limit_s:
                    raise (
                        _silent(call, stall_s) if of_chief else self._stalled(call, limit_s, tasks)
                    )
                if not is_told:
                    self._warn_of_slots(call, stall_s)
                is_told = True

    def sees(self, happened: Callable[[ClusterView], bool]) -> bool:
        """Wait a moment for what follows from an end that feed tasks have seen; False: it does not.

        Args:
            happened: whether it is there. The cluster's end counts as well.
        """
        return self._coordinator.wait(lambda state: happened(state) or _has_ended(state), _BLAME_S)

    def check_not_ending(self, call: FeedCall) -> None:
        """Raise if the cluster fails or is stopped: workers that ended did not all return.

        Raises:
            NodeFailedError, PhaseError: as `until`.
            FeedJobError: the call's user was interrupted.
        """
        if self._coordinator.read(lambda state: state.is_ending or _has_ended(state)):
            self._await_end(call)
            call.check_wanted()
            raise self._end()

    def failure(self, call: FeedCall, error: BaseException) -> TFOSError:
        """Return the error of a job that failed, which may be the symptom of a cluster's end.

        Args:
            call: the feeding call.
            error: what the Spark job has raised.
        """
        reason = reason_of(error)
        text = f"feeding {call.title} failed in Spark: {reason}"
        own: TFOSError = FeedJobError(text)
        if reason.startswith(_NOBODY_TOOK):
            own = FeedTimeout(f"{text}{self._raised(call)}{self._waits()}")
        if reason.startswith(_OF_THE_DATA):
            return (self._cause() if self._coordinator.read(_has_ended) else None) or own
        if not self._coordinator.wait(lambda state: _has_ended(state) or state.is_ending, _BLAME_S):
            return own
        self._await_end(call)
        return self._end()

    def sample(self, feed: str) -> Sample:
        """Return how far the training of a feed is now."""
        now_s = self._coordinator.now_s()
        return self._coordinator.read(lambda state: training.sample(state, feed, now_s))

    # ---- inside ----

    def _await_end(self, call: FeedCall) -> None:
        """Wait until the cluster has stopped, or the user's call was interrupted."""
        self._coordinator.wait(
            lambda state: _has_ended(state) or call.is_abandoned(), self._config.abort_s
        )

    def _end(self) -> TFOSError:
        """Return the error of a cluster that failed, or ended in another thread."""
        phase = self._coordinator.phase
        how = "was being stopped" if phase is ClusterPhase.RUNNING else f"became {phase.name}"
        return self._cause() or PhaseError(
            f"the cluster {how} while it was fed: shutdown() in another thread?"
        )

    def _cause(self) -> TFOSError | None:
        """Return the failure once every node has stopped, so that all records are in."""
        self._coordinator.wait(lambda state: not state.live(), self._config.abort_s)
        return self._coordinator.raised_error()

    def _slots_limit_s(self, tasks: TaskCounts | None, stall_s: float) -> float:
        """Return how long a feed may stand still: longer where fits wait for each other's slots."""
        is_without_slot = tasks is not None and self._config.shares_slots
        return max(stall_s, SHARED_SLOTS_S) if is_without_slot else stall_s

    def _warn_of_slots(self, call: FeedCall, stall_s: float) -> None:
        self._console.warn(  # also where progress is not shown
            f"the job that feeds {call.title} has run no task for {stall_s:.0f} s: other jobs of "
            "this program hold every slot, or executors are gone (see Spark's UI). It goes on once "
            "one is free; end those that do not end by themselves"
        )

    def _stalled(self, call: FeedCall, stall_s: float, tasks: TaskCounts | None) -> FeedTimeout:
        if tasks is not None:
            return FeedTimeout(
                f"the job that feeds {call.title} has run no task for {stall_s:.0f} "
                f"s ({tasks.ended} of {tasks.total} ended): other jobs hold every slot. End them, "
                "give Spark more cores, or raise feed_timeout."
            )
        now_s = self._coordinator.now_s()
        waiting = self._coordinator.read(
            lambda state: [
                member.describe(now_s)
                for member in (*state.unflushed(call.feed, call.epoch), *state.restarting())
            ]
        )
        return FeedTimeout(
            f"no worker took a row or made a step for {stall_s:.0f} s, and {call.title} has not "
            f"ended at {'; '.join(waiting)}. If steps are that slow raise "
            f"{self._limit(call, stall_s)}; main_fun must read this feed to its end{self._waits()}"
        )

    def _limit(self, call: FeedCall, stall_s: float) -> str:
        """Return the setting that a limit for workers comes from.

        Args:
            call: the feeding call.
            stall_s: the limit.
        """
        given, plan = f"feed_timeout={call.feed_timeout_s:g}", self._config.checkpoints
        if plan is None or stall_s <= call.feed_timeout_s:
            return given
        return (
            f"Checkpoints(timeout_s={plan.timeout_s:g}), or {given} above the {stall_s:.0f} s that "
            "follow from it, as workers wait while the chief saves or restores"
        )

    def _raised(self, call: FeedCall) -> str:
        """Return whose the limit was that a task has waited for, if it is not the user's."""
        plan = self._config.checkpoints
        if plan is None or call.limit_s <= call.feed_timeout_s:
            return ""
        return (
            f"; feed_timeout={call.feed_timeout_s:g} was raised to {call.limit_s:.0f} s by "
            f"Checkpoints(timeout_s={plan.timeout_s:g}), as workers wait while the chief saves or "
            "restores, or a server that is started again restores"
        )

    def _waits(self) -> str:
        """Return for whom workers wait at a rendezvous, and what that has to do with the feed."""
        members = self._coordinator.read(lambda state: [*state.servers])
        found = [server_counters(member.heartbeat) for member in members]
        waits = [str(each) for stats in found if stats for each in stats.open_rendezvous]
        return f"; {'; '.join(waits)}: {_BEGINS_TOGETHER}" if waits else ""


def _silent(call: FeedCall, stall_s: float) -> FeedTimeout:
    return FeedTimeout(
        f"{call.title} waits for the chief, which told nothing for {stall_s:.0f} s: it restores"
        " a checkpoint, validates or saves. Look at the chief's log. If fit validates by a "
        "feed, its rows are those of train(validation=...). If validation is that "
        f"slow raise feed_timeout={call.feed_timeout_s:g}; if a restore or a save is, "
        "Checkpoints(timeout_s=...)"
    )


def _has_ended(state: ClusterView) -> bool:
    return state.phase is not ClusterPhase.RUNNING
