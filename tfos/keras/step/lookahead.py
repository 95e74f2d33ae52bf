"""Lookahead: the next batches of an epoch, as far as they are available before their turn.

Covers: reading ahead of an iterator that Keras gives, in the thread that trains.
Does not: prepare batches (tfos.keras.step.tables), wait for a feed that is slow.
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tfos.keras.data import tensors
from tfos.keras.data.dataset import LoopBatches
from tfos.keras.embedding.batch_rows import BatchRows


@dataclass(slots=True)
class TrainingData:
    """One batch, as nested tensors."""

    values: Any
    rows: BatchRows | None = None
    """Rows that were prepared for the batch."""


class Lookahead:
    """The batches of one iterator.

    Args:
        iterator: iterator that Keras passes to the train function.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self.iterator = iterator
        self._read: deque[TrainingData] = deque()
        self._end: BaseException | None = None

    def take(self) -> TrainingData:
        """Return the next batch; raise what the iterator raises at its end."""
        if not self._read and self._end is not None:
            raise self._end
        if isinstance(self.iterator, LoopBatches):
            return self._taken_from_dataset(next(self.iterator))
        if self._read:
            return self._read.popleft()
        return TrainingData(tensors.to_tensors(next(self.iterator)))

    def set_back(self, drop: Callable[[BatchRows], None]) -> None:
        """Give back what was prepared for the batches that were read.

        Args:
            drop: function called with the rows of each.
        """
        for each in self._read:
            if each.rows is not None:
                drop(each.rows)

    def peek(self, place: int) -> TrainingData | None:
        """Return the batch `place` batches after the next one; None: it is not known yet.

        An error of the iterator is raised when that batch is taken.
        """
        while len(self._read) <= place:
            values = self._next_value(len(self._read))
            if values is None:
                return None
            self._read.append(TrainingData(values))
        return self._read[place]

    def _next_value(self, place: int) -> Any:
        if self._end is not None:
            return None
        try:
            if isinstance(self.iterator, LoopBatches):  # waits for nothing, and stays its owner
                return self.iterator.upcoming(place)
            return tensors.to_tensors(next(self.iterator))
        except Exception as end:  # noqa: BLE001 - the end, or an error; raised by `take`
            self._end = end
            return None

    def _taken_from_dataset(self, values: Any) -> TrainingData:
        if self._read and self._read[0].values is values:
            return self._read.popleft()
        self._read.clear()  # another reader has taken batches meanwhile
        return TrainingData(values)
