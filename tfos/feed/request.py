"""Feed requests: the arguments of a call, and the call that uses each feed now.

Covers: FeedRequest; the table of running calls, which refuses a second call for one feed; the
numbers of a feed's epochs.
Does not: check or feed anything (tfos.feed.entry, tfos.feed.cluster_feeder).
Threads: any; `_lock` guards the table.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tfos.errors import FeedJobError, PhaseError
from tfos.feed.micro_batch import MicroBatch


@dataclass(slots=True)
class EpochNumbers:
    """Epochs of one feed, counted over all calls."""

    before: int | None = None
    """Epochs trained by the interrupted run that this one resumes; None: not known yet."""
    num_fed: int = 0
    """Epochs that train() of this run has fed whole."""
    left_out: int = 0
    """How many of the epochs before the calls of this run have not fed again."""
    _next: int = 0

    def take(self) -> int:
        """Return the number of the next epoch, from 0."""
        self._next += 1
        return self._next - 1

    def give_back(self, epoch: int) -> None:
        """Let the next epoch have this number: it had no rows."""
        self._next = epoch

    def leave_out(self, trained_before: int, num_epochs: int) -> int:
        """Return how many epochs of a call the interrupted run had trained.

        Args:
            trained_before: epochs of this feed from the interrupted run; the first answer stays.
            num_epochs: epochs of the call.
        """
        if self.before is None:
            self.before = trained_before
        first = min(self.before - self.left_out, num_epochs)
        self.left_out += first
        return first


@dataclass(slots=True)
class FeedCall:
    """One train() that runs."""

    feed: str
    started_s: float
    is_abandoned: Callable[[], bool]
    """Whether its user was interrupted and no longer waits for it."""
    epochs: EpochNumbers
    feed_timeout_s: float
    """The user's feed_timeout."""
    limit_s: float
    """Limit of the epoch that is fed: above `feed_timeout_s` if workers wait for the chief."""
    epoch: int = 0
    """Epoch of the feed, from 0, counted over all calls."""
    left_out: int = 0
    """Epochs of the interrupted run that come before it: those of the rows to train."""

    @property
    def shown_epoch(self) -> int:
        """Its epoch, from 0, with those that the interrupted run had trained."""
        return self.epoch + self.left_out

    @property
    def title(self) -> str:
        """Its epoch, counted from 1."""
        return f"epoch {self.shown_epoch + 1} of {self.feed!r}"

    def check_wanted(self) -> None:
        """Raise FeedJobError if its user was interrupted."""
        if self.is_abandoned():
            raise FeedJobError(f"{self.title} was interrupted")

    def __str__(self) -> str:
        if self.is_abandoned():
            return "a train() that was interrupted and is about to end"
        seconds = time.monotonic() - self.started_s
        return f"a train() that began {seconds:.0f} s ago and is at epoch {self.shown_epoch + 1}"


class FeedCalls:
    """The calls of one cluster, at most one for each feed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, FeedCall] = {}
        self._epochs: dict[str, EpochNumbers] = {}

    @contextlib.contextmanager
    def enter(
        self, feed: str, is_abandoned: Callable[[], bool], feed_timeout_s: float
    ) -> Iterator[FeedCall]:
        """Feed alone.

        Args:
            feed: name of the feed.
            is_abandoned: whether the user's call was interrupted.
            feed_timeout_s: the user's feed_timeout.

        Raises:
            PhaseError: another call feeds this feed: their rows and epochs would mix.
        """
        with self._lock:
            other = self._calls.get(feed)
            if other is not None:
                raise PhaseError(
                    f"train() on {feed!r}: {other} feeds it already, and the rows would mix. Wait "
                    "for it, or use another feed: name it in queues= of reserve() and in qname=."
                )
            epochs = self._epochs.setdefault(feed, EpochNumbers())
            call = FeedCall(
                feed,
                time.monotonic(),
                is_abandoned,
                epochs,
                feed_timeout_s,
                limit_s=feed_timeout_s,
                left_out=epochs.left_out,
            )
            self._calls[feed] = call
        try:
            yield call
        finally:
            with self._lock:
                del self._calls[feed]


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRequest:
    """One call of train() or inference(); checked before it is made."""

    data: Any
    """The user's data: an RDD or DataFrame."""
    feed: str
    """Name of the feed."""
    feed_timeout_s: float
    """Seconds without any worker taking a row."""
    num_epochs: int = 1
    validation: Any = None
    """Data that validates each epoch."""
    columns: Sequence[str] | None = None
    """Columns of a DataFrame to feed; None: all."""
    output: Any = None
    """inference() of a DataFrame: the result columns; see tfos.feed.sources.answers_of."""
    nulls: Any = "error"
    """Fill values of missing values of a DataFrame; see tfos.feed.dataframe_columns."""
    seed: int | None = None
    """Shuffles partitions and rows; None: nothing is shuffled."""
    shuffle_rows: int | None = None
    """Rows of the windows in which rows are shuffled; None: the default of `Shuffle`."""
    exactly_once: bool = False
    """Whether a task that Spark repeats skips the rows that it fed before."""
    batch: MicroBatch | None = None
    """The stream's micro-batch that the data is; None: the data is no micro-batch."""
    is_interval: bool = False
    """Whether the data is an interval of a DStream."""
    is_validation: bool = False
    """Whether the data validates the epochs of another call."""
