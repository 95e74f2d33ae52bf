"""Progress of a `fit`: reports steps, rows, loss and epoch to the driver and in Keras' bar.

Covers: ProgressReport, which a distributed `fit` adds itself, and `ctx.callbacks()` for others; the
bar of epochs whose number of steps is known only at their end.
Does not: send (tfos.worker.process), measure (tfos.worker.reports.progress_meter), draw (Keras).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import keras

from tfos.keras.data.epoch_length import AllEpochs
from tfos.keras.protocols import WorkerContext

Logs = dict[str, Any] | None


class ProgressReport(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Reports after every batch: a short epoch would end before a timer.

    Args:
        ctx: context of the worker.
    """

    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._epoch = 0
        self._steps = self._steps_before = 0.0
        """Of this process: so far, and before the running epoch."""
        self._others = (0.0, 0.0)
        """Steps and rows of other models, where the model's trainer counts its own."""

    def on_train_begin(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Report that `fit` runs and has no step yet."""
        self._epoch = 0
        steps, rows = self._ctx.seen_progress.so_far
        self._steps = self._steps_before = steps
        if (trainer := self._trainer) is not None:
            self._others = max(0.0, steps - trainer.steps), max(0.0, rows - trainer.rows)
        self._report(None)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Note the epoch."""
        self._epoch = epoch + 1
        self._steps_before = self._steps

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Report a step, or with `steps_per_execution` several."""
        self._steps = self._steps_before + steps_until(batch, self.params)
        self._report(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Report the epoch's own loss."""
        self._report(logs)

    @property
    def _trainer(self) -> Any:
        """Trainer of the model; None: Keras trains it."""
        return self.model.__dict__.get("_tfos_trainer")

    def _report(self, logs: Logs) -> None:
        trainer, (steps, rows) = self._trainer, (self._steps, 0.0)
        if trainer is not None:
            steps, rows = trainer.steps + self._others[0], trainer.rows + self._others[1]
        numbers: dict[str, float | None] = {**trainer.times.spent()} if trainer else {}
        numbers["epoch"] = float(self._epoch)
        epochs = (self.params or {}).get("epochs")
        if epochs is not None and not isinstance(epochs, AllEpochs):
            numbers["epochs"] = float(epochs)
        numbers |= {"steps": steps, "rows": rows, "loss": None}
        loss: Any = (logs or {}).get("loss")
        with contextlib.suppress(TypeError, ValueError):  # None, or what an own train_step returns
            numbers["loss"] = float(loss)
        self._ctx.report_numbers(numbers)


def steps_until(batch: int, params: Mapping[str, Any] | None) -> int:
    """Return how many batches of its epoch are trained.

    Args:
        batch: number of the last one, from 0, as Keras gives it. With `steps_per_execution` the
            last ones of an epoch may not exist.
        params: of the callback.
    """
    steps = (params or {}).get("steps")
    return batch + 1 if steps is None else min(batch + 1, int(steps))


class EpochProgressBar(keras.callbacks.ProgbarLogger):  # type: ignore[misc]  # Keras has no types
    """Forgets the number of steps of the previous epoch, which Keras would show for this one."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin an epoch of unknown length."""
        self.target = None
        super().on_epoch_begin(epoch, logs)
