"""Progress line of a training: rows/s, steps/s, loss, ETA.

Covers: rates over a sliding window and the estimate of the time left.
Does not: fetch numbers (tfos.feed.epochs) or write (tfos.console). Pure: the time is an
argument.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_WINDOW_S = 10.0
"""Rates are over the last ten seconds: steadier than one heartbeat, fresher than the whole run."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals over all workers at one moment."""

    at_s: float
    rows: int
    steps: float
    loss: float | None = None


@dataclass
class TrainingProgress:
    """Numbers of one call of train()."""

    num_epochs: int
    title: str = ""
    """Title in place of the epoch number, such as a micro-batch."""
    epoch: int = 0
    """Which of them runs, from 0."""
    rows_per_epoch: int | None = None
    """Known once an epoch was fed."""
    epoch_fraction: float | None = None
    """Share of the epoch's feed tasks that have ended; None if unknown."""
    _samples: deque[Sample] = field(default_factory=deque)
    _epoch_rows: int = 0
    _epoch_s: float = 0.0

    def start_epoch(self, epoch: int, sample: Sample) -> None:
        """Begin an epoch at these totals.

        Args:
            epoch: number of the epoch, from 0.
            sample: rows, steps and seconds so far.
        """
        self.epoch = epoch
        self.epoch_fraction = None
        self._epoch_rows = sample.rows
        self._epoch_s = sample.at_s
        self.add(sample)

    def add(self, sample: Sample) -> None:
        """Add new totals."""
        self._samples.append(sample)
        while len(self._samples) > 2 and sample.at_s - self._samples[0].at_s > _WINDOW_S:
            self._samples.popleft()

    @property
    def rows_per_s(self) -> float:
        """Rows trained per second, lately."""
        return self._rate("rows")

    @property
    def steps_per_s(self) -> float:
        """Steps of all workers per second, lately."""
        return self._rate("steps")

    @property
    def loss(self) -> float | None:
        """Mean over the workers of the loss they reported last."""
        return self._samples[-1].loss if self._samples else None

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the last epoch ends, or None without an estimate."""
        if not self._samples:
            return None
        now = self._samples[-1]
        left = self.num_epochs - self.epoch
        done_rows = now.rows - self._epoch_rows
        if self.rows_per_epoch is not None and self.rows_per_s > 0:
            return max(0.0, left * self.rows_per_epoch - done_rows) / self.rows_per_s
        if self.epoch_fraction and done_rows > 0:  # before that the workers compile
            epoch_s = (now.at_s - self._epoch_s) / self.epoch_fraction
            return max(0.0, left * epoch_s - (now.at_s - self._epoch_s))
        return None

    def __str__(self) -> str:
        now = self._samples[-1] if self._samples else None
        rows = now.rows - self._epoch_rows if now else 0
        loss = self.loss
        parts = [
            self.title or f"epoch {self.epoch + 1}/{self.num_epochs}",
            f"{rows} rows",
            f"{self.rows_per_s:.0f} rows/s",
            f"{self.steps_per_s:.1f} steps/s",
            f"loss {loss:.4g}" if loss is not None else "loss -",
            f"ETA {_clock(self.eta_s)}",
        ]
        return "  ".join(parts)

    def _rate(self, what: str) -> float:
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        seconds = last.at_s - first.at_s
        gained = float(getattr(last, what) - getattr(first, what))
        return max(0.0, gained) / seconds if seconds > 0 else 0.0


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
