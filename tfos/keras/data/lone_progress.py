"""LoneProgress: a `fit` whose model is not distributed, on a dataset of ctx.

Covers: steps, rows, epoch and loss for the driver without a callback of the program's; the end of
the fit with its feed; epochs without rows, which have no metrics.
Does not: decide whether they are sent (the context's seen_progress).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.data.running_fit import RunningFit, drop_unmeasured, running_fit
from tfos.keras.protocols import ProgressSink

if TYPE_CHECKING:
    from tfos.keras.data.dataset import BatchDataset

_LOSS_S = 1.0
"""Seconds between two looks at the loss within an epoch: a look computes the metrics."""

logger = logging.getLogger(__name__)


class _Around(keras.callbacks.LambdaCallback):  # type: ignore[misc]  # Keras has no types
    """Before or behind the program's callbacks, whose list may be that of the next fit too."""


def _of_program(given: keras.callbacks.CallbackList) -> list[Any]:
    return [each for each in given.callbacks if not isinstance(each, _Around)]


class LoneProgress:
    """Progress of one `fit`.

    Args:
        fit: the running one.
        dataset: what it trains.
        progress: of this process.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fit: RunningFit,
        dataset: BatchDataset,
        progress: ProgressSink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = fit.model
        self._dataset = dataset
        self._validation = fit.validation_data
        self._has_callbacks = self._measures = False
        self._progress = progress
        self._clock = clock
        self._epoch = fit.initial_epoch + 1
        self._epochs = None if isinstance(fit.epochs, AllEpochs) else fit.epochs
        self._before = progress.so_far
        """Number of batches and rows in earlier epochs and fits."""
        self._own: tuple[int, int] = (0, 0)
        self._loss: float | None = None
        self._looked_s = clock()
        progress.begin()
        self._tell(epoch=0)  # two fits of one epoch each would look like one

    def epoch_begins(self) -> None:
        """Put callbacks around the program's, once Keras has the list of them.

        It may be the loop of an `evaluate` inside of the fit, which trains nothing.
        """
        fit = running_fit()
        self._measures = fit is not None and fit.measures
        given = None if fit is None else fit.callbacks
        if self._has_callbacks or not isinstance(given, keras.callbacks.CallbackList):
            return
        self._has_callbacks = True

        def end(_: dict[str, Any]) -> None:
            self._dataset.leave_loop()
            given.callbacks = _of_program(given)

        first = _Around(on_epoch_end=self._drop_unmeasured)
        last = _Around(on_epoch_end=self._end_with_feed, on_train_end=end)
        given.callbacks = [first, *_of_program(given), last]

    def _drop_unmeasured(self, _: int, logs: dict[str, Any]) -> None:
        drop_unmeasured(logs, self._dataset.batches, getattr(self._validation, "batches", 1))

    def _end_with_feed(self, epoch: int, _: dict[str, Any]) -> None:
        is_last = self._epochs is not None and epoch + 1 >= self._epochs
        if is_last or not self._dataset.feed or self._model.stop_training:
            return
        if not self._dataset.start_epoch():
            self._model.stop_training = True
            if self._epochs is not None:
                self._dataset.warn_of_end()

    def trained(self, batches: int, rows: int, *, is_over: bool) -> None:
        """Report the progress of the epoch.

        Args:
            batches: number of batches of this epoch trained so far.
            rows: number of rows in these batches.
            is_over: whether the epoch has no further batch.
        """
        if self._measures:
            return
        if batches < self._own[0]:
            self._before = (self._before[0] + self._own[0], self._before[1] + self._own[1])
            self._epoch += 1
            self._loss = None
        elif (batches, rows) == self._own and not is_over:
            return
        self._own = (batches, rows)
        if batches and (is_over or self._clock() - self._looked_s >= _LOSS_S):
            self._look_at_loss()
        self._tell(self._epoch)

    def _look_at_loss(self) -> None:
        self._looked_s = self._clock()
        try:
            self._loss = float(self._model.get_metrics_result()["loss"])
        except Exception as error:  # noqa: BLE001 - training never fails because of its display
            logger.debug("the loss of %s is not known: %s", self._model.name, error)

    def _tell(self, epoch: int) -> None:
        numbers: dict[str, Any] = {
            "steps": self._before[0] + self._own[0],
            "rows": self._before[1] + self._own[1],
            "epoch": epoch,
            "epochs": self._epochs,
            "loss": self._loss,
        }
        self._progress.note({n: float(value) for n, value in numbers.items() if value is not None})
