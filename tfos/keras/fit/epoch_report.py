"""Epoch reports: the chief reports the results of each epoch of `fit` to the driver.

Covers: metrics after the user's callbacks, and which of them are left out; steps, rows, seconds;
which feed a `fit` reads, and that it has stopped early.
Does not: combine the workers' metrics (tfos.keras.fit.epoch_agreement), send or save
(tfos.worker.reports.epoch_reports).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from typing import Any

import keras

from rpc.printable import visible
from tfos.control.first_metrics import first_metrics
from tfos.control.messages import MAX_METRICS, EpochTrained, FitReading
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.data.running_fit import is_lone
from tfos.keras.fit.epoch_agreement import BeforeCallbacks, Logs, numbers_in
from tfos.keras.fit.progress import steps_until
from tfos.keras.protocols import WorkerContext
from tfos.keras.step.trainer import PSTrainer

logger = logging.getLogger(__name__)

_MAX_NAME_CHARS = 200
_MAX_NAMED = 20
_fits = itertools.count(1)


class EpochReporter(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Reporter of a distributed model, after the user's callbacks, which may add metrics.

    Args:
        trainer: trainer of the model.
        before: the first callback; it knows all workers' rows and steps.
        arguments: arguments of `fit`, by name.
        number: number of this fit of the model, from 0.
    """

    def __init__(
        self, trainer: PSTrainer, before: BeforeCallbacks, arguments: dict[str, Any], number: int
    ) -> None:
        super().__init__()
        dataset = arguments.get("x")
        self._ctx = trainer.ctx
        self._before = before
        self._dataset = dataset if isinstance(dataset, BatchDataset) else None
        self._feed = "" if self._dataset is None else self._dataset.feed
        self._number, self._first_epoch = number, int(arguments.get("initial_epoch") or 0)
        self._fit = next(_fits)
        self._began_s = 0.0
        self._has_begun = False

    def on_train_begin(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Tell the driver that the fit's epochs will be reported, and which feed they read."""
        if self._ctx.is_chief:
            self._has_begun = True
            self._ctx.epochs.report(self._reading())

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Note that the epoch's first batch has arrived."""
        self._began_s = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Report the epoch, and save it if it is the best; the others wait for the chief."""
        if not self._ctx.is_chief:
            return
        self._ctx.epochs.ended(
            EpochTrained(
                fit=self._fit,
                epoch=epoch,
                metrics=shown_metrics(logs, self._ctx.epochs.best_metric),
                steps=self._before.steps,
                rows=self._before.rows,
                seconds=time.monotonic() - self._began_s,
                feed=self._feed,
                fed_epoch=-1 if self._dataset is None else self._dataset.next_epoch - 1,
                is_distributed=True,
            ),
            self._before.measured_on,
        )

    def on_train_end(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Note that a callback has stopped the fit: a run that resumes does not go on in it."""
        ctx = self._ctx
        if ctx.is_chief and self._feed and self.model.stop_training and not ctx.stop_asked:
            ctx.trained_feeds.fit_stopped(self._feed, self._number)

    def close(self) -> None:
        """Note that `fit` has ended, in whatever way. Idempotent."""
        if self._has_begun:
            self._has_begun = False
            self._ctx.epochs.report(self._reading(is_over=True))

    def _reading(self, *, is_over: bool = False) -> FitReading:
        # With steps_per_epoch, an epoch may wait for rows that are fed after the driver's call.
        is_followed = self._before.steps_per_epoch is None
        return FitReading(
            self._feed if is_followed else "",
            is_over,
            number=self._number,
            epoch=self._first_epoch,
            fed_epoch=0 if self._dataset is None else self._dataset.next_epoch,
        )


class LoneEpochReporter(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Reporter of a model that is not distributed: the chief reports its own epochs.

    Args:
        ctx: the node's context.
    """

    def __init__(self, ctx: WorkerContext) -> None:
        super().__init__()
        self._ctx = ctx
        self._fit = self._steps = 0
        self._began_s = 0.0

    def on_train_begin(self, logs: Logs = None) -> None:  # noqa: ARG002 - Keras' signature
        """Count the fits that are not distributed: a server in this process reports nothing."""
        self._fit = next(_fits) if is_lone(self.model) else 0

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Begin to count."""
        self._steps = 0
        self._began_s = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:  # noqa: ARG002
        """Count a step, or with `steps_per_execution` several."""
        self._steps = steps_until(batch, self.params)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Report the epoch."""
        if self._fit and self._ctx.is_chief:
            self._ctx.epochs.ended(
                EpochTrained(
                    fit=self._fit,
                    epoch=epoch,
                    metrics=shown_metrics(logs),
                    steps=self._steps,
                    seconds=time.monotonic() - self._began_s,
                )
            )


def count_left_out() -> None:
    """Count a fit that trains nothing after a restart, so that later ones keep their numbers."""
    next(_fits)


def shown_metrics(
    logs: Logs, wanted: str | None = None, *, most: int = MAX_METRICS
) -> dict[str, float]:
    """Return the first logs that are numbers, under names that can be shown.

    A warning, once for the same names, tells which are left out.

    Args:
        logs: Keras' logs.
        wanted: a metric that is not left out if they have it.
        most: how many to return at most.
    """
    several = [name for name, value in (logs or {}).items() if getattr(value, "ndim", 0)]
    single = {name: value for name, value in (logs or {}).items() if name not in several}
    numbers = dict(numbers_in(single))
    kept = first_metrics(numbers, most, wanted)
    if left_out := [*several, *(name for name in numbers if name not in kept)]:
        more = f" and {len(left_out) - _MAX_NAMED} more" if len(left_out) > _MAX_NAMED else ""
        _tell_left_out(", ".join(map(repr, left_out[:_MAX_NAMED])) + more)
    return {visible(str(name)[:_MAX_NAME_CHARS], keep=""): value for name, value in kept.items()}


@functools.lru_cache(maxsize=16)  # each epoch would say the same
def _tell_left_out(names: str) -> None:
    logger.warning(
        "metrics %s are left out at the driver, where a metric is one number and an epoch has at "
        "most %d. For a metric per class, compile one with average='macro' too; main_fun can "
        "return the others",
        names,
        MAX_METRICS,
    )
