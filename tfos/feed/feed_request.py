"""What a call that feeds rows was asked for, on its way from the user to the feed task.

Covers: FeedRequest.      Does not: check or feed anything (feed_door, feed_jobs).      Pure data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfos.feed.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedRequest:
    """One call of train() or inference(); checked by feed_door."""

    data: Any
    """What the user gave."""
    feed: str
    """Name of the feed."""
    feed_timeout_s: float
    """Without any worker taking a row."""
    num_epochs: int = 1
    validation: Any = None
    """Data that validates each epoch."""
    columns: Sequence[str] | None = None
    """Of a DataFrame: which are fed; None: all."""
    output: Any = None
    """inference() of a DataFrame: the result columns; see frame_answers."""
    nulls: Any = "error"
    """What missing values of a DataFrame become; see tfos.feed.dataframe_columns."""
    seed: int | None = None
    """Shuffles partitions and rows; None: nothing is shuffled."""
    shuffle_rows: int = 1
    """Rows of the windows in which rows are shuffled."""
    exactly_once: bool = False
    """Whether a task that Spark repeats leaves out what it had fed before."""
    batch: MicroBatch | None = None
    """Of a stream: the data is one of its micro-batches."""
