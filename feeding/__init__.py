"""Feeding: records from Spark tasks or files to the workers, as columns.

Public names: DataFeed and Batch (what a worker reads), FeedConfig, filesystem_for, the TFRecord
writers, the limits of file formats. They load on first use.

Packages, each importing from those before it only: columnar, filesystem; encode, protocol, reading;
arrow, receiver, formats.text, formats.tfrecord; sender, formats.csv, formats.parquet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpc.lazy import lazy_names

if TYPE_CHECKING:
    from feeding import errors as errors
    from feeding.columnar.batch import Batch, Ragged
    from feeding.columnar.schema import ColumnGroup, ColumnSpec, Schema
    from feeding.config import FeedConfig
    from feeding.errors import FeedError
    from feeding.filesystem.config import FileSystemConfig
    from feeding.filesystem.interface import FileStatus, FileSystem, RangeReader
    from feeding.filesystem.registry import filesystem_for
    from feeding.formats.parquet.footer import ParquetLimits
    from feeding.formats.text.lines import LineLimits
    from feeding.formats.tfrecord.example import Feature
    from feeding.formats.tfrecord.framing import RecordLimits, RecordWriter
    from feeding.formats.tfrecord.from_rows import encode_example
    from feeding.receiver.data_feed import DataFeed

_PART_OF = "tfos"  # tfos/import_check.py looks for this line

__all__ = [
    "Batch",
    "ColumnGroup",
    "ColumnSpec",
    "DataFeed",
    "Feature",
    "FeedConfig",
    "FeedError",
    "FileStatus",
    "FileSystem",
    "FileSystemConfig",
    "LineLimits",
    "ParquetLimits",
    "Ragged",
    "RangeReader",
    "RecordLimits",
    "RecordWriter",
    "Schema",
    "encode_example",
    "errors",
    "filesystem_for",
]

_HOMES = {
    "Batch": "feeding.columnar.batch",
    "ColumnGroup": "feeding.columnar.schema",
    "ColumnSpec": "feeding.columnar.schema",
    "DataFeed": "feeding.receiver.data_feed",
    "Feature": "feeding.formats.tfrecord.example",
    "FeedConfig": "feeding.config",
    "FeedError": "feeding.errors",
    "FileStatus": "feeding.filesystem.interface",
    "FileSystem": "feeding.filesystem.interface",
    "FileSystemConfig": "feeding.filesystem.config",
    "LineLimits": "feeding.formats.text.lines",
    "ParquetLimits": "feeding.formats.parquet.footer",
    "Ragged": "feeding.columnar.batch",
    "RangeReader": "feeding.filesystem.interface",
    "RecordLimits": "feeding.formats.tfrecord.framing",
    "RecordWriter": "feeding.formats.tfrecord.framing",
    "Schema": "feeding.columnar.schema",
    "encode_example": "feeding.formats.tfrecord.from_rows",
    "errors": "feeding.errors:",
    "filesystem_for": "feeding.filesystem.registry",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
