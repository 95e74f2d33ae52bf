"""CSV source: CSV files as columns, parsed by pyarrow.

Covers: CsvSource: names, types, selection, nulls.
Does not: batch or shuffle (reading.reader), find lines (formats.text.lines), assign files to
workers (reading.splits).
Threads: one reader; pyarrow converts columns on its own threads.
"""

from __future__ import annotations

import csv as csv_format
import dataclasses
import functools
import io
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from feeding.arrow.arrays import DTYPES, TEXTS
from feeding.arrow.columns import (
    BadValue,
    ColumnReader,
    StoredColumn,
    column_spec,
    held,
    one_line,
    refuse_more,
)
from feeding.columnar.ops import Columns
from feeding.columnar.schema import Schema
from feeding.errors import DataError, FeedSettingsError
from feeding.filesystem.interface import Path, RangeReader
from feeding.formats.csv.options import TYPES, CsvRequest
from feeding.formats.csv.quoted_rows import QuotedRowReader, QuotedRows
from feeding.formats.csv.quotes import Quotes
from feeding.formats.text.lines import LineBlock, LineLimits, LineReader
from feeding.formats.text.row_index import BOM, RowLines
from feeding.formats.text.source import LineSource
from feeding.reading.bad_records import BadData
from feeding.reading.partitions import refuse_both
from feeding.reading.row_counts import PieceRows
from feeding.reading.splits import Split

_EMPTY = {pa.lib.Type_STRING: "", pa.lib.Type_BINARY: b""}


