"""Progress line of a training: rows, rates, loss, time left; what workers do before the first step.

Covers: adding up the workers, rates over a sliding window, rates and loss of a whole epoch, the
estimate of the time left.
Does not: fetch numbers (tfos.monitor.training), write (tfos.console.console). Pure: the time is an
argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

_WINDOW_S = 10.0
"""Rates are over the last ten seconds: steadier than one heartbeat, fresher than the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """Newest numbers of one worker, some seconds old; see tfos.worker.reports.progress_meter."""

    at_s: float
    """Time of the numbers, by the worker's own clock."""
    rows: float = 0.0
    """Rows trained since its start."""
    steps: float = 0.0
    loss: float | None = None
    epochs_begun: float = 0.0
    epoch_steps: float = 0.0
    epoch_s: float = 0.0
    epoch_rows: float = 0.0
    rows_per_epoch: float = 0.0
    """Rows of its epoch before, if it counts epochs itself; 0: unknown."""
    epoch: float = 0.0
    """Number of its newest epoch in its fit, from 1; 0: unknown."""

    def at_epoch_begin(self, epoch: int) -> WorkerSample:
        """Return what its numbers were when an epoch began, its newest one or one before it.

        Args:
            epoch: number of the epoch, from 1.
        """
        ahead = max(0.0, self.epoch - epoch)
        return replace(
            self,
            at_s=0.0 if ahead else self.at_s - self.epoch_s,  # of older ones nobody knows the time
            rows=self.rows - self.epoch_rows - ahead * self.rows_per_epoch,
            steps=self.steps - self.epoch_steps,
            loss=None,
            epochs_begun=max(0.0, self.epochs_begun - ahead - 1),
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """All workers at one moment."""

    at_s: float
    """Time of the sample, by the driver's clock."""
    workers: Mapping[str, WorkerSample]
    """Workers by attempt: a new attempt counts from 0, by another clock."""
    starting: str = ""
    """What workers without a step do: "workers are starting: import tensorflow 12 s"."""

    def at_epoch_begin(self, epoch: int) -> Sample:
        """Return what the numbers were when each worker began an epoch.

        Args:
            epoch: number of the epoch, from 1.
        """
        workers = {name: worker.at_epoch_begin(epoch) for name, worker in self.workers.items()}
        past_s = max((worker.epoch_s for worker in self.workers.values()), default=0.0)
        return Sample(self.at_s - past_s, workers)


_NOTHING = Sample(0.0, {})


@dataclass
class TrainingProgress:
    """Numbers of one training."""

    num_epochs: int | None
    """Epochs to train; None: unknown."""
    title: str = ""
    """Title instead of the epoch number, such as a micro-batch."""
    is_validation: bool = False
    """Whether the rows are read, not trained."""
    epoch: int = 0
    """Number of the running epoch, from 0."""
    rows_per_epoch: int | None = None
    """Rows of an epoch; known once one was fed."""
    epoch_fraction: float | None = None
    """Share of the epoch's feed tasks that have ended; None if unknown."""
    _points: dict[str, deque[tuple[float, WorkerSample]]] = field(default_factory=dict)
    """Samples of the window by worker, each with the driver's time."""
    _first: Sample = _NOTHING
    _now: Sample = _NOTHING
    _idle_s: float = 0.0
    """Time of the newest numbers without a row of this epoch."""

    def start_epoch(self, epoch: int, sample: Sample) -> None:
        """Begin an epoch at these numbers.

        Args:
            epoch: number of the epoch, from 0.
            sample: numbers of all workers.
        """
        self.epoch = epoch
        self.epoch_fraction = None
        self._first = sample
        self._points.clear()
        self.add(sample)

    def add(self, sample: Sample) -> None:
        """Add new numbers."""
        self._now = sample
        if not self.rows:
            self._idle_s = sample.at_s
        for name, worker in sample.workers.items():
            points = self._points.get(name)
            if worker.at_s > (points[-1][1].at_s if points else 0.0):  # else heard before, or never
                self._add(self._points.setdefault(name, deque()), (sample.at_s, worker))

    @staticmethod
    def _add(points: deque[tuple[float, WorkerSample]], new: tuple[float, WorkerSample]) -> None:
        if len(points) == 1 and _is_same(points[0][1], new[1]):
            points.clear()  # rates begin with the work
        points.append(new)
        while len(points) > 2 and new[1].at_s - points[0][1].at_s > _WINDOW_S:
            points.popleft()

    @property
    def rows(self) -> float:
        """Rows trained in this epoch."""
        return sum(self._rows_of(name, each) for name, each in self._now.workers.items())

    @property
    def rows_per_s(self) -> float:
        """Rows trained per second, lately."""
        return sum(_rate(a.rows, b.rows, b.at_s - a.at_s) for a, b in self._windows())

    @property
    def steps_per_s(self) -> float:
        """Steps of all workers per second, lately."""
        return sum(_rate(a.steps, b.steps, b.at_s - a.at_s) for a, b in self._windows())

    @property
    def epoch_steps_per_s(self) -> float | None:
        """Steps of all workers per second of this epoch, without each worker's first; or None."""
        own = [each for _, each in self._of_this_epoch() if each.epoch_steps and each.epoch_s > 0]
        return sum(each.epoch_steps / each.epoch_s for each in own) if own else None

    @property
    def first_step_s(self) -> float | None:
        """Seconds from the epoch's start to the end of its first step; None: none was reported."""
        own = [each.epoch_s for _, each in self._of_this_epoch()]
        return max(0.0, self._now.at_s - max(own) - self._first.at_s) if own else None

    @property
    def loss(self) -> float | None:
        """Mean of the workers' losses of this epoch, by their rows; None: none was reported."""
        pairs = [
            (each.loss, self._rows_of(name, each))
            for name, each in self._of_this_epoch()
            if each.loss is not None
        ]
        total = sum(rows for _, rows in pairs)
        if not pairs:
            return None
        if not total:
            return sum(loss for loss, _ in pairs) / len(pairs)
        return sum(loss * rows for loss, rows in pairs) / total

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds until the last epoch ends, or None without an estimate."""
        if self.num_epochs is None or not self.rows:
            return None
        left = self.num_epochs - self.epoch
        rate = self.rows_per_s
        if self.rows_per_epoch is not None:
            rows_left = left * self.rows_per_epoch - self.rows
            return rows_left / rate if rate > 0 and rows_left > 0 else None
        if self.epoch_fraction:
            elapsed_s = self._now.at_s - self._idle_s  # without imports and compiling
            return max(0.0, left * elapsed_s / self.epoch_fraction - elapsed_s)
        return None

    @property
    def is_starting(self) -> bool:
        """Whether no row was trained so far, and workers say what they do instead."""
        return bool(self._now.starting) and not self.rows

    def __str__(self) -> str:
        # A worker that reads its own data and has reported nothing may be in any epoch.
        is_known = self.title or self.num_epochs or not self.is_starting
        return "  ".join([*([self._title()] if is_known else []), *self._parts()])

    def whole_epoch(self) -> str:
        """Return the line of an epoch that has ended: without rates of the moment or a time."""
        steps_per_s = self.epoch_steps_per_s
        steps = "" if steps_per_s is None else f"{steps_per_s:.1f} steps/s"
        parts = (self._title(), self._rows(), steps, self._loss())
        return "  ".join(part for part in parts if part)

    def _rows(self) -> str:
        total = self.rows_per_epoch
        # A worker that is ahead counts rows of the next epoch.
        shown = f"{self.rows:.0f}" if total is None else f"{min(self.rows, total):.0f} of {total}"
        return f"{shown} rows{' read' if self.is_validation else ''}"

    def _loss(self) -> str:
        return "" if self.loss is None else f"loss {self.loss:.4g}"

    def _title(self) -> str:
        total = "" if self.num_epochs is None else f"/{self.num_epochs}"
        return self.title or f"epoch {self.epoch + 1}{total}"

    def _parts(self) -> Iterator[str]:
        """Yield what is known: a rate of 0 or a time that nobody can tell is left out."""
        if self.is_starting:
            yield self._now.starting
            return
        yield self._rows()
        if self.rows_per_s >= 1:
            yield f"{self.rows_per_s:.0f} rows/s"
        if self.is_validation:
            return
        if self.steps_per_s > 0:
            yield f"{self.steps_per_s:.1f} steps/s"
        if self.loss is not None:
            yield self._loss()
        if self.rows_per_epoch is not None and self.rows >= self.rows_per_epoch:
            yield "the epoch ends"
        elif self.eta_s is not None:
            yield f"ETA {_clock(self.eta_s)}"

    def _windows(self) -> Iterator[tuple[WorkerSample, WorkerSample]]:
        """Yield the first and last sample of each worker's window, of those that are heard."""
        for points in self._points.values():
            heard_s, last = points[-1]
            if len(points) > 1 and self._now.at_s - heard_s <= _WINDOW_S:
                yield points[0][1], last

    def _of_this_epoch(self) -> Iterator[tuple[str, WorkerSample]]:
        """Yield the workers that have reported a step of this epoch."""
        for name, each in self._now.workers.items():
            before = self._first.workers.get(name)
            if each.epochs_begun > (before.epochs_begun if before is not None else 0.0):
                yield name, each

    def _rows_of(self, name: str, worker: WorkerSample) -> float:
        before = self._first.workers.get(name)
        rows = max(0.0, worker.rows - (before.rows if before is not None else 0.0))
        # One that is ahead has rows of further epochs.
        return min(rows, worker.rows_per_epoch) if worker.rows_per_epoch > 0 else rows


def _is_same(one: WorkerSample, other: WorkerSample) -> bool:
    return (one.rows, one.steps) == (other.rows, other.steps)


def _rate(before: float, after: float, seconds: float) -> float:
    return max(0.0, after - before) / seconds if seconds > 0 else 0.0


def _clock(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
