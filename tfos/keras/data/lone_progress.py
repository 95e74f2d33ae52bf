"""LoneProgress: what a dataset sees of a `fit` whose model is not distributed, for the driver.

Covers: steps, rows, epoch and loss without a callback.
Does not: decide whether they are sent (the context's seen_progress).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.data.running_fit import RunningFit
from tfos.keras.protocols import ProgressSink

_LOSS_S = 1.0
"""Seconds between two looks at the loss within an epoch: a look computes the metrics."""

logger = logging.getLogger(__name__)


class LoneProgress:
    """Progress of one `fit`.

    Args:
        fit: the running fit.
        progress: receiver of this process's progress.
        clock: clock of monotonic seconds.
    """

    def __init__(
        self,
        fit: RunningFit,
        progress: ProgressSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = fit.model
        self._progress = progress
        self._clock = clock
        self._epoch = fit.initial_epoch + 1
        self._epochs = None if isinstance(fit.epochs, AllEpochs) else fit.epochs
        self._before = (0, 0)
        """Number of batches and rows in earlier epochs."""
        self._own: tuple[int, int] = (0, 0)
        self._loss: float | None = None
        self._looked_s = clock()
        progress.begin()
        self._tell()

    def trained(self, batches: int, rows: int, *, is_over: bool) -> None:
        """Report the progress of the epoch.

        Args:
            batches: number of batches of this epoch trained so far.
            rows: number of rows in these batches.
            is_over: whether the epoch has no further batch.
        """
        if batches < self._own[0]:
            self._before = (self._before[0] + self._own[0], self._before[1] + self._own[1])
            self._epoch += 1
            self._loss = None
        elif (batches, rows) == self._own and not is_over:
            return
        self._own = (batches, rows)
        if batches and (is_over or self._clock() - self._looked_s >= _LOSS_S):
            self._look_at_loss()
        self._tell()

    def _look_at_loss(self) -> None:
        self._looked_s = self._clock()
        try:
            self._loss = float(self._model.get_metrics_result()["loss"])
        except Exception as error:  # noqa: BLE001 - training never fails because of its display
            logger.debug("the loss of %s is not known: %s", self._model.name, error)

    def _tell(self) -> None:
        numbers: dict[str, Any] = {
            "steps": self._before[0] + self._own[0],
            "rows": self._before[1] + self._own[1],
            "epoch": self._epoch,
            "epochs": self._epochs,
            "loss": self._loss,
        }
        self._progress.note({n: float(value) for n, value in numbers.items() if value is not None})
