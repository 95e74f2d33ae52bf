"""CSV source: CSV files as columns, parsed by pyarrow.

Covers: CsvSource: names, types, selection, nulls.
Does not: batch or shuffle (reading.reader), find lines (formats.text.lines), assign files to
workers (reading.splits).
Threads: one reader; pyarrow converts columns on its own threads.
"""

from __future__ import annotations

import contextlib
import csv as csv_format
import dataclasses
import functools
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from feeding.arrow.arrays import DTYPES, TEXTS
from feeding.arrow.columns import BadValue, ColumnReader, StoredColumn, column_spec, held, one_line
from feeding.columnar.ops import Columns
from feeding.columnar.schema import ColumnGroup, Schema
from feeding.errors import DataError, FeedSettingsError
from feeding.filesystem.interface import Path, RangeReader
from feeding.formats.csv.options import TYPES, CsvRequest
from feeding.formats.text.lines import LineBlock, LineLimits
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
        lines = RowLines(blank=False, header=request.header is True)
        can_split = not request.quoted_newlines
        super().__init__(
            paths, bad=bad, limits=limits, can_split=can_split, lines=lines, partitions=partitions
        )
        self._request = request = self._without_directories(request)
        self._format = pa_csv.ParseOptions(
            delimiter=request.delimiter, newlines_in_values=request.quoted_newlines
        )
        self._headers: dict[str, list[str]] = {}
        self._bare: set[str] = set()
        """Files of a single line without a line end."""
        types = self._found_types()
        self._readers = [
            ColumnReader(column, column_spec(column), self._fill(column))
            for column in (StoredColumn(name, kind, (name,)) for name, kind in types.items())
        ]
        for name in request.nulls:
            if name not in types:
                raise FeedSettingsError(f"nulls: {name!r} is none of the columns {list(types)}")
        self._convert = pa_csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=[""],
            strings_can_be_null=any(_is_of_text(types[name]) for name in request.nulls),
            check_utf8=True,
        )

    @property
    def schema(self) -> Schema:
        """See reading.runs.Source."""
        specs = tuple(reader.spec for reader in self._readers)
        names = tuple(spec.name for spec in specs)
        return Schema(specs, ColumnGroup("dict", names, (None,) * len(names)))

    def read(self, split: Split) -> Iterator[Columns]:
        """See reading.runs.Source."""
        if (names := self._names_to_read(split.path)) is None:
            return
        with contextlib.closing(self.opened(split.path)) as file:
            if self._request.quoted_newlines:
                yield from self._whole(file, names)
            else:
                yield from self.rows(split, file, functools.partial(self._parse, names))

    def count(self, piece: Split) -> int:
        """See reading.row_counts.Countable; parses values that may hold line ends."""
        if (names := self._names_to_read(piece.path)) is None:
            return 0
        if not self._request.quoted_newlines:
            return super().count(piece)
        only = pa_csv.ConvertOptions(
            include_columns=names[:1], column_types={names[0]: pa.binary()}, check_utf8=False
        )
        with contextlib.closing(self.opened(piece.path)) as file:
            return sum(batch.num_rows for _, batch in self._batches(file, names, only))

    def read_rows(self, wanted: PieceRows) -> Iterator[Columns]:
        """See reading.row_counts.Countable."""
        path = wanted.piece.path
        if (names := self._names_to_read(path)) is None:
            return
        with contextlib.closing(self.opened(path)) as file:
            if self._request.quoted_newlines:
                yield from self._whole(file, names, wanted)
            else:
                yield from self.rows_of(wanted, file, functools.partial(self._parse, names))

    def _names_to_read(self, path: str) -> list[str] | None:
        """Return the names of a file's columns; None: the file is skipped."""
        try:
            names = self._names(path)
            self._check_names(names, path)
        except DataError as error:
            self.bad.skip(path, 0, error)
            return None
        return names

    def _whole(
        self, file: RangeReader, names: list[str], wanted: PieceRows | None = None
    ) -> Iterator[Columns]:
        """Yield the rows of a file whose values may hold line ends."""
        first = 0
        try:
            for number, batch in self._batches(file, names, self._convert, wanted):
                first = number
                yield tuple(reader(batch) for reader in self._readers)
        except BadValue as error:
            text = f"{file.path}: row {first + error.row}: {error}"
            self.bad.skip(file.path, file.size_bytes, DataError(text))
        except (pa.ArrowException, ValueError) as error:
            text = f"{file.path}: after row {first}: {one_line(error)}"
            self.bad.skip(file.path, file.size_bytes, DataError(text))

    def _batches(
        self,
        file: RangeReader,
        names: list[str],
        convert: pa_csv.ConvertOptions,
        wanted: PieceRows | None = None,
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield batches with the number of their first row, up to damaged data."""
        if self._request.header is True and file.path in self._bare:
            return
        at = 0
        try:
            for batch in self._streamed(file, names, convert):
                first, at = at, at + batch.num_rows
                if part := wanted.within(first, at - first) if wanted else (0, batch.num_rows):
                    yield first + part[0], batch[slice(*part)]
                if wanted and wanted.is_read(at):
                    return
        except (pa.ArrowException, ValueError, DataError) as error:
            text = f"{file.path}: after row {at}: {one_line(error)}"
            self.bad.skip(file.path, file.size_bytes, DataError(text))
            return
        if wanted:
            wanted.check(at)

    def _streamed(
        self, file: RangeReader, names: list[str], convert: pa_csv.ConvertOptions
    ) -> pa_csv.CSVStreamingReader:
        options = pa_csv.ReadOptions(
            column_names=names,
            skip_rows=int(self._request.header is True),
            block_size=self._limits.block_bytes,
        )
        stream = pa.PythonFile(self.stream(file), mode="r")
        return pa_csv.open_csv(stream, options, self._format, convert)

    def _parse(self, names: list[str], block: LineBlock) -> Columns:
        data = block.data
        if block.first_byte == 0:
            data = data.removeprefix(BOM)
            if self._request.header is True:
                data = data[_header_bytes(data) :]
        if not data.strip(b"\r\n"):
            return self._no_rows()
        table = self._table(data, names, self._convert)
        if _lines_without_end(data, table.num_rows, self._request.delimiter):
            raise DataError(
                "a quoted value does not end on its line; if values may hold line ends, pass "
                "quoted_newlines=True"
            )
        if not table.num_rows:
            return self._no_rows()
        batch = table.combine_chunks().to_batches()[0]
        try:
            return tuple(reader(batch) for reader in self._readers)
        except (BadValue, pa.ArrowException, ValueError) as error:
            raise DataError(str(error)) from None

    def _no_rows(self) -> Columns:
        return tuple(reader(_empty(reader)) for reader in self._readers)

    def _table(
        self, data: bytes, names: list[str], convert: pa_csv.ConvertOptions | None
    ) -> pa.Table:
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
            self._headers[path] = self._read_names(path)
        return self._headers[path]

    def _read_names(self, path: str) -> list[str]:
        data = self._head(path)
        try:
            text = io.StringIO(data[: _header_bytes(data)].decode())
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line 1: it is not UTF-8: {error.reason}") from None
        if b"\n" not in data:
            self._bare.add(path)
        try:
            found = next(csv_format.reader(text, delimiter=self._request.delimiter), [])
        except csv_format.Error as error:
            raise DataError(f"{path}: line 1: {error}; lines end in LF or CR LF") from None
        if self._request.header and found and "\n" in found[-1]:
            raise DataError(f"{path}: line 1: a quoted name does not end on its line")
        if not found:
            raise DataError(f"{path} has no first line to take the columns from")
        names = found if self._request.header else [f"_c{n}" for n in range(len(found))]
        if len(set(names)) < len(names):
            raise DataError(f"{path}: two columns have one name: {names}")
        return names

    def _head(self, path: str) -> bytes:
        """Return a file's first lines."""
        with contextlib.closing(self.opened(path)) as file:
            block = next(self.blocks(file).blocks(), None)
        return b"" if block is None else block.data.removeprefix(BOM)

    def _check_names(self, names: list[str], path: str) -> None:
        for reader in self._readers:
            if reader.spec.name not in names:
                raise DataError(f"{path} has no column {reader.spec.name!r}; it has {names}")

    def _found_types(self) -> dict[str, pa.DataType]:
        """Return the types of the requested columns, from the first file that has a row."""
        rowless: dict[str, pa.DataType] | None = None
        for file in self.listed:
            if not file.size_bytes:
                continue
            try:
                types, has_rows = self._types_in(file.path)
            except DataError as error:
                self.bad.skip(file.path, 0, error)
                continue
            if has_rows:
                return types
            rowless = rowless or types
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
        for name in self.directories:
            if name in names:
                raise refuse_both(name, path)
        for name in wanted:
            if name not in names:
                raise DataError(f"{path} has no column {name!r}; it has {names}")
        if all(name in given for name in wanted):
            return {name: TYPES[given[name]] for name in wanted}, True
        found = self._guessed(path, names)
        known = {each.name: each.type for each in found or () if each.type.id in DTYPES}
        types = {
            name: TYPES[given[name]] if name in given else known.get(name, pa.string())
            for name in wanted
        }
        return types, found is not None

    def _guessed(self, path: str, names: list[str]) -> pa.Schema | None:
        """Return the guessed types of a file's first rows; None: the file has no row."""
        options = pa_csv.ConvertOptions(null_values=[""], timestamp_parsers=[])
        try:
            if self._request.quoted_newlines:
                return self._guessed_across_lines(path, names, options)
            data = self._head(path)
            if self._request.header is True:
                data = data[_header_bytes(data) :]
            return self._table(data, names, options).schema if data.strip(b"\r\n") else None
        except (DataError, pa.ArrowException, ValueError) as error:
            raise DataError(
                f"{path}: the types of its columns cannot be found: {one_line(error)}; name them"
            ) from None

    def _guessed_across_lines(
        self, path: str, names: list[str], options: pa_csv.ConvertOptions
    ) -> pa.Schema | None:
        if self._request.header is True and path in self._bare:
            return None
        with contextlib.closing(self.opened(path)) as file:
            found = self._streamed(file, names, options).schema
        return None if all(pa.types.is_null(kind) for kind in found.types) else found

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


def _is_of_text(kind: pa.DataType) -> bool:
    return kind.id in TEXTS


def _lines_without_end(data: bytes, num_rows: int, delimiter: str) -> bool:
    """Return whether a quoted value does not end on its line; pyarrow accepts that silently."""
    if b'"' not in data:
        return False
    num_lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if num_rows < num_lines:
        num_lines = sum(1 for line in data.split(b"\n") if line.strip(b"\r"))
    last = data[data.rstrip(b"\r\n").rfind(b"\n") + 1 :].rstrip(b"\r\n")
    if num_rows < num_lines:
        return True
    if not last.count(b'"') % 2:
        return False
    text = io.StringIO(last.decode(errors="replace") + "\n", newline="")
    rows = list(csv_format.reader(text, delimiter=delimiter))  # several rows at carriage returns
    return any("\n" in value for row in rows for value in row[-1:])


def _header_bytes(data: bytes) -> int:
    return data.find(b"\n") + 1 or len(data)


def _empty(reader: ColumnReader) -> pa.RecordBatch:
    column = reader.column
    return pa.record_batch([pa.array([], column.type)], [column.name])
