"""Log of trained epochs: what the chief's fits have reported, and whether more is to come.

Covers: epochs with their metrics, the feeds that fits read, the best checkpoint, the evaluations of
checkpoints.
Does not: show them (tfos.monitor.history) or wait (tfos.feed.epoch_feeder).
Runs in: the driver.      Pure; control.state owns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from tfos.control.messages import BestSaved, EpochTrained, Evaluated, FitReading, SavedNow
from tfos.fit_place import FitPlace

Value = TypeVar("Value")
MAX_EPOCHS = 10_000
"""Newest epochs, and evaluations, to keep: each micro-batch of a stream is an epoch."""


@dataclass
class EpochLog:
    """Reports of one cluster's chief and evaluator, in order."""

    count: int = 0
    """Epochs so far, also those that are no longer kept."""
    best: BestSaved | None = None
    saved: SavedNow | None = None
    """What became of the newest order SaveNow that was carried out."""
    evaluations: deque[Evaluated] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))
    num_evaluations: int = 0
    """Evaluations so far, also those that are no longer kept."""
    place: FitPlace | None = None
    """Where the training of the distributed model is; None: no fit has reported."""
    _epochs: deque[EpochTrained] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))
    _read_feeds: set[str] = field(default_factory=set)
    _trained: dict[str, int] = field(default_factory=dict)
    """The newest epoch, by feed, that an epoch of a fit has ended with."""
    _first: dict[str, int] = field(default_factory=dict)
    """The epoch, by feed, that the last fit on it began with."""

    def copied(self) -> EpochLog:
        """Return a copy that stays as it is when the training goes on."""
        return replace(
            self,
            evaluations=self.evaluations.copy(),
            _epochs=self._epochs.copy(),
            _read_feeds=self._read_feeds.copy(),
            _trained=self._trained.copy(),
            _first=self._first.copy(),
        )

    def note(self, event: FitReading | EpochTrained | BestSaved | SavedNow | Evaluated) -> None:
        """Keep a report."""
        match event:
            case Evaluated():
                self.evaluations.append(event)
                self.num_evaluations += 1
            case FitReading():
                self._fit(event)
            case EpochTrained():
                self.count += 1
                self._epochs.append(event)
                if event.is_distributed and self.place is not None:
                    self.place = msgspec.structs.replace(
                        self.place, epoch=event.epoch + 1, files_epoch=event.fed_epoch + 1
                    )
                known = self._trained.get(event.feed, -1)
                self._trained[event.feed] = max(known, event.fed_epoch)
            case BestSaved():
                self.best = event
            case SavedNow(number):
                if self.saved is None or number > self.saved.number:
                    self.saved = event

    def _fit(self, event: FitReading) -> None:
        if event.feed:
            (self._read_feeds.discard if event.is_over else self._read_feeds.add)(event.feed)
        if event.number >= 0 and event.is_over:
            self.place = FitPlace(event.number + 1, -1, files_epoch=event.fed_epoch)
        elif event.number >= 0:
            self.place = FitPlace(event.number, event.epoch, event.epoch, event.fed_epoch)
            self._first[event.feed] = event.fed_epoch

    def next_of(self, feed: str) -> int | None:
        """Return the feed's epoch after the last that its fit reported; None: no fit reads it.

        Args:
            feed: its name.
        """
        if feed not in self._read_feeds:
            return None
        return max(self._trained.get(feed, -1) + 1, self._first.get(feed, 0))

    def since(self, count: int, feed: str | None = None) -> tuple[EpochTrained, ...]:
        """Return the epochs that came after the first `count`, as far as they are kept.

        Args:
            count: a former value of `count`.
            feed: only this feed; None: all.
        """
        newest = _newest(self._epochs, self.count - count)
        return tuple(each for each in newest if feed is None or each.feed == feed)

    def evaluations_since(self, count: int) -> tuple[Evaluated, ...]:
        """Return the evaluations that came after the first `count`, as far as they are kept."""
        return _newest(self.evaluations, self.num_evaluations - count)

    def is_awaited(self, feed: str, epoch: int) -> bool:
        """Whether a fit that reads this feed has yet to report an epoch that was fed.

        Args:
            feed: its name.
            epoch: number of the epoch, from 0.
        """
        return feed in self._read_feeds and self._trained.get(feed, -1) < epoch


def _newest(kept: Iterable[Value], number: int) -> tuple[Value, ...]:
    return tuple(kept)[-number:] if number > 0 else ()
