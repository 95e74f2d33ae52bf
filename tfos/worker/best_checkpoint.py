"""Best checkpoint: the chief saves an epoch whose metric is better than ever before.

Covers: `Checkpoints.keep_best`: the comparison, also with the run that this one resumes, and the
warning about a metric that does not exist.
Does not: save (tfos.worker.saver), keep the files of the best step (ps.checkpoint.writer).
Runs in: the chief's process.      Threads: the thread that runs `fit`.

The chief saves while no worker trains: all wait for its decisions at the end of the epoch. So the
checkpoint holds the parameters that the metric was measured with.
"""

from __future__ import annotations

import logging
import math

from ps.checkpoint.score import Score
from tfos.config import Checkpoints
from tfos.control.messages import BestSaved, EpochTrained
from tfos.worker.saver import ChiefSaver

_logger = logging.getLogger(__name__)


class BestKeeper:
    """The best checkpoint of one run.

    Args:
        plan: settings with the metric's name and direction.
        saver: the chief's saver, which has restored the run that this one resumes, if any.

    Attributes:
        metric: the metric's name.
    """

    def __init__(self, plan: Checkpoints, saver: ChiefSaver) -> None:
        self.metric = plan.keep_best or ""
        self._is_highest = plan.best_is_highest
        self._saver = saver
        self._has_warned = False
        found = saver.best(self.metric, higher_is_better=self._is_highest)
        self._best = found.score if found is not None else None
        self.saved: BestSaved | None = None
        """The best so far."""
        if found is not None:
            self.saved = self._as_report(found.step)

    def look(
        self, epoch: EpochTrained, generations: tuple[int, ...] | None = None
    ) -> BestSaved | None:
        """Save the parameters if the epoch is the best so far; return what was saved.

        Args:
            epoch: the epoch's metrics.
            generations: generation of each server when they were measured; None: any. A server that
                was started again since has not the parameters that were measured.
        """
        value = epoch.metrics.get(self.metric)
        if value is None:
            self._warn(epoch)
        if value is None or not math.isfinite(value):
            return None
        score = Score(self.metric, value, self._is_highest)
        if not score.beats(self._best):
            return None
        failed = self._saver.save_now(score, generations)
        if failed:
            _logger.warning(
                "epoch %d is the best so far (%s %.6g) but was not saved: %s",
                epoch.epoch + 1,
                self.metric,
                value,
                failed,
            )
            return None
        self._best = score
        self.saved = self._as_report()
        return self.saved

    def _as_report(self, step: int | None = None) -> BestSaved:
        path, step = self._saver.place(step)
        value = self._best.value if self._best is not None else math.nan
        return BestSaved(path, step, self.metric, value)

    def _warn(self, epoch: EpochTrained) -> None:
        """Warn once, early, that the metric may be misspelt."""
        if self._has_warned or self.saved is not None:
            return
        self._has_warned = True
        _logger.warning(
            "epoch %d has no %r, the metric of keep_best; it has %s. No checkpoint is kept as the "
            "best until an epoch has it",
            epoch.epoch + 1,
            self.metric,
            ", ".join(sorted(epoch.metrics)) or "no metrics",
        )
