"""Parquet source: Parquet files as columns.

Covers: ParquetSource.
Does not: batch or shuffle (reading.reader), decode (row_groups), choose columns (plan).
Threads: one reader.
Memory: the needed columns of two row groups as they are stored; 8 MiB decoded.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from feeding.arrow.columns import BadValue, one_line
from feeding.columnar.ops import Columns
from feeding.columnar.schema import Schema
from feeding.config import MIB
from feeding.errors import DataError
from feeding.filesystem.interface import Path, RangeReader
from feeding.formats.parquet.footer import (
    ColumnChunk,
    Footer,
    FooterCache,
    ParquetLimits,
    read_footers,
)
from feeding.formats.parquet.plan import ParquetPlan, ParquetRequest
from feeding.formats.parquet.row_groups import Fetched, RowGroupReader
from feeding.reading.bad_records import BadData
from feeding.reading.discover import data_files
from feeding.reading.listed import open_listed
from feeding.reading.partitions import partition_columns
from feeding.reading.splits import SourceFile, Split

_BATCH_BYTES = 8 * MIB
"""Bytes decoded at a time. Fewer rows cost more each, and more batches have to be joined. The size
is independent of the reader's batch size, so a position in a damaged row group stays the same."""
_MAX_BATCH_ROWS = 32_768
_SAMPLE_ROWS = 256
_SAMPLE_BYTES = 16 * MIB


