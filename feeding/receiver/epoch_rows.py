"""Row counts of one epoch in one worker: accepted, given to the trainer, trained, dropped.

Covers: EpochRows; when a row counts as trained.
Does not: hold rows (feed_queue).
Threads: pure; the caller serialises calls.

A row is *trained* once the trainer has finished the batch that holds it: the trainer has asked for
the next batch, and (tfos.keras) the servers have acknowledged the push. At every moment
    accepted = trained + in flight + dropped,
where rows in flight are unread, read ahead, or at the trainer. What one reader has read ahead when
another one gives later rows to the trainer counts as dropped, until its reader brings it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from feeding.protocol.row_ranges import AcceptedRows, RowRanges, Span

INFERENCE = -1
"""Pseudo epoch of inference rows, which are answered, not trained."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of a batch: positions `start` to `stop`, `stop` excluded, of an epoch."""

    epoch: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.stop - self.start


Receipt = tuple[RowSpan, ...]
"""Which rows a batch holds."""


@dataclass(frozen=True, slots=True)
class EpochStats:
    """Counts of one epoch in one worker."""

    epoch: int
    accepted_rows: int
    trained_rows: int
    dropped_rows: int
    """All rows before the position `trained_rows` + `dropped_rows` are trained, but these: a reader
    took them and gave them to no trainer, while others trained rows behind them."""


@dataclass(slots=True)
class _Partition:
    """A partition that is fed exactly once, and the feeder that owns it."""

    owner: int = 0
    accepted: AcceptedRows = field(default_factory=AcceptedRows)


class EpochRows:
    """Counts of one epoch. A row's position is its index in the order of acceptance."""

    def __init__(self) -> None:
        self.accepted_rows = 0
        self.dropped_rows = 0
        self.taken_to = 0
        """No row from this position on was read."""
        self._handed_to = 0
        """No row from this position on was given to the trainer."""
        self._left = RowRanges()
        """Rows that are dropped since rows behind them were given to the trainer, or the epoch has
        ended. Their reader may still bring them."""
        self._done = RowRanges()
        """Rows that are trained, or were left before others were given to the trainer."""
        self._at_trainer = 0
        """Without those of `_left`."""
        self._trained_rows = 0
        self._partitions: dict[int, _Partition] = {}

    @property
    def in_flight_rows(self) -> int:
        """Rows that are neither trained nor dropped."""
        return self.accepted_rows - self._trained_rows - self.dropped_rows

    @property
    def read_ahead_rows(self) -> int:
        """Rows that a reader took and has not given to the trainer."""
        return max(0, self.taken_to - self._handed_to)

    @property
    def done(self) -> tuple[int, int]:
        """Rows trained and dropped before the first one that is neither."""
        position = self._done.first_gap
        dropped = _num_rows(self._left.inside(0, position)) if self._left else 0
        return position - dropped, dropped

    @property
    def has_trained(self) -> bool:
        """Whether a row of it was trained."""
        return self._trained_rows > 0

    def claim(self, partition: int, owner: int) -> AcceptedRows:
        """Accept a partition's rows from this feeder only; return the rows accepted so far.

        Args:
            partition: partition of the feed.
            owner: number of the attempt that feeds it.
        """
        found = self._partitions.setdefault(partition, _Partition())
        found.owner = owner
        return found.accepted

    def accepted_of(self, partition: int) -> AcceptedRows:
        """Return the accepted rows of a claimed partition."""
        return self._partitions.get(partition, _Partition()).accepted

    def is_claimed_from(self, partition: int, owner: int) -> bool:
        """Return whether another feeder than `owner` has claimed the partition.

        Args:
            partition: number of the partition.
            owner: number of the attempt that feeds it.
        """
        found = self._partitions.get(partition)
        return found is not None and found.owner != owner

    def accept(self, partition: int, first_row: int, num_rows: int) -> int:
        """Count rows as accepted; return the position of the first row.

        Args:
            partition: partition of the rows.
            first_row: in the partition.
            num_rows: consecutive rows.
        """
        position = self.accepted_rows
        self.accepted_rows += num_rows
        claimed = self._partitions.get(partition)
        if claimed is not None:
            claimed.accepted.add(first_row, num_rows, position)
        return position

    def hand(self, piece: RowSpan) -> int:
        """Count rows as given to the trainer; return how many before them were left.

        A reader gives its rows in order, so those between belong to another reader.
        """
        start, left = self._handed_to, max(0, piece.start - self._handed_to)
        if left:
            self._left.add(start, piece.start)
            self._done.add(start, piece.start)
            self.dropped_rows += left
        self._handed_to = max(start, piece.stop)
        self._at_trainer += piece.num_rows - _num_rows(self._left.inside(piece.start, piece.stop))
        return left

    def train(self, piece: RowSpan) -> int:
        """Count rows as trained; return how many of them had been dropped."""
        back = _num_rows(self._left.inside(piece.start, piece.stop)) if self._left else 0
        if back:
            self._left = self._left.without(piece.start, piece.stop)
            self.dropped_rows -= back
        self._at_trainer -= piece.num_rows - back
        self._trained_rows += piece.num_rows
        self._done.add(piece.start, piece.stop)
        return back

    def drop_claims(self) -> None:
        """Drop the claims: the epoch's end was read, so every later chunk is refused."""
        self._partitions.clear()

    def close(self) -> int:
        """Drop the rows that the trainer will not get; return their number."""
        left = self.in_flight_rows - self._at_trainer
        self._left.add(self._handed_to, self.accepted_rows)
        self._handed_to = self.accepted_rows
        self.dropped_rows += left
        return left


def _num_rows(spans: list[Span]) -> int:
    return sum(stop - start for start, stop in spans)
