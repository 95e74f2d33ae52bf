"""Data positions: a worker's position in its files, pushed with each step and saved in checkpoints.

Covers: the metadata attached to a push, the one at the end of an epoch.
Does not: find the position (tfos.keras.data.file_dataset), keep metadata (ps.metadata).
Threads: the thread that runs `fit`.
"""

from __future__ import annotations

from typing import Any

from ps import metadata
from tfos.keras.data.dataset import BatchDataset
from tfos.keras.protocols import WorkerContext


class DataPositions:
    """The metadata of one model's training.

    Args:
        ctx: the node's context.
        client: client of the servers that keep the metadata.
    """

    def __init__(self, ctx: WorkerContext, client: Any) -> None:
        self._ctx = ctx
        self._client = client
        self._dataset: BatchDataset | None = None
        self._first: dict[str, Any] = {}

    def follow(self, dataset: BatchDataset) -> None:
        """Record the position of these rows from now on."""
        self._dataset = dataset
        self._first = dict(dataset.first_metadata()) if self._ctx.is_chief else {}

    def forget(self) -> None:
        """Record no more positions, and release the rows."""
        self._dataset, self._first = None, {}

    def for_push(self) -> metadata.AttachedMetadata | None:
        """Return the metadata for the push of the last batch, or None without resumable rows."""
        place = None if self._dataset is None else self._dataset.place()
        if place is None:
            return None
        self._note_first()
        return metadata.pushed(*place)

    def at_end(self) -> None:
        """Record the end of an epoch, also for a worker that has pushed nothing in it."""
        place = None if self._dataset is None else self._dataset.place()
        if place is not None:
            self._note_first()
            self._client.set_metadata(*place)

    def _note_first(self) -> None:
        while self._first:
            self._client.set_metadata(*self._first.popitem(), of_run=True)