class ParquetSource:
    """See reading.runs.Source. Reads and compares the footers of all files at construction.

    Args:
        paths: files, directories or patterns.
        request: columns, filters, shapes and nulls.
        bad: policy for damaged files and row groups.
        limits: bound footers, row groups and pages.

    Raises:
        FileNotFoundError: a path has no file.
        DataError: a file is damaged, or its columns differ from the first file's.
        FeedSettingsError: the request cannot work.
        MissingPackage: pyarrow is too old.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        request: ParquetRequest | None = None,
        *,
        bad: BadData | None = None,
        limits: ParquetLimits | None = None,
    ) -> None:
        self._bad = bad or BadData()
        self._limits = limits or ParquetLimits()
        self._footers = FooterCache(self._limits)
        listed = data_files(paths, is_splittable=bool)
        asked = request or ParquetRequest()
        partitions = partition_columns(listed) if asked.partitions else {}
        plan: ParquetPlan | None = None
        unfit: DataError | None = None
        files: list[SourceFile] = []
        for file, footer in read_footers(listed, self._footers, self._bad):
            try:
                plan = plan or ParquetPlan(asked, footer, partitions)
                plan.check(footer)
            except DataError as error:
                unfit = unfit or error
                self._bad.skip(file.path, 0, error)
                continue
            rows, held = self._wanted(plan, footer)
            files.append(
                dataclasses.replace(file, piece_rows=rows, held_bytes=held, choice=plan.choice)
            )
        if plan is None:
            others = f"{len(listed) - 1} other files"
            raise unfit or DataError(f"{listed[0].path} and {others}: none can be read")
        self._files = tuple(files)
        self._by_path = {file.path: file for file in files}
        self._plan = plan
        plan.settle(self._sample())

    @property
    def schema(self) -> Schema:
        """See reading.runs.Source."""
        return self._plan.schema

    @property
    def num_skipped(self) -> int:
        """Damaged files and row groups that were skipped so far."""
        return self._bad.num_skipped

    def files(self) -> Sequence[SourceFile]:
        """See reading.runs.Source; pieces are row groups."""
        return self._files

    def read(self, split: Split) -> Iterator[Columns]:
        """See reading.runs.Source. The call starts to fetch the row group."""
        try:
            opened = open_listed(self._by_path[split.path])
            reader = self._reader(opened, self._plan.paths)
            return self._rows(opened, reader, reader.fetch(split.piece or 0), split)
        except (DataError, OSError) as error:
            return self._failed(split, error)

    def _failed(self, split: Split, error: DataError | OSError) -> Iterator[Columns]:
        """Raise the error of `read` at the first row, or skip the split."""
        if not isinstance(error, DataError):
            raise error
        self._skip(split.path, split.piece or 0, error)
        yield from ()

    def _rows(
        self, opened: RangeReader, reader: RowGroupReader, fetched: Fetched, split: Split
    ) -> Iterator[Columns]:
        at, group = 0, fetched.group
        group_rows = (self._by_path[split.path].piece_rows or ())[group]
        with opened:
            try:
                for batch in reader.batches(fetched, _batch_rows(fetched, group_rows)):
                    first, at = at, at + batch.num_rows
                    if at > split.start:
                        mine = batch[max(split.start - first, 0) : split.stop - first]
                        yield from self._columns(mine, split.path, group, max(first, split.start))
                    if at >= split.stop:
                        return
            except DataError as error:
                self._skip(split.path, group, error)
                return
            missing = f"it has {at} rows, its footer says {split.stop} or more"
            self._skip(split.path, group, DataError(f"{split.path}: row group {group}: {missing}"))

    def _columns(
        self, batch: pa.RecordBatch, path: str, group: int, first: int
    ) -> Iterator[Columns]:
        try:
            rows, most = self._plan.wanted(batch, path), self._limits.max_row_group_bytes
            for part in self._plan.parts(rows, _BATCH_BYTES, most):
                yield self._plan.columns(part, path)
                first += part.num_rows
        except BadValue as error:
            row = "" if self._plan.has_filter else f", row {first + error.row}"
            raise DataError(f"{path}: row group {group}{row}: {error}") from None
        except (pa.ArrowException, ValueError) as error:
            raise DataError(f"{path}: row group {group}: {one_line(error)}") from None

    def _skip(self, path: str, group: int, error: DataError) -> None:
        """Skip the rest of a row group, or raise; place 0 means the whole file."""
        self._bad.skip(path, group + 1, error)

    def _reader(self, opened: RangeReader, paths: Sequence[str]) -> RowGroupReader:
        return RowGroupReader(opened, self._footers.footer(opened), paths, self._limits)

    def _wanted(self, plan: ParquetPlan, footer: Footer) -> tuple[tuple[int, ...], int]:
        """Return the rows of each row group, 0 for those that are not read, and their most bytes.

        The bytes are what reading a row group holds: its columns as stored, and one batch.
        """
        rows, held = list(footer.group_rows), 0
        leaves = footer.leaves(plan.paths)
        groups = plan.groups(footer)
        for group in range(len(rows)):
            if group not in groups:
                rows[group] = 0
            if not rows[group]:
                continue
            try:
                chunks = footer.chunks(group, leaves, self._limits)
                if not plan.has_filter:
                    footer.check_nulls(group, plan.dense)
            except DataError as error:
                self._skip(footer.path, group, error)
                rows[group] = 0
                continue
            stored = sum(chunk.stop - chunk.start for chunk in chunks)
            # Sparse vectors say nothing of their bytes as dense ones.
            decoded = _BATCH_BYTES if plan.vectors else min(_decoded_bytes(chunks), _BATCH_BYTES)
            held = max(held, stored + decoded)
        return tuple(rows), held

    def _sample(self) -> pa.RecordBatch | None:
        """Return the first rows of the list columns that may have rows of one length."""
        columns = self._plan.to_sample
        if not columns:
            return None
        groups = (
            (file, group)
            for file in self._files
            for group, num_rows in enumerate(file.piece_rows or ())
            if num_rows
        )
        for file, group in groups:
            with open_listed(file) as opened:
                reader = self._reader(opened, [column.name for column in columns])
                fetched = reader.fetch(group)
                stored = sum(chunk.stop - chunk.start for chunk in fetched.chunks)
                if stored > _SAMPLE_BYTES and not any(column.is_vector for column in columns):
                    return None
                with contextlib.suppress(DataError):  # reading the row group raises it
                    return next(reader.batches(fetched, _SAMPLE_ROWS), None)
        return None


def _batch_rows(fetched: Fetched, group_rows: int) -> int:
    """Return the rows to decode at a time: a power of 2, as most batch sizes are."""
    most_rows = _BATCH_BYTES * group_rows // max(1, _decoded_bytes(fetched.chunks))
    return min(1 << max(0, most_rows.bit_length() - 1), _MAX_BATCH_ROWS)


def _decoded_bytes(chunks: Iterable[ColumnChunk]) -> int:
    return sum(max(each.uncompressed_bytes, each.decoded_bytes) for each in chunks)
