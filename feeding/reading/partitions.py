"""Partition columns: values in directory names of partitioned data, `day=2026-01-31/hour=3/part-0`.

Covers: PartitionColumn (its values by file and their type), which keys are columns;
PartitionedSource, which adds them to the rows of a format that does not know them.
Does not: parse names (partition_paths), list files (discover).
Threads: any; a source: one reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from feeding.columnar.ops import Columns, num_rows
from feeding.columnar.schema import ColumnSpec, Schema
from feeding.errors import DataError, FeedSettingsError
from feeding.reading.partition_paths import first_kind, partition_values
from feeding.reading.row_counts import Countable, PieceRows
from feeding.reading.splits import SourceFile, Split

_DTYPES = {"bigint": "int64", "number": "float64", "string": "str"}


@dataclass(frozen=True, slots=True)
class PartitionColumn:
    """One key of the directory names.

    Args:
        name: the key.
        dtype: int64, if all values are integers, float64, if all are numbers, else "str"; or what
            `of` was given.
        texts: by file, as the directory says it; None for Spark's null.
    """

    name: str
    dtype: str
    texts: Mapping[str, str | None]

    @property
    def spec(self) -> ColumnSpec:
        """Spec of the column in batches."""
        if self.dtype == "str":
            return ColumnSpec(self.name, "str", "str")
        if self.dtype == "bytes":
            return ColumnSpec(self.name, "bytes", "bytes")
        return ColumnSpec(self.name, "tensor", "scalar", self.dtype)

    def of(self, dtype: str) -> PartitionColumn:
        """Return the column as another dtype.

        Args:
            dtype: numpy's name of a number's type, "str" or "bytes".

        Raises:
            DataError: a value is no such number.
        """
        column = PartitionColumn(self.name, dtype, self.texts)
        for path, text in self.texts.items():
            try:
                column.value(path)
            except (ValueError, OverflowError):
                raise DataError(
                    f"{path}: the directory {self.name}={text} is no {dtype}; ask for 'str', or "
                    "for no dtype"
                ) from None
        return column

    def value(self, path: str) -> Any:
        """Return a file's value: int, float, str or bytes; None for Spark's null."""
        text = self.texts[path]
        if text is None or self.dtype == "str":
            return text
        if self.dtype == "bytes":
            return text.encode()
        kind = np.dtype(self.dtype).kind
        return float(text) if kind == "f" else np.dtype(self.dtype).type(int(text)).item()

    def repeated(self, path: str, num_rows: int, fill: Any = None) -> npt.NDArray[Any]:
        """Return a file's value for each of its rows, dtype[n] or object[n].

        Args:
            path: path of the file.
            num_rows: n.
            fill: replaces Spark's null.
        """
        value = self.value(path)
        dtype = object if self.dtype in ("str", "bytes") else self.dtype
        return np.full(num_rows, fill if value is None else value, dtype)

    def refuse_null(self, advice: str) -> None:
        """Refuse Spark's null.

        Args:
            advice: what else the user can do.

        Raises:
            DataError: names the first file whose value is null.
        """
        path = next((path for path, text in self.texts.items() if text is None), None)
        if path is not None:
            raise DataError(f"{path}: {self.name!r} is null; {advice}")


def partition_columns(files: Iterable[SourceFile]) -> dict[str, PartitionColumn]:
    """Return the columns whose keys are in the directory names of all files, by name.

    Args:
        files: only names below the directory that was read count (`SourceFile.base`).
    """
    found = {file.path: partition_values(file.path, file.base) for file in files}
    first = next(iter(found.values()), {})
    columns = {}
    for name in (name for name in first if all(name in keys for keys in found.values())):
        texts = {path: keys[name] for path, keys in found.items()}
        dtype = _DTYPES[first_kind(texts.values(), ("bigint", "number"))]
        columns[name] = PartitionColumn(name, dtype, texts)
    return columns


def refuse_both(name: str, path: str, *, only_filtered: bool = False) -> FeedSettingsError:
    """Return the error for a column that a file and its directories have.

    Args:
        name: name of the column.
        path: path of the file.
        only_filtered: whether it is needed for `filters` alone.
    """
    which = ", and filters name it" if only_filtered else ""
    return FeedSettingsError(
        f"{path}: {name!r} is a column of the file and a key of its directories{which}; pass "
        "partitions=False to read the file's, or leave one of them out of the data"
    )


class PartitionedSource:
    """A source with the columns of its directories after its own; see row_counts.Countable.

    Args:
        source: the files.
        columns: columns of the directories.

    Raises:
        DataError: a value is null.
    """

    def __init__(self, source: Countable, columns: Iterable[PartitionColumn]) -> None:
        self._source = source
        self._columns = tuple(columns)
        for column in self._columns:
            column.refuse_null("pass partitions=False to read without the directories' columns")

    @property
    def schema(self) -> Schema:
        """See runs.Source."""
        own = (column.spec for column in self._columns)
        return Schema.of_dict((*self._source.schema.columns, *own))

    @property
    def num_skipped(self) -> int:
        """See runs.Source."""
        return self._source.num_skipped

    def files(self) -> Sequence[SourceFile]:
        """See runs.Source."""
        return self._source.files()

    def read(self, split: Split) -> Iterator[Columns]:
        """See runs.Source."""
        return self._beside(self._source.read(split), split.path)

    def count(self, piece: Split) -> int:
        """See row_counts.Countable."""
        return self._source.count(piece)

    def read_rows(self, wanted: PieceRows) -> Iterator[Columns]:
        """See row_counts.Countable."""
        return self._beside(self._source.read_rows(wanted), wanted.piece.path)

    def _beside(self, blocks: Iterator[Columns], path: str) -> Iterator[Columns]:
        for block in blocks:
            count = num_rows(block)
            yield (*block, *(column.repeated(path, count) for column in self._columns))


class KeyedSource(Countable, Protocol):
    """A source that knows the keys of its directories and leaves them out."""

    directories: dict[str, PartitionColumn]


def partitioned(source: KeyedSource) -> Countable:
    """Return a source with the columns of its directories."""
    found = source.directories.values()
    return PartitionedSource(source, found) if found else source
