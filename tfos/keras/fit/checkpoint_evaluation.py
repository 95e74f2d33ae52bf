"""Evaluation of a training's checkpoints while it saves them: the work of `evaluator:0`.

Covers: which checkpoint comes next, its evaluation, the reports to the driver and to TensorBoard.
Does not: read parameters (tfos.keras.fit.saved_parameters), end before it is asked to.
Threads: the thread that runs main_fun.

It takes the newest checkpoint each time, and skips others that were saved while it evaluated.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from ps.errors import CheckpointError
from tfos.control.messages import Evaluated
from tfos.errors import SettingsError
from tfos.keras.data.file_dataset import FileDataset
from tfos.keras.fit.epoch_report import shown_metrics
from tfos.keras.fit.saved_parameters import SavedParameters
from tfos.keras.protocols import EvaluatorContext

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two checks whether the training is over."""

LAST_TRIES = 5
"""Tries to read the newest checkpoint once the training is over; before, there is no limit."""

Metrics = dict[str, float]


class CheckpointEvaluation:
    """Evaluates one checkpoint after another.

    Args:
        saved: the model, and the directory of the cluster's checkpoints.
        ctx: context of the evaluator.
        arguments: arguments of `model.evaluate`.
        poll_s: seconds between two looks at the directory.

    Raises:
        SettingsError: the data can be read only once, or poll_s is not positive.
    """

    def __init__(
        self,
        saved: SavedParameters,
        ctx: EvaluatorContext,
        arguments: Mapping[str, Any],
        poll_s: float,
    ) -> None:
        x = arguments.get("x")
        if hasattr(x, "__next__") and not isinstance(x, FileDataset):
            raise SettingsError(
                "evaluate_checkpoints() reads its data once per checkpoint, but x is an iterator, "
                "which ends with the first one; pass arrays, a tf.data.Dataset or one of ctx.read"
            )
        if not poll_s > 0:
            raise SettingsError(f"poll_s must be > 0 seconds, got {poll_s!r}.")
        self._saved = saved
        self._ctx = ctx
        self._arguments = dict(arguments)
        self._poll_s = poll_s
        self._writer: Any = None
        self._writes = bool(ctx.log_dir)

    def run(self) -> dict[int, Metrics]:
        """Evaluate until the training is over, and then what was saved last.

        Returns:
            The metrics by the checkpoints' steps, in the order of their evaluation.
        """
        found: dict[int, Metrics] = {}
        seen: int | None = None
        last_tries = 0
        try:
            while True:
                is_over = self._ctx.stop_asked  # read first, so that the look sees the last save
                last_tries += is_over
                before, begin_s = seen, time.monotonic()
                try:
                    seen, step = self._load_newer(seen)
                except (CheckpointError, OSError) as error:  # removed meanwhile, or no disk
                    logger.warning("the newest checkpoint was not evaluated: %s", error)
                    is_settled = False
                else:
                    is_settled = seen == before
                    if step is not None and step not in found:
                        self._evaluate(step, found, begin_s)
                if is_over and (is_settled or last_tries >= LAST_TRIES):
                    return found
                if seen == before:
                    self._wait(is_over=is_over)
        finally:
            self._saved.close()

    def _load_newer(self, seen: int | None) -> tuple[int | None, int | None]:
        """Take what was saved after the step `seen`.

        Returns:
            The newest step, and the newest readable step, whose parameters the model now has;
            None: nothing is newer.

        Raises:
            CheckpointError, OSError: nothing was read; a later try may succeed.
        """
        newest = self._saved.newest()
        if newest is None or newest == seen:
            return seen, None
        return newest, self._saved.load()

    def _evaluate(self, step: int, found: dict[int, Metrics], begin_s: float) -> None:
        logs = self._saved.model.evaluate(**self._arguments, verbose=0, return_dict=True)
        metrics = shown_metrics({f"val_{name}": value for name, value in logs.items()})
        found[step] = metrics
        self._ctx.epochs.report(Evaluated(step, metrics, time.monotonic() - begin_s))
        self._ctx.report_progress(step, 0, metrics.get("val_loss"), metrics)
        self._write(step, metrics)

    def _write(self, step: int, metrics: Metrics) -> None:
        """Write event files; training and evaluation never fail because of their display."""
        import tensorflow as tf

        if not self._writes:
            return
        try:
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(self._ctx.log_dir)
            with self._writer.as_default(step):
                for name, value in metrics.items():
                    tf.summary.scalar(name, value)
            self._writer.flush()
        except Exception as error:  # noqa: BLE001 - whatever a disk or a file system raises
            self._writes = False
            logger.warning("no more event files in %s: %s", self._ctx.log_dir, error)

    def _wait(self, *, is_over: bool) -> None:
        if is_over:
            time.sleep(min(LOOK_S, self._poll_s))
            return
        end_s = time.monotonic() + self._poll_s
        while not self._ctx.stop_asked and (left_s := end_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
