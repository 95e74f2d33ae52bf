"""The wait for main_fun to return, with progress: the training itself where main_fun reads files.

Covers: shutdown's wait, the wait for fits of data that nobody feeds; epochs as the workers report
them.
Does not: order the end (tfos.control.state), judge a late one (tfos.driver.shutdown).
Runs in: the driver.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tfos.console.console import Console
from tfos.console.progress import TrainingProgress
from tfos.control.coordinator import Coordinator
from tfos.control.state.cluster_view import ClusterView
from tfos.driver.shown_wait import shown_wait
from tfos.monitor import training
from tfos.phases import ClusterPhase

_NAMED = 4
"""Workers that a line names."""
_SILENT_S = 30.0
"""Seconds without a step until a loop of main_fun is taken for one that reports none."""


class MainFunWait:
    """Waits for the workers of one cluster.

    Args:
        coordinator: the cluster's coordinator.
        console: where progress goes.
        is_fed: whether rows come by `train`, which has shown their training.
    """

    def __init__(self, coordinator: Coordinator, console: Console, *, is_fed: bool) -> None:
        self._coordinator = coordinator
        self._console = console
        self._is_fed = is_fed
        self._progress = TrainingProgress(None)
        self._shown = (0, 0)
        """How many epochs the slowest worker has begun; its newest one, from 1 in each fit."""

    def wait(self, timeout_s: float, *, from_last_step: bool = False) -> bool:
        """Return whether main_fun has returned on every worker, or the cluster failed, in time.

        Args:
            timeout_s: seconds.
            from_last_step: begin anew after that time if the workers have made steps meanwhile.
        """
        coordinator = self._coordinator
        steps = coordinator.read(_steps)
        while (
            not shown_wait(coordinator, self._console, _nobody_trains, timeout_s, self._line)
            and from_last_step
        ):
            before, steps = steps, coordinator.read(_steps)
            if steps == before:
                break
        if not self._is_fed:
            self._show_end()
        return self._coordinator.read(_nobody_trains)

    def wait_unread(self, feed: str, is_abandoned: Callable[[], bool] = lambda: False) -> None:
        """Wait, without limit, until main_fun reads no row of a feed on any worker.

        Args:
            feed: its name.
            is_abandoned: ends the wait.
        """

        def is_over(state: ClusterView) -> bool:
            return is_abandoned() or _nobody_trains(state) or not state.reading(feed)

        shown_wait(self._coordinator, self._console, is_over, math.inf, self._line)

    def _line(self) -> tuple[str, bool]:
        now_s = self._coordinator.now_s()
        if self._is_fed:
            return self._coordinator.read(lambda state: _waiting(state, now_s)), True
        silent = self._coordinator.read(lambda state: self._silent(state, now_s))
        return silent or str(self._progress), self._progress.is_starting

    def _silent(self, state: ClusterView, now_s: float) -> str:
        """Follow the numbers; return what to say of loops that report none, or an empty string."""
        self.follow(state, now_s)
        began_s = [each.phase_since_s for each in state.training() if each.phase == "main_fun"]
        silent_s = now_s - min(began_s, default=now_s)
        if not self._progress.is_starting or silent_s < _SILENT_S:
            return ""
        return (
            f"main_fun runs {silent_s:.0f} s and reports no steps: if it trains already, pass "
            "callbacks=ctx.callbacks() to fit, or call ctx.report_progress() in a loop of your own"
        )

    def _show_end(self) -> None:
        """Leave the last numbers on the screen."""
        now_s = self._coordinator.now_s()
        self._coordinator.read(lambda state: self.follow(state, now_s))
        if self._progress.rows:
            has_returned = self._coordinator.read(
                lambda state: not state.awaited() and state.phase is ClusterPhase.RUNNING
            )
            end = "main_fun has returned on every worker" if has_returned else "trained so far"
            self._console.progress(f"{end}: {self._progress.whole_epoch()}", final=True)

    def follow(self, state: ClusterView, now_s: float) -> None:
        """Add what the workers report now; begin an epoch once all of them are in it.

        Each fit counts its epochs from 1.

        Args:
            state: the cluster's state.
            now_s: monotonic seconds.
        """
        known = [worker.progress for worker in training.in_epoch(state)]
        reports = [each for each in known if "epoch" in each and each.get("epochs_begun")]
        progress, sample = self._progress, training.sample(state, None, now_s)
        epochs = max((_whole(each.get("epochs", 0.0)) for each in reports), default=0)
        progress.num_epochs = epochs or None
        places = [(_whole(each["epochs_begun"]), _whole(each["epoch"])) for each in reports]
        begun, epoch = min(places, default=(0, 0))
        if epoch:  # at 0 a fit begins
            # A worker that was started again has begun fewer: that is no further epoch.
            if epoch != self._shown[1] or begun > self._shown[0]:
                rows = [_whole(each.get("rows_per_epoch", 0.0)) for each in reports]
                progress.rows_per_epoch = sum(rows) if all(rows) else None
                progress.start_epoch(epoch - 1, sample.at_epoch_begin(epoch))
            self._shown = (begun, epoch)
        progress.add(sample)


def _nobody_trains(state: ClusterView) -> bool:
    return not state.awaited() or state.phase is not ClusterPhase.RUNNING


def _steps(state: ClusterView) -> float:
    return sum(each.progress.get("steps", 0.0) for each in state.workers)


def _waiting(state: ClusterView, now_s: float) -> str:
    names = [f"{worker.name} ({worker.phase})" for worker in state.awaited()]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    since_s = now_s - min((worker.phase_since_s for worker in state.awaited()), default=now_s)
    return f"waiting for main_fun of {', '.join(names[:_NAMED])}{more} {since_s:.0f} s"


def _whole(number: float) -> int:
    """Return what a node reports as a count."""
    return int(number) if math.isfinite(number) else 0
