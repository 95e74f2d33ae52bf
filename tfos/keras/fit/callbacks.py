"""Callbacks: what a worker's `fit` reports to TensorBoard and to the driver.

Covers: Keras' TensorBoard callback in a directory per worker, progress for the driver.
Does not: write the servers' numbers (tfos.keras.fit.tensorboard_scalars) or make workers agree
(tfos.keras.fit.epoch_agreement does, unasked).
Threads: the thread that runs `fit`. A failing callback here never stops the training.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import keras

from tfos.keras.fit.epoch_report import LoneEpochReporter
from tfos.keras.fit.tensorboard_scalars import ClusterScalars
from tfos.keras.protocols import ShownContext, WorkerContext

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.5
"""Between two reports of progress; the supervisor sends them on with its heartbeat (2 s)."""

Logs = dict[str, Any] | None


def callbacks(ctx: ShownContext) -> list[Any]:
    """Return the callbacks for this worker's `fit`, in a list to which the user's own are added.

    Args:
        ctx: the node's context; without `log_dir` there is no TensorBoard.
    """
    found: list[Any] = [ReportProgress(ctx), LoneEpochReporter(ctx)]
    if ctx.log_dir:
        found.append(EventFiles(log_dir=ctx.log_dir))
        if ctx.is_chief:
            found.append(ClusterScalars(ctx))
    return found


class EventFiles(keras.callbacks.TensorBoard):  # type: ignore[misc]  # Keras has no types
    """Keras' TensorBoard callback; if it cannot write, training goes on without it."""

    _is_broken = False


def _tolerant(name: str) -> Callable[..., Any]:
    original = getattr(keras.callbacks.TensorBoard, name)

    @functools.wraps(original)
    def hook(self: EventFiles, *args: Any, **kwargs: Any) -> Any:
        if self._is_broken:
            return None
        try:
            return original(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training never fails because of its display
            self._is_broken = True
            reason = str(error).strip().partition("\n")[0]
            logger.warning("no event files in %s any more: %s", self.log_dir, reason)
            return None

    return hook


for _name in vars(keras.callbacks.TensorBoard):
    if _name == "set_model" or _name.startswith("on_"):
        setattr(EventFiles, _name, _tolerant(_name))


class ReportProgress(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Reports steps, rows and loss to the driver."""

    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._steps = 0
        self._reported_s = -math.inf

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002 - Keras'
        """Report, but not more often than heartbeats carry it.

        Args:
            batch: number of the batch in its epoch.
            logs: Keras's metrics so far.
        """
        self._steps += 1
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_INTERVAL_S:
            self._reported_s = now_s
            self._report(logs)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Report the epoch's own loss.

        Args:
            epoch: number of the epoch, from 0.
            logs: Keras's metrics of the epoch.
        """
        self._report(logs)

    def _report(self, logs: Logs) -> None:
        trainer = self.model.__dict__.get("_tfos_trainer")
        steps, rows = (trainer.steps, trainer.rows) if trainer else (self._steps, 0)
        times = trainer.times.spent() if trainer else {}
        loss = (logs or {}).get("loss")
        self._ctx.report_progress(steps, rows, None if loss is None else float(loss), times)
