"""CSV files as a source of columns, parsed by pyarrow.

Covers: CsvSource: names, types, selection, nulls.
Does not: batch or shuffle (direct), find lines (text_lines), share files out (splits).
Threads: one reader; pyarrow converts columns on its own threads.
"""

from __future__ import annotations

import contextlib
import csv as csv_format
import functools
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from feeding.arrow_arrays import DTYPES, TEXTS
from feeding.bad_data import BadData
from feeding.column_cuts import Columns
from feeding.errors import DataError, SettingsError
from feeding.filesystem.interface import Path, RangeReader
from feeding.parquet_columns import BadValue, ColumnReader, StoredColumn, column_spec
from feeding.parquet_footer import one_line
from feeding.schema import Group, Schema
from feeding.splits import Split
from feeding.text_lines import LineBlock, LineLimits
from feeding.text_source import LineSource

_TYPES = {
    **{name: getattr(pa, "bool_" if name == "bool" else name)() for name in DTYPES.values()},
    "str": pa.string(),
    "bytes": pa.binary(),
}
del _TYPES["float16"]  # pyarrow parses none
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvRequest:
    """What is asked for.

    Args:
        columns: names, or names with dtypes ("int64", "float32", "bool", "str", "bytes", …); None:
            all. Types that are not said are those of the first lines of the first file.
        header: whether the first line of each file has the names; or the names, for files without;
            False: _c0, _c1, …
        delimiter: one character between values.
        quoted_newlines: whether quoted values may hold line ends; files are then not cut.
        nulls: what stands in the place of an empty value, by column; in columns of numbers that
            are not named an empty value is refused.
    """

    columns: Sequence[str] | Mapping[str, str] | None = None
    header: bool | Sequence[str] = True
    delimiter: str = ","
    quoted_newlines: bool = False
    nulls: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.columns
        if isinstance(given, str) or not all(map(_is_text, given or ())):
            raise SettingsError(f"columns must be names, or dtypes by name, got {given!r}")
        if given is not None and not len(given):
            raise SettingsError("no columns were asked for; name at least one")
        for name, dtype in given.items() if isinstance(given, Mapping) else ():
            if dtype not in _TYPES:
                raise SettingsError(
                    f"column {name!r}: dtype {dtype!r} is not one of {', '.join(sorted(_TYPES))}"
                )
        delimiter: object = self.delimiter
        if not isinstance(delimiter, str) or len(delimiter.encode()) != 1:
            raise SettingsError(f"delimiter must be one character, got {self.delimiter!r}")
        if isinstance(self.header, str):
            raise SettingsError(f"header must be True, False or names, got {self.header!r}")


