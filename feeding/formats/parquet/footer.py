"""Parquet footers: read, bounded and made safe before pyarrow parses them; cached for a data set.

Covers: Footer, ParquetLimits, the byte ranges of a row group's columns; read_footers (many files at
a time), FooterCache.
Does not: read pages (row_groups), choose columns (plan).
Threads: any; read_footers reads on threads of its own, which end with the call.

A writer may leave an Arrow schema in the footer, and pyarrow passes extension types of that schema
to code that registered them (CVE-2023-47248, CVE-2026-41486). So that schema is hidden from
pyarrow: Parquet's own types decide, and an extension is read as its storage type.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import re
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from feeding.arrow.columns import one_line, owner_of
from feeding.config import MIB, check_count
from feeding.errors import DataError
from feeding.filesystem.interface import RangeReader
from feeding.filesystem.ordered_reads import AheadLimits, read_in_order
from feeding.formats.parquet.column_metadata import check_column_metadata
from feeding.reading.bad_records import BadData
from feeding.reading.listed import open_listed
from feeding.reading.splits import SourceFile
from rpc.field_texts import with_field_texts

_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_ENDING_BYTES = 8
_FIRST_TRY_BYTES = 64 << 10
"""Most footers are shorter: one request is enough."""
_ARROW_SCHEMA, _UNUSED = b"ARROW:schema", b"arrow_schema"
_PADDING_BYTES = 128
"""Old writers leave a dictionary's header out of a column's size (PARQUET-816)."""
_VALUE_BYTES = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_TEXT_BYTES = 4
_SPARK_VERSION = b"org.apache.spark.version"
_SPARK_SCHEMA = b"org.apache.spark.sql.parquet.row.metadata"
_RELEASE = re.compile(rb"(\d+)\.(\d+)")
_JULIAN = {
    "INT32": (b"org.apache.spark.legacyDateTime", (3, 0)),
    "INT64": (b"org.apache.spark.legacyDateTime", (3, 0)),
    "INT96": (b"org.apache.spark.legacyINT96", (3, 1)),
}
"""By physical type: what Spark notes in a file that it wrote by the Julian calendar, and the first
release that writes none without a note."""
_LEVEL_BYTES = 4
"""Repetition and definition level of a value of a list, as pyarrow decodes them."""


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetLimits:
    """Bounds of what a file makes its reader allocate."""

    max_footer_bytes: int = 64 * MIB
    """Larger footers are refused before they are read."""
    max_row_group_bytes: int = 2048 * MIB
    """Uncompressed bytes of the requested columns of a row group. Two row groups are in memory as
    they are stored; a smaller limit bounds that. It also bounds what their smallest batch decodes
    to: one row, of a list column all values of the row group, because one row may hold them; and
    a sparse vector as the dense one that it becomes."""
    max_page_bytes: int = 256 * MIB
    """Uncompressed bytes of one page; usual pages have 1 MiB."""

    def __post_init__(self) -> None:
        for name in ("max_footer_bytes", "max_row_group_bytes", "max_page_bytes"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group: its byte range in the file, its size and values.

    Args:
        start: offset of its first page.
        stop: offset behind its last page.
        uncompressed_bytes: size of its pages before compression.
        num_values: with nulls.
        value_bytes: size of one decoded value; for text, of its offset.
        is_repeated: whether a row has any number of values.
    """

    start: int
    stop: int
    uncompressed_bytes: int
    num_values: int
    value_bytes: int
    is_repeated: bool

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all values in memory, without the letters of text."""
        return self.num_values * self.value_bytes

    @property
    def least_batch_bytes(self) -> int:
        """Bytes that its smallest batch may take: one row of a list may have all values."""
        if self.is_repeated:
            return self.decoded_bytes + self.num_values * _LEVEL_BYTES
        return self.value_bytes


@dataclass(frozen=True, slots=True)
class Footer:
    """The footer of one file.

    Args:
        path: path of the file.
        size_bytes: size of the whole file.
        tail: bytes from the footer to the end of the file, as pyarrow gets them.
        metadata: the same, parsed.
    """

    path: str
    size_bytes: int
    tail: bytes
    metadata: pq.FileMetaData

    @property
    def start(self) -> int:
        """Offset of the footer; all pages are before it."""
        return self.size_bytes - len(self.tail)

    @property
    def alone(self) -> bytes:
        """A Parquet file of this footer alone, without pages."""
        return _MAGIC + self.tail

    @property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of each row group."""
        found = self.metadata
        return tuple(found.row_group(n).num_rows for n in range(found.num_row_groups))

    @property
    def julian(self) -> frozenset[str]:
        """Physical types whose early dates and timestamps Spark wrote by the Julian calendar."""
        notes = self.metadata.metadata or {}
        found = {kind for kind, (note, _) in _JULIAN.items() if note in notes}
        version = _RELEASE.match(notes.get(_SPARK_VERSION, b""))
        if version is not None:
            release = (int(version[1]), int(version[2]))
            found |= {kind for kind, (_, fixed) in _JULIAN.items() if release < fixed}
        elif _SPARK_SCHEMA in notes:  # of a Spark 2 that noted no version
            found |= set(_JULIAN)
        return frozenset(found)

    def leaves(self, paths: Collection[str]) -> tuple[int, ...]:
        """Return the indexes of the leaf columns that make up the columns at `paths`."""
        return tuple(self.owners(paths))

    def owners(self, paths: Collection[str]) -> dict[int, str]:
        """Return by index of a leaf column which of the columns at `paths` it is a part of."""
        schema, columns = self.metadata.schema, frozenset(paths)
        found = ((leaf, owner_of(schema.column(leaf).path, columns)) for leaf in range(len(schema)))
        return {leaf: owner for leaf, owner in found if owner is not None}

    def kinds(self, paths: Collection[str]) -> dict[str, set[str]]:
        """Return the physical types of the leaf columns of each column at `paths`."""
        found: dict[str, set[str]] = {path: set() for path in paths}
        for leaf, owner in self.owners(paths).items():
            found[owner].add(self.metadata.schema.column(leaf).physical_type)
        return found

    def chunks(self, group: int, leaves: Sequence[int], limits: ParquetLimits) -> list[ColumnChunk]:
        """Return the byte ranges of a row group's columns.

        Args:
            group: index of the row group.
            leaves: indexes of leaf columns.
            limits: bound their size.

        Raises:
            DataError: a range is impossible, or the columns exceed the limits.
        """
        found = self.metadata.row_group(group)
        chunks = [self._chunk(group, found.column(leaf), leaf) for leaf in leaves]
        total = sum(chunk.uncompressed_bytes for chunk in chunks)
        if total > limits.max_row_group_bytes:
            raise DataError(
                f"{self.path}: row group {group}: the requested columns have {total} bytes before "
                f"compression, max_row_group_bytes is {limits.max_row_group_bytes}; ask for fewer "
                "columns, write smaller row groups or raise the limit"
            )
        least = sum(chunk.least_batch_bytes for chunk in chunks)
        if least > limits.max_row_group_bytes:
            largest = max(range(len(chunks)), key=lambda n: chunks[n].least_batch_bytes)
            chunk, name = chunks[largest], self.metadata.schema.column(leaves[largest]).path
            raise DataError(
                f"{self.path}: row group {group}: its smallest batch takes {least} bytes decoded, "
                f"most in column {name!r} with {chunk.num_values} values of {chunk.value_bytes} "
                f"bytes; max_row_group_bytes is {limits.max_row_group_bytes}; ask for fewer "
                "columns, write smaller row groups or raise the limit"
            )
        return chunks

    def check_nulls(self, group: int, names: Sequence[str]) -> None:
        """Refuse a row group whose statistics count nulls in a column.

        Args:
            group: index of the row group.
            names: names of the columns that must have none.

        Raises:
            DataError: names file, row group, column and number of nulls; or a name is damaged.
        """
        found = self.metadata.row_group(group)
        wanted = set(names)
        for leaf in self.leaves(wanted):
            column = found.column(leaf)
            name = self._path_of(group, column)
            if name not in wanted:
                continue  # `a.b` beside `a`
            statistics = column.statistics if column.is_stats_set else None
            if statistics is not None and statistics.has_null_count and statistics.null_count:
                raise DataError(
                    f"{self.path}: row group {group}: column {name!r} has "
                    f"{statistics.null_count} nulls; pass nulls={{{name!r}: value}} to replace "
                    "them, or filter such rows out"
                )

    def _path_of(self, group: int, column: Any) -> str:
        """Return a stored column's path: each row group repeats it, and pyarrow decodes it late."""
        try:
            return str(column.path_in_schema)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}: row group {group}: the name of a column is not text: {error}; the "
                "file is damaged"
            ) from None

    def _chunk(self, group: int, column: Any, leaf: int) -> ColumnChunk:
        start = column.data_page_offset
        if column.dictionary_page_offset is not None and 0 < column.dictionary_page_offset < start:
            start = column.dictionary_page_offset
        size, whole = column.total_compressed_size, column.total_uncompressed_size
        is_possible = size >= 0 and whole >= 0 and column.num_values >= 0
        if not (is_possible and len(_MAGIC) <= start <= start + size <= self.start):
            name = self._path_of(group, column)
            raise DataError(
                f"{self.path}: row group {group}: column {name!r} has {size} bytes at {start}, "
                f"but pages are between 4 and {self.start}; the file is damaged"
            )
        stop = min(start + size + _PADDING_BYTES, self.start)
        described = self.metadata.schema.column(leaf)
        kind = described.physical_type
        is_fixed = kind == "FIXED_LEN_BYTE_ARRAY"
        width = described.length if is_fixed else _VALUE_BYTES.get(kind, _TEXT_BYTES)
        is_repeated = described.max_repetition_level > 0
        return ColumnChunk(start, stop, whole, column.num_values, width, is_repeated)


