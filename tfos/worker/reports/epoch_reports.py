"""Epoch reports of this worker, to the driver and, on the chief, to the keeper of the best save.

Covers: the feed that `fit` reads, each epoch's metrics.
Does not: measure them (tfos.keras.fit.epoch_report), decide which checkpoint is the best
(tfos.worker.best_checkpoint).
Runs in: the worker's process.      Threads: the thread that runs `fit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tfos.control.messages import BestSaved, EpochTrained, Evaluated, FitReading

if TYPE_CHECKING:
    from tfos.worker.best_checkpoint import BestKeeper


class EpochReports:
    """Reports of the epochs of main_fun's fits.

    Args:
        report: function that sends a report to the driver.
    """

    def __init__(
        self, report: Callable[[FitReading | EpochTrained | BestSaved | Evaluated], object]
    ) -> None:
        self._report = report
        self._best: BestKeeper | None = None

    @property
    def best_metric(self) -> str | None:
        """The metric by which the best save is kept; None: none is kept."""
        return None if self._best is None else self._best.metric

    def keep_best(self, keeper: BestKeeper) -> None:
        """Let this keeper decide whether to save each epoch; report the best so far."""
        self._best = keeper
        if keeper.saved is not None:
            self._report(keeper.saved)

    def report(self, event: FitReading | Evaluated) -> None:
        """Report that `fit` has begun or ended, or that a checkpoint was evaluated."""
        self._report(event)

    def ended(self, epoch: EpochTrained, generations: tuple[int, ...] | None = None) -> None:
        """Report that an epoch has ended.

        With a distributed model, no worker trains at that time, and the servers hold what was
        measured. If it is the best, it is saved first.

        Args:
            epoch: the epoch's metrics.
            generations: see BestKeeper.look.
        """
        if self._best is not None and epoch.is_distributed:
            saved = self._best.look(epoch, generations)
            if saved is not None:
                self._report(saved)
        self._report(epoch)
