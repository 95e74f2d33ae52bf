"""Feeding: records from Spark tasks or files to the workers, as columns.

Public names: DataFeed and Batch (what a worker reads), FeedConfig, filesystem_for, and the TFRecord
writers. They load on first use.

Packages, each importing from those before it only: columnar, filesystem; encode, protocol, reading;
arrow, receiver, formats.text, formats.tfrecord; sender, formats.csv, formats.parquet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from feeding import errors as errors
    from feeding.columnar.batch import Batch, Ragged
    from feeding.config import FeedConfig
    from feeding.errors import FeedError
    from feeding.filesystem.registry import filesystem_for
    from feeding.formats.tfrecord.example import Feature
    from feeding.formats.tfrecord.framing import RecordWriter
    from feeding.formats.tfrecord.from_rows import encode_example
    from feeding.receiver.data_feed import DataFeed

_PART_OF = "tfos"  # tfos/import_check.py looks for this line

__all__ = [
    "Batch",
    "DataFeed",
    "Feature",
    "FeedConfig",
    "FeedError",
    "Ragged",
    "RecordWriter",
    "encode_example",
    "errors",
    "filesystem_for",
]

_HOMES = {
    "Batch": "feeding.columnar.batch",
    "DataFeed": "feeding.receiver.data_feed",
    "Feature": "feeding.formats.tfrecord.example",
    "FeedConfig": "feeding.config",
    "FeedError": "feeding.errors",
    "Ragged": "feeding.columnar.batch",
    "RecordWriter": "feeding.formats.tfrecord.framing",
    "encode_example": "feeding.formats.tfrecord.from_rows",
    "filesystem_for": "feeding.filesystem.registry",
}
_MODULES = {
    "errors": "feeding.errors",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
