"""Reader for Spark: which task gets which bytes, and records as Arrow batches.

Covers: RecordFilesReader, and which files each partition has.
Does not: list files (tfos.datasource.listing), decode records (feeding.formats.tfrecord.to_arrow).
Runs in: `partitions` on the driver's host, `read` on executors.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from feeding.config import MIB
from feeding.errors import DataError
from feeding.reading.partition_paths import NULL_NAME, partition_value
from feeding.reading.splits import SourceFile, Split
from tfos.datasource.columns import arrow_schema, check_schema, without
from tfos.datasource.listing import Listing, list_files
from tfos.datasource.options import TFRecordOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from feeding.formats.tfrecord.framing import RecordBlock
    from feeding.reading.bad_records import BadData

_OPEN_BYTES = 4 * MIB
"""Cost of opening a file, in bytes that could be read instead; Spark's own estimate."""
_BLOCK_BYTES = 2 * MIB
"""Size of one block of a file, and so of an Arrow batch for Spark."""


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of one file, and the values of its directories in the schema's order."""

    split: Split
    file: SourceFile
    """The whole file when it was listed."""
    values: tuple[Any, ...]


class RecordFilesReader(DataSourceReader):  # type: ignore[misc]  # pyspark is untyped
    """See pyspark's DataSourceReader.

    Args:
        schema: the schema that Spark expects, partition columns included.
        options: options of the read, with the paths.
    """

    def __init__(self, schema: StructType, options: TFRecordOptions) -> None:
        listing = list_files(options, may_be_empty=True)
        self._options = options
        self._schema = schema
        self._apart = _of_directories(schema.names, listing.kinds)
        self._data = without(schema, tuple(self._apart))
        check_schema(self._data, options.record_type)
        self._planned = self._plan(listing)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planned": []}  # no task needs the other tasks' files

    def partitions(self) -> list[InputPartition]:
        """Return about equal parts of the files' bytes."""
        return self._planned

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a partition, some at a time.

        Raises:
            DataError: a record is damaged or does not fit the schema; names file, record and byte.
        """
        import pyarrow as pa

        from feeding.formats.tfrecord.framing import RecordLimits
        from feeding.formats.tfrecord.records import opened_records

        limits = RecordLimits(block_bytes=_BLOCK_BYTES)
        schema = arrow_schema(self._schema)
        decode = _decoder(arrow_schema(self._data), self._options)
        bad = self._options.bad_data()
        for part in partition.value or ():
            with opened_records(part.split, part.file, bad, limits) as reader:
                for block in reader.blocks():
                    num_rows, arrays = decode(block, part.split.path, bad)
                    columns = dict(zip(self._data.names, arrays, strict=True))
                    for name, value in zip(self._apart, part.values, strict=True):
                        kind = schema.field(name).type
                        columns[name] = pa.repeat(pa.scalar(value, kind), num_rows)
                    if num_rows:
                        in_order = [columns[name] for name in self._schema.names]
                        yield pa.RecordBatch.from_arrays(in_order, schema=schema)

    def _plan(self, listing: Listing) -> list[InputPartition]:
        ranges = [
            FileRange(
                split,
                # Each host may have a copy of its own of a file without a scheme.
                file if "://" in file.path else replace(file, version=""),
                tuple(
                    self._value(name, said[directory], file.path)
                    for name, directory in self._apart.items()
                ),
            )
            for file, said in zip(listing.files, listing.values, strict=True)
            for split in split_file(file, self._options.partition_bytes)
        ]
        return [InputPartition(tuple(part)) for part in pack(ranges, self._options.partition_bytes)]

    def _value(self, name: str, said: str | None, path: str) -> Any:
        field = self._schema[name]
        if said is None and not field.nullable:
            raise DataError(
                f"{path} is in the directory {name}={NULL_NAME}, which means null, but the schema "
                f"says that {name!r} is never null"
            )
        return partition_value(name, said, field.dataType.simpleString())


def _of_directories(names: Sequence[str], directories: Collection[str]) -> dict[str, str]:
    """Return the columns of a schema that directories hold, each with the directories' name.

    Names match without regard to case, as in Spark's own sources. If the schema has several such
    names, only the directory's own spelling is its column; the others are columns of the records.
    """
    spelt = Counter(name.lower() for name in names)
    by_lower = {name.lower(): name for name in directories if spelt[name.lower()] == 1}
    found = {
        name: name if name in directories else by_lower.get(name.lower(), "") for name in names
    }
    return {name: directory for name, directory in found.items() if directory}


def split_file(file: SourceFile, partition_bytes: int) -> list[Split]:
    """Return about equal ranges of a file, each at most that large; one range if it is gzip.

    Args:
        file: path and size.
        partition_bytes: largest range, in bytes.
    """
    size = file.size_bytes
    count = -(-size // partition_bytes) if file.is_splittable else 1
    bounds = [size * number // count for number in range(count + 1)] if size else []
    return [Split(file.path, start, stop) for start, stop in itertools.pairwise(bounds)]


def pack(ranges: Sequence[FileRange], partition_bytes: int) -> list[list[FileRange]]:
    """Put small ranges together, the largest first, up to the size of a partition.

    Args:
        ranges: the ranges of all files.
        partition_bytes: size of a partition, in bytes.
    """
    parts: list[list[FileRange]] = []
    room = 0
    for each in sorted(ranges, key=lambda each: -each.split.size):
        if not parts or each.split.size > room:
            parts.append([])
            room = partition_bytes
        parts[-1].append(each)
        room -= each.split.size + _OPEN_BYTES
    return [sorted(part, key=lambda each: each.split) for part in parts]


def _decoder(schema: pa.Schema, options: TFRecordOptions) -> Any:
    from feeding.formats.tfrecord.to_arrow import ArrowDecoder, records_as_binary

    if options.record_type == "ByteArray":

        def whole(block: RecordBlock, _file: str, _bad: BadData) -> tuple[int, list[pa.Array]]:
            return len(block), [records_as_binary(block)]

        return whole
    return ArrowDecoder(schema).decode