def read_footer(file: RangeReader, limits: ParquetLimits, checked: set[int]) -> Footer:
    """Read the footer of an open file.

    Args:
        file: to read; stays open.
        limits: bound the footer's size.
        checked: hashes of footers whose columns were compared; gets this one's.

    Raises:
        DataError: it is not a whole Parquet file; names the file.
        OSError: the file cannot be read.
    """
    size = file.size_bytes
    if size < len(_MAGIC) + _ENDING_BYTES:
        raise DataError(f"{file.path} has {size} bytes: too few for a Parquet file")
    first = min(size, _FIRST_TRY_BYTES)
    tail = file.read_range(size - first, first)
    length = _footer_bytes(file.path, size, tail[-_ENDING_BYTES:], limits)
    whole = length + _ENDING_BYTES
    if whole > len(tail):
        missing = whole - len(tail)
        tail = file.read_range(size - whole, missing) + tail
    tail = tail[-whole:].replace(_ARROW_SCHEMA, _UNUSED)
    return Footer(file.path, size, tail, _parsed(file.path, tail, checked))


def _footer_bytes(path: str, size: int, ending: bytes, limits: ParquetLimits) -> int:
    length = int.from_bytes(ending[:4], "little")
    if ending[4:] == _ENCRYPTED:
        raise DataError(f"{path} is an encrypted Parquet file; write it without encryption")
    if ending[4:] != _MAGIC:
        raise DataError(
            f"{path} does not end like a Parquet file: its last 4 bytes are {ending[4:]!r}, not "
            f"{_MAGIC!r}; it is truncated or of another format"
        )
    if not 0 < length <= size - len(_MAGIC) - _ENDING_BYTES:
        raise DataError(f"{path} is damaged: a footer of {length} bytes in a file of {size}")
    if length > limits.max_footer_bytes:
        raise DataError(
            f"{path} has a footer of {length} bytes, max_footer_bytes is {limits.max_footer_bytes}"
        )
    return length


