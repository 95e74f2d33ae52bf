"""Protocol of the worker's context that reading uses (tfos.worker.context).

Covers: the protocol alone.      Does not: implement anything.
"""

from __future__ import annotations

from typing import Any, Protocol

from tfos.keras.protocols import RowsContext


class ReadingContext(Protocol):
    """The part of `NodeContext` that this package uses."""

    rank: int
    num_workers: int
    is_chief: bool

    def ps_client(self) -> Any:
        """The process's `PSClient`."""

    def absolute_path(self, path: str) -> str:
        """Return the path as every node of the cluster resolves it."""


class DatasetContext(ReadingContext, RowsContext, Protocol):
    """The part of `NodeContext` that datasets of files use."""