class CsvSource(LineSource):
    """See direct.Source.

    Args:
        paths: files, directories or patterns.
        request: columns and format.
        bad: what becomes of bad lines and damaged files.
        limits: what a file may ask for.

    Raises:
        FileNotFoundError: a path has no file.
        DataError: the first file has no such column, or nothing at all.
        SettingsError: the request cannot work.
    """

    def __init__(
        self,
        paths: Path | Iterable[Path],
        request: CsvRequest | None = None,
        *,
        bad: BadData | None = None,
        limits: LineLimits | None = None,
    ) -> None:
        self._request = request = request or CsvRequest()
        super().__init__(paths, bad=bad, limits=limits, can_cut=not request.quoted_newlines)
        self._format = pa_csv.ParseOptions(
            delimiter=request.delimiter, newlines_in_values=request.quoted_newlines
        )
        self._headers: dict[str, list[str]] = {}
        types = self._found_types()
        self._readers = [
            ColumnReader(column, column_spec(column), self._fill(column))
            for column in (StoredColumn(name, kind, (name,)) for name, kind in types.items())
        ]
        for name in request.nulls:
            if name not in types:
                raise SettingsError(f"nulls: {name!r} is none of the columns {list(types)}")
        self._convert = pa_csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=[""],
            strings_can_be_null=False,
            check_utf8=True,
        )

    @property
    def schema(self) -> Schema:
        """See direct.Source."""
        specs = tuple(reader.spec for reader in self._readers)
        names = tuple(spec.name for spec in specs)
        return Schema(specs, Group("dict", names, (None,) * len(names)))

    def read(self, split: Split) -> Iterator[Columns]:
        """See direct.Source."""
        try:
            names = self._names(split.path)
            self._check_names(names, split.path)
        except DataError as error:
            self.bad.skip(split.path, 0, error)
            return
        with contextlib.closing(self.opened(split.path)) as file:
            if self._request.quoted_newlines:
                yield from self._whole(file, names)
            else:
                yield from self.rows(split, file, functools.partial(self._parse, names))

    def _whole(self, file: RangeReader, names: list[str]) -> Iterator[Columns]:
        """Yield the rows of a file in which a line end may stand within a value."""
        stream = pa.PythonFile(self.stream(file), mode="r")
        options = pa_csv.ReadOptions(
            column_names=names,
            skip_rows=int(self._request.header is True),
            block_size=self._limits.block_bytes,
        )
        at = 0
        try:
            for batch in pa_csv.open_csv(stream, options, self._format, self._convert):
                yield tuple(reader(batch) for reader in self._readers)
                at += batch.num_rows
        except BadValue as error:
            text = f"{file.path}: row {at + error.row}: {error}"
            self.bad.skip(file.path, file.size_bytes, DataError(text))
        except (pa.ArrowException, ValueError, DataError) as error:
            text = f"{file.path}: behind row {at}: {one_line(error)}"
            self.bad.skip(file.path, file.size_bytes, DataError(text))

    def _parse(self, names: list[str], block: LineBlock) -> Columns:
        data = block.data
        if block.first_byte == 0:
            data = data.removeprefix(_BOM)
            if self._request.header is True:
                data = data[_header_bytes(data) :]
        if not data.strip(b"\r\n"):
            return tuple(reader(_no_rows(reader)) for reader in self._readers)
        table = self._table(data, names, self._convert)
        batch = table.combine_chunks().to_batches()[0]
        try:
            return tuple(reader(batch) for reader in self._readers)
        except (BadValue, pa.ArrowException, ValueError) as error:
            raise DataError(str(error)) from None

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
            raise DataError(f"{path}: line 1: it is no UTF-8: {error.reason}") from None
        found = next(csv_format.reader(text, delimiter=self._request.delimiter), [])
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
        return b"" if block is None else block.data.removeprefix(_BOM)

    def _check_names(self, names: list[str], path: str) -> None:
        for reader in self._readers:
            if reader.spec.name not in names:
                raise DataError(f"{path} has no column {reader.spec.name!r}; it has {names}")

    def _found_types(self) -> dict[str, pa.DataType]:
        """Return the types of the columns asked for, by the first file that has a row."""
        for file in self.listed:
            if not file.size_bytes:
                continue
            try:
                return self._types_in(file.path)
            except DataError as error:
                self.bad.skip(file.path, 0, error)
        raise DataError(f"{self.listed[0].path} and {len(self.listed) - 1} other files are empty")

    def _types_in(self, path: str) -> dict[str, pa.DataType]:
        names = self._names(path)
        asked = self._request.columns
        said = dict(asked) if isinstance(asked, Mapping) else {}
        wanted = list(names if asked is None else asked)
        for name in wanted:
            if name not in names:
                raise DataError(f"{path} has no column {name!r}; it has {names}")
        types = {name: _TYPES[said[name]] if name in said else None for name in wanted}
        if None in types.values():
            found = self._guessed(path, names)
            types = {name: kind or found[name] for name, kind in types.items()}
        return types

    def _guessed(self, path: str, names: list[str]) -> dict[str, pa.DataType]:
        data = self._head(path)
        if self._request.header is True:
            data = data[_header_bytes(data) :]
        if not data.strip(b"\r\n"):
            return dict.fromkeys(names, pa.string())
        try:
            options = pa_csv.ConvertOptions(null_values=[""], timestamp_parsers=[])
            found = self._table(data, names, options).schema
        except DataError as error:
            raise DataError(
                f"{path}: the types of its columns cannot be found: {error}; name them"
            ) from None
        known = set(DTYPES) | set(TEXTS)
        return {each.name: each.type if each.type.id in known else pa.string() for each in found}

    def _fill(self, column: StoredColumn) -> Any:
        value = self._request.nulls.get(column.name)
        if value is None:
            return None
        try:
            return pa.scalar(value, column.type).as_py()
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            raise SettingsError(
                f"nulls={{{column.name!r}: {value!r}}}: the column is {column.type}, which cannot "
                "hold that"
            ) from None


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _header_bytes(data: bytes) -> int:
    return data.find(b"\n") + 1 or len(data)


def _no_rows(reader: ColumnReader) -> pa.RecordBatch:
    column = reader.column
    return pa.record_batch([pa.array([], column.type)], [column.name])
