"""Reads a feed in slices of chunks, so that batches can cross chunk borders.

Covers: Cursor, which rows a batch holds.
Does not: make rows or arrays of a slice (rows, batches).
Threads: one consumer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from feeding.columnar.chunk import Chunk
from feeding.errors import SettingsError
from feeding.receiver.channel import FeedChannel
from feeding.receiver.epoch_rows import INFERENCE, Piece, Receipt
from feeding.receiver.feed_queue import EpochEnd, FeedEnd


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows `start` to `stop` of a chunk."""

    chunk: Chunk
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Rows in this slice."""
        return self.stop - self.start

    @property
    def ends_partition(self) -> bool:
        """Whether no row of the partition comes after this slice."""
        return self.chunk.meta.last_in_partition and self.stop == self.chunk.num_rows


def receipt_of(slices: Iterable[Slice]) -> Receipt:
    """Return which rows a batch of these slices holds; neighbours become one piece."""
    pieces: list[Piece] = []
    for part in slices:
        meta, place = part.chunk.meta, part.chunk.position
        epoch = meta.epoch if meta.mode == "train" else INFERENCE
        piece = Piece(epoch, place + part.start, place + part.stop)
        if pieces and (pieces[-1].epoch, pieces[-1].stop) == (epoch, piece.start):
            piece = Piece(epoch, pieces.pop().start, piece.stop)
        pieces.append(piece)
    return tuple(pieces)


def check_batch_size(value: object) -> int:
    """Return a batch size as an int.

    Raises:
        SettingsError: it is no int >= 1.
    """
    if not isinstance(value, bool) and isinstance(value, int | np.integer) and value >= 1:
        return int(value)
    raise SettingsError(f"batch_size must be an int >= 1, got {value!r} ({type(value).__name__})")


class Cursor:
    """Position in one feed; what it gives out is counted as taken."""

    def __init__(self, channel: FeedChannel, feed: str) -> None:
        self._channel = channel
        self._feed = feed
        self._chunk: Chunk | None = None
        self._at = 0

    def next(
        self, most_rows: int, timeout_s: float | None = None, *, session: int = 0
    ) -> Slice | EpochEnd | FeedEnd:
        """Return at most so many rows of one chunk; no rows if it only ends a partition.

        `session` fills up a batch of inference rows, which are of one session only.
        """
        if self._chunk is None:
            item = self._channel.take(self._feed, timeout_s, session=session)
            if not isinstance(item, Chunk):
                return item
            self._chunk, self._at = item, 0
        chunk, start = self._chunk, self._at
        stop = min(chunk.num_rows, start + most_rows)
        self._at = stop
        if stop == chunk.num_rows:
            self._chunk = None
        self._channel.count_taken(chunk, stop - start)
        return Slice(chunk, start, stop)

    def discard(self) -> None:
        """Forget the rows of the chunk under way."""
        self._chunk = None
