"""`ctx.read.….dataset(batch_size)`: rows of files for `model.fit`, and where they are in the files.

Covers: what is noted of the position with each push.
Does not: read ahead or hand out batches (dataset), read files (feeding), push (exchange).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

from typing import Any

from feeding.reading.positions import Position
from feeding.reading.reader import DirectReader
from feeding.receiver.feed_queue import EpochEnd
from tfos.keras.data.dataset import BatchDataset, Ready


class FileDataset(BatchDataset):
    """One worker's share of some files.

    Args:
        reader: gives the batches.
        batch_size: as for BatchDataset, and so are the options.
        note: under which name the position is kept with the parameters; empty: it is not.
        first_notes: what the chief keeps beside it, by name.
        options: as for BatchDataset.
    """

    def __init__(
        self,
        reader: DirectReader,
        batch_size: int,
        *,
        note: str = "",
        first_notes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(reader, batch_size, **options)
        self._reader = reader
        self._note = note
        self._first_notes = first_notes or {}
        self._position: Position = reader.position
        self.first_epoch = self._position.place.epoch

    def place(self) -> tuple[str, Any] | None:
        """Return a note of where the rows are after the last batch that was handed out."""
        return (self._note, self._position) if self._note else None

    def first_notes(self) -> dict[str, Any]:
        """Return what the chief notes before the first push."""
        return self._first_notes

    def _hand(self, ready: Ready) -> None:
        if ready.position is not None:
            self._position = ready.position

    def _came_back(self, end: EpochEnd | None = None) -> None:
        if end is not None:
            self._position = self._reader.position  # nobody reads on before the next epoch begins