class CsvSource(LineSource):
    """See reading.runs.Source.

    Args:
        paths: files, directories or patterns.
        request: columns and format.
        bad: policy for bad lines and damaged files.
        limits: bounds of lines and compression.
        partitions: whether `directories` has columns: all keys of directories, or those that the
            request names.

    Raises:
        FileNotFoundError: a path has no file.
        DataError: the first file has no such column, or nothing at all.
        FeedSettingsError: the request cannot work.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        request: CsvRequest | None = None,
        *,
        bad: BadData | None = None,
        limits: LineLimits | None = None,
        partitions: bool = False,
    ) -> None:
        request = request or CsvRequest()
        across_lines, has_header = request.quoted_newlines, request.header is True
        self._quotes = Quotes(request.delimiter, request.escape, across_lines)
        self._name_quotes = (
            Quotes(request.delimiter, request.escape, noun="name") if has_header else self._quotes
        )
        self._quoted = QuotedRows(self._quotes, has_header) if across_lines else None
        super().__init__(
            paths,
            bad=bad,
            limits=limits,
            can_split=not across_lines,
            lines=self._quoted or RowLines(blank=False, header=has_header),
            partitions=partitions,
        )
        if across_lines or not has_header:
            quoting = f" across lines {request.escape!r}" if across_lines else ""
            choice = f"header={has_header}{quoting}"
            self.listed = [dataclasses.replace(file, choice=choice) for file in self.listed]
        self._request = request = self._without_directories(request)
        self._format = pa_csv.ParseOptions(
            delimiter=request.delimiter, newlines_in_values=across_lines
        )
        self._headers: dict[str, list[str]] = {}
        self._distinct: dict[tuple[str, ...], list[str]] = {}
        """One list for all files of the same names: a list per file would fill memory."""
        self._first, types = self._found_types()
        self._readers = [
            ColumnReader(column, column_spec(column), self._fill(column))
            for column in (StoredColumn(name, kind, (name,)) for name, kind in types.items())
        ]
        for name in request.nulls:
            if name not in types:
                raise FeedSettingsError(f"nulls: {name!r} is not one of the columns {list(types)}")
        self._convert = pa_csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=[""],
            strings_can_be_null=any(types[name].id in TEXTS for name in request.nulls),
            check_utf8=True,
        )

    @property
    def schema(self) -> Schema:
        """See reading.runs.Source."""
        return Schema.of_dict(reader.spec for reader in self._readers)

    def read(self, split: Split) -> Iterator[Columns]:
        """See reading.runs.Source."""
        if (names := self._names_to_read(split.path)) is None:
            return
        yield from self.rows(split, functools.partial(self._parse, names))

    def count(self, piece: Split) -> int:
        """See reading.row_counts.Countable."""
        if self._names_to_read(piece.path) is None:
            return 0
        return super().count(piece)

    def blocks(
        self,
        file: RangeReader,
        span: tuple[int, int | None] = (0, None),
        ahead_until: int | None = None,
    ) -> LineReader:
        """See LineSource."""
        if self._quoted is None:
            return super().blocks(file, span, ahead_until)
        stream = self.stream(file, ahead_until=ahead_until)
        return QuotedRowReader(stream, file.path, self._quoted, self._limits)

    def read_rows(self, wanted: PieceRows) -> Iterator[Columns]:
        """See reading.row_counts.Countable."""
        if (names := self._names_to_read(wanted.piece.path)) is None:
            return
        yield from self.rows_of(wanted, functools.partial(self._parse, names))

    def _names_to_read(self, path: str) -> list[str] | None:
        """Return the names of a file's columns; None: the file is skipped."""
        try:
            names = self._names(path)
            self._refuse_keys(names, path)
            self._check_names(names, path)
        except DataError as error:
            self.bad.skip(path, 0, error)
            return None
        return names

    def _parse(self, names: list[str], block: LineBlock) -> Columns:
        data = block.data
        if block.first_byte == 0:
            data = data.removeprefix(BOM)
            if self._request.header is True:
                data = data[_header_bytes(data) :]
        if not data.strip(b"\r\n"):
            return self._no_rows()
        data = self._quotes.doubled(data)
        table = self._table(data, names, self._convert)
        self._check_infinities(table, data, names)
        if not table.num_rows:
            return self._no_rows()
        batch = table.combine_chunks().to_batches()[0]
        try:
            return tuple(reader(batch) for reader in self._readers)
        except (BadValue, pa.ArrowException, ValueError) as error:
            raise DataError(str(error)) from None

    def _check_infinities(self, table: pa.Table, data: bytes, names: list[str]) -> None:
        """Refuse numbers that became infinite; pyarrow says nothing of them."""
        for field, values in zip(table.schema, table.columns, strict=True):
            if not pa.types.is_floating(field.type) or not pc.any(pc.is_inf(values)).as_py():
                continue
            dtype, wider = ("float64", "str")
            if field.type == pa.float32():
                dtype, wider = ("float32", "float64")
            texts = self._texts(data, names, field.name)
            for text in texts.filter(pc.is_inf(values)).to_pylist():
                if "inf" not in text.lower():
                    raise DataError(
                        f"column {field.name!r} has {text}, which {dtype} cannot hold; name it "
                        f"{wider}"
                    )

    def _texts(self, data: bytes, names: list[str], name: str) -> pa.ChunkedArray:
        """Return a column's values as they are written."""
        options = pa_csv.ConvertOptions(
            column_types={name: pa.string()},
            include_columns=[name],
            null_values=[""],
            strings_can_be_null=True,
        )
        return self._table(data, names, options)[name]

    def _no_rows(self) -> Columns:
        return tuple(reader(_empty(reader)) for reader in self._readers)

    def _table(self, data: bytes, names: list[str], convert: pa_csv.ConvertOptions) -> pa.Table:
        try:
            return pa_csv.read_csv(
                pa.BufferReader(data),
                pa_csv.ReadOptions(column_names=names, block_size=len(data) + 1),
                self._format,
                convert,
            )
        except (pa.ArrowException, ValueError) as error:
            raise DataError(one_line(error)) from None

    def _names(self, path: str) -> list[str]:
        """Return the names of a file's columns.

        Raises:
            DataError: it has none.
        """
        header = self._request.header
        if not isinstance(header, bool):
            return list(header)
        if path not in self._headers:
            names = self._read_names(path)
            self._headers[path] = self._distinct.setdefault(tuple(names), names)
        return self._headers[path]

    def _read_names(self, path: str) -> list[str]:
        data = self._head(path)
        head = data[: _header_bytes(data)]
        if self._quoted and not self._request.header:
            head = data[: self._quoted.end_of(LineBlock(data, len(BOM), None), 1)]
        try:
            text = io.StringIO(self._name_quotes.doubled(head).decode())
        except DataError as error:
            raise DataError(f"{path}: line 1: {error}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line 1: it is not UTF-8: {error.reason}") from None
        try:
            found = next(csv_format.reader(text, delimiter=self._request.delimiter), [])
        except csv_format.Error as error:
            raise DataError(f"{path}: line 1: {error}; lines end in LF or CR LF") from None
        if not found:
            raise DataError(f"{path} has no first line to take the columns from")
        names = found if self._request.header else [f"_c{n}" for n in range(len(found))]
        if len(set(names)) < len(names):
            raise DataError(f"{path}: two columns have one name: {names}")
        return names

    def _head(self, path: str) -> bytes:
        """Return a file's first lines."""
        with self.opened(path) as file:
            # Of a small file all lines: a last one without an end is a block of its own.
            most_blocks = 2 if file.size_bytes <= self._limits.block_bytes else 1
            blocks = self.blocks(file, ahead_until=0).blocks()
            data = b"".join(block.data for block in itertools.islice(blocks, most_blocks))
        return data.removeprefix(BOM)

    def _check_names(self, names: list[str], path: str) -> None:
        there = set(names)
        for reader in self._readers:
            if reader.spec.name not in there:
                raise DataError(f"{path} has no column {reader.spec.name!r}; it has {names}")
        if self._request.columns is None:
            refuse_more(names, self.schema.names, path, self._first)

    def _refuse_keys(self, names: list[str], path: str) -> None:
        for name in self.directories:
            if name in names:
                raise refuse_both(name, path)

    def _found_types(self) -> tuple[str, dict[str, pa.DataType]]:
        """Return the first file that has a row, and the types of the requested columns from it.

        A file that gives no types is still read, with those of another one. If no other one has a
        row its error is raised, whatever the policy: without types it could not be read.
        """
        rowless: tuple[str, dict[str, pa.DataType]] | None = None
        failed: list[DataError] = []
        for file in self.listed:
            if not file.size_bytes:
                continue
            try:
                types, has_rows = self._types_in(file.path)
            except DataError as error:
                failed.append(error)
                if self.bad.action == "fail":
                    raise
                if len(failed) > self.bad.max_skipped:
                    raise self.bad.too_many(failed[0]) from None
                continue
            if has_rows:
                return file.path, types
            rowless = rowless or (file.path, types)
        if failed:
            raise DataError(f"{failed[0]}; no other file has a row to find types in")
        if rowless is None:
            raise DataError(
                f"{self.listed[0].path} and {len(self.listed) - 1} other files are empty"
            )
        return rowless

    def _types_in(self, path: str) -> tuple[dict[str, pa.DataType], bool]:
        """Return the types of a file's columns, and whether it has a row to guess them from."""
        names = self._names(path)
        asked = self._request.columns
        given = dict(asked) if isinstance(asked, Mapping) else {}
        wanted = list(names if asked is None else asked)
        self._refuse_keys(names, path)
        for name in wanted:
            if name not in names:
                raise DataError(f"{path} has no column {name!r}; it has {names}")
        if all(name in given for name in wanted):
            return {name: TYPES[given[name]] for name in wanted}, True
        found = self._guessed(path, names, [name for name in wanted if name not in given])
        known = {each.name: each.type for each in found or () if each.type.id in DTYPES}
        types = {
            name: TYPES[given[name]] if name in given else known.get(name, pa.string())
            for name in wanted
        }
        return types, found is not None

    def _guessed(self, path: str, names: list[str], wanted: list[str]) -> pa.Schema | None:
        """Return the guessed types of a file's first rows; None: the file has no row.

        Refuses integers beyond int64 in a wanted column: pyarrow takes them as floats.
        """
        options = pa_csv.ConvertOptions(null_values=[""], timestamp_parsers=[])
        try:
            data = self._head(path)
            if self._request.header is True:
                data = data[_header_bytes(data) :]
            if not data.strip(b"\r\n"):
                return None
            data = self._quotes.doubled(data)
            table = self._table(data, names, options)
            for name in wanted:
                self._check_rounding(table[name], data, names, name)
            return table.schema
        except (DataError, pa.ArrowException, ValueError) as error:
            raise DataError(
                f"{path}: the types of its columns cannot be found: {one_line(error)}; name them"
            ) from None

    def _check_rounding(
        self, values: pa.ChunkedArray, data: bytes, names: list[str], name: str
    ) -> None:
        if values.type != pa.float64() or pc.max(pc.abs(values)).as_py() < 2**63:
            return
        texts = self._texts(data, names, name).drop_null()
        if pc.all(pc.match_substring_regex(texts, r"^\s*[-+]?\d+\s*$")).as_py():
            largest = max(texts.to_pylist(), key=lambda text: abs(int(text)))
            raise DataError(
                f"column {name!r} has integers beyond int64, as {largest.strip()}, which float64 "
                "would round; name its type 'uint64' or 'str'"
            )

    def _without_directories(self, request: CsvRequest) -> CsvRequest:
        """Keep the directories' columns that a request names; return it without them."""
        asked = request.columns
        if asked is None:
            return request
        named = {key: column for key, column in self.directories.items() if key in asked}
        self.directories = named
        if isinstance(asked, Mapping):
            self.directories = {key: column.of(asked[key]) for key, column in named.items()}
            left: Any = {name: asked[name] for name in asked if name not in named}
        else:
            left = [name for name in asked if name not in named]
        return dataclasses.replace(request, columns=left) if named else request

    def _fill(self, column: StoredColumn) -> Any:
        value = self._request.nulls.get(column.name)
        if value is None:
            return _EMPTY.get(column.type.id)
        return held(column.name, value, column.type)


def _header_bytes(data: bytes) -> int:
    return data.find(b"\n") + 1 or len(data)


def _empty(reader: ColumnReader) -> pa.RecordBatch:
    column = reader.column
    return pa.record_batch([pa.array([], column.type)], [column.name])
