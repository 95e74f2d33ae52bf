"""Joining: where a replaced worker begins, among workers that train.

Covers: the epoch of each feed that it takes rows of, the ends of epochs that were ordered before it
came.
Does not: give orders (tfos.control.state), feed (tfos.feed.epoch_feeder), know Keras: the place in
the chief's `fit` comes from its reports (tfos.control.epoch_log).
Runs in: the driver.      Pure; control.state owns it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from tfos.control.epoch_log import EpochLog
from tfos.control.messages import FeedEpoch, Flush, Joining

_KEPT_ORDERS = 64
"""Orders to end an epoch to keep. The chief's `fit` is at most an epoch or two behind."""


@dataclass
class OpenEpochs:
    """Epochs of all feeds of one cluster: which are fed now, which ends were ordered."""

    _next: dict[str, int] = field(default_factory=dict)
    """The epoch that is fed now, or the one after the last, by feed."""
    _ends: deque[Flush] = field(default_factory=lambda: deque(maxlen=_KEPT_ORDERS))

    @property
    def begun(self) -> tuple[FeedEpoch, ...]:
        """The epoch of each feed that is fed now, or the one after the last."""
        return tuple(self._next.items())

    def come_to(self, feed: str, epoch: int) -> bool:
        """Rows of this epoch are fed next: those of the epochs before are trained or dropped.

        Args:
            feed: its name.
            epoch: number of the epoch, from 0.

        Returns:
            Whether that is news, and there are epochs before.
        """
        before, self._next[feed] = self._next.get(feed, 0), epoch
        return before != epoch

    def note(self, order: Flush) -> None:
        """Keep the order that ends an epoch; the newest of an epoch counts."""
        self.revoke(order.feed, order.epoch)
        self._ends.append(order)

    def revoke(self, feed: str, epoch: int) -> None:
        """Forget the order that ended an epoch, whose lost rows are fed again.

        Args:
            feed: its name.
            epoch: number of the epoch, from 0.
        """
        self._ends = deque(
            (each for each in self._ends if (each.feed, each.epoch) != (feed, epoch)),
            maxlen=_KEPT_ORDERS,
        )

    def joining(self, epochs: EpochLog) -> tuple[Joining, tuple[Flush, ...]]:
        """Return where a worker begins that joins now, and the orders that it has missed.

        Where a fit reads a feed, it begins in the epoch after the last one that the chief has
        reported, so that it meets the others at the end of that epoch; else in the epoch that is
        fed now.

        Args:
            epochs: the chief's reports.
        """
        first = dict(self._next)
        for feed in first:
            reported = epochs.next_of(feed)
            if reported is not None:
                first[feed] = reported
        missed = [each for each in self._ends if each.epoch >= first.get(each.feed, 0)]
        for order in missed:
            if order.validation is not None:
                feed, epoch = order.validation
                first[feed] = min(first.get(feed, epoch), epoch)
        missed = [each for each in self._ends if each.epoch >= first.get(each.feed, 0)]
        return Joining(tuple(first.items()), epochs.place), tuple(missed)
