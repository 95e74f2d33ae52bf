"""What a worker knows of the rows of one epoch: accepted, at the trainer, trained, dropped.

Covers: EpochRows; what counts as trained.      Does not: hold rows (feed_queue).      Pure.

A row is *trained* once the trainer, which was handed the batch that holds it, has come back: it
asked for the next batch, and (tfos.keras) the servers have acknowledged the push. At every moment
    accepted = trained + in flight + dropped,
in flight being the rows that are unread, read ahead, or at the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from feeding.protocol.row_ranges import AcceptedRows, RowRanges

INFERENCE = -1
"""Stands for the epoch of rows that are answered, not trained."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of a batch: positions `start` to `stop` of an epoch."""

    epoch: int
    start: int
    stop: int

    @property
    def num_rows(self) -> int:
        """How many they are."""
        return self.stop - self.start


Receipt = tuple[RowSpan, ...]
"""Which rows a batch holds."""


@dataclass(frozen=True, slots=True)
class EpochStats:
    """Counts of one epoch in one worker."""

    epoch: int
    accepted_rows: int
    trained_rows: int
    """All rows before this position were trained."""


@dataclass(slots=True)
class _Partition:
    """A partition that is fed exactly once."""

    owner: int = 0
    accepted: AcceptedRows = field(default_factory=AcceptedRows)


class EpochRows:
    """Rows of one epoch, by position: their number in the order of acceptance."""

    def __init__(self) -> None:
        self.accepted_rows = 0
        self.dropped_rows = 0
        self.trained = RowRanges()
        self._handed = 0
        self._trained_rows = 0
        self._partitions: dict[int, _Partition] = {}

    @property
    def in_flight_rows(self) -> int:
        """Rows that are neither trained nor dropped."""
        return self.accepted_rows - self._trained_rows - self.dropped_rows

    def claim(self, partition: int, owner: int) -> AcceptedRows:
        """Take a partition's rows from this feeder only; return what was accepted of it before."""
        found = self._partitions.setdefault(partition, _Partition())
        found.owner = owner
        return found.accepted

    def accepted_of(self, partition: int) -> AcceptedRows:
        """Return what was accepted of a partition that some feeder claimed."""
        return self._partitions.get(partition, _Partition()).accepted

    def is_claimed_from(self, partition: int, owner: int) -> bool:
        """Whether another feeder has claimed this partition."""
        found = self._partitions.get(partition)
        return found is not None and found.owner != owner

    def accept(self, partition: int, first_row: int, num_rows: int) -> int:
        """Count rows as accepted; return the position of the first."""
        position = self.accepted_rows
        self.accepted_rows += num_rows
        claimed = self._partitions.get(partition)
        if claimed is not None:
            claimed.accepted.add(first_row, num_rows, position)
        return position

    def hand(self, piece: RowSpan) -> None:
        """The trainer has these rows."""
        self._handed += piece.num_rows

    def train(self, piece: RowSpan) -> None:
        """The trainer has come back from these rows."""
        self._handed -= piece.num_rows
        self._trained_rows += piece.num_rows
        self.trained.add(piece.start, piece.stop)

    def forget_partitions(self) -> None:
        """The epoch's end was read: chunks are refused, whoever feeds them."""
        self._partitions.clear()

    def close(self) -> int:
        """Nobody will hand out what is left: drop it and return how many rows that is."""
        left = self.in_flight_rows - self._handed
        self.dropped_rows += left
        return left
