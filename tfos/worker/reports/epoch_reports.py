"""Epoch reports of this worker: to the driver, and of the chief to what keeps the best checkpoint.

Covers: which feed `fit` reads, each epoch's metrics.
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
        report: sends a report to the driver.
    """

    def __init__(
        self, report: Callable[[FitReading | EpochTrained | BestSaved | Evaluated], object]
    ) -> None:
        self._report = report
        self._best: BestKeeper | None = None

    def keep_best(self, keeper: BestKeeper) -> None:
        """From now on this decides of each epoch whether to save it; reports the best so far."""
        self._best = keeper
        if keeper.saved is not None:
            self._report(keeper.saved)

    def fit_reads(self, fit: FitReading) -> None:
        """`fit` of a distributed model has begun, or ended: report it."""
        self._report(fit)

    def evaluated(self, checkpoint: Evaluated) -> None:
        """The evaluator has evaluated a checkpoint: report it."""
        self._report(checkpoint)

    def ended(self, epoch: EpochTrained) -> None:
        """An epoch has ended: report it.

        Of a distributed model no worker trains then, and the servers hold what was measured: it is
        saved first if it is the best.
        """
        if self._best is not None and epoch.is_distributed:
            saved = self._best.look(epoch)
            if saved is not None:
                self._report(saved)
        self._report(epoch)