def _parsed(path: str, tail: bytes, checked: set[int]) -> pq.FileMetaData:
    try:
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + tail))
        groups = [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)]
        for n in range(len(metadata.schema)):
            _ = metadata.schema.column(n).path  # decoded when it is asked for
        if hash(tail) not in checked:  # slower than all else, of footers with many columns
            check_column_metadata(path, tail, metadata)
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(f"{path}: its footer is damaged: {one_line(error)}") from None
    if min(groups, default=0) < 0 or sum(groups) != metadata.num_rows:
        raise DataError(
            f"{path}: its footer is damaged: {metadata.num_rows} rows in row groups of {groups[:9]}"
        )
    checked.add(hash(tail))
    return metadata


_logger = logging.getLogger(__name__)
_AHEAD = AheadLimits(num_threads=16, num_files=32)
"""Files whose footers are read while the consumer is busy: a wide footer takes megabytes."""
_LOG_EACH = 1000
_CACHE_BYTES = 16 * MIB


class FooterCache:
    """LRU cache of footers, of 16 MiB: a file is opened once for each of its pieces.

    It knows also of the others that they are whole: one that is read again is not compared again.

    Args:
        limits: bound the size of a footer.
    """

    def __init__(self, limits: ParquetLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._held: collections.OrderedDict[str, Footer] = collections.OrderedDict()
        self._bytes = 0
        self._checked: set[int] = set()

    def footer(self, file: RangeReader) -> Footer:
        """Return the footer of an open file, from the cache or by read_footer."""
        with self._lock:
            if footer := self._held.get(file.path):
                self._held.move_to_end(file.path)
                return footer
        footer = read_footer(file, self._limits, self._checked)
        with self._lock:
            if file.path not in self._held:
                self._held[file.path] = footer
                self._bytes += len(footer.tail)
            while self._bytes > _CACHE_BYTES and len(self._held) > 1:
                self._bytes -= len(self._held.popitem(last=False)[1].tail)
        return footer


def read_footers(
    files: Sequence[SourceFile], cache: FooterCache, bad: BadData
) -> Iterator[tuple[SourceFile, Footer]]:
    """Yield the files with their footers, in order; the policy may skip damaged files.

    Args:
        files: files of the data set.
        cache: gets the footers.
        bad: policy for damaged files.

    Raises:
        DataError: a file is damaged, and the policy is to fail.
        OSError: a file cannot be read.
    """

    def read(file: SourceFile) -> Footer | DataError:
        with open_listed(file) as opened:
            try:
                return cache.footer(opened)
            except DataError as error:
                return error

    with contextlib.closing(read_in_order(read, files, _AHEAD)) as footers:
        for number, (file, footer) in enumerate(zip(files, footers, strict=True), 1):
            if isinstance(footer, Footer):
                yield file, footer
            else:
                bad.skip(file.path, 0, footer)
            if not number % _LOG_EACH:
                _logger.info("read the footers of %d of %d Parquet files", number, len(files))
