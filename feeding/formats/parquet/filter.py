"""Row filter of Parquet files, by statistics of row groups and by rows.

Covers: RowFilter, from tuples or a pyarrow expression.
Does not: read files (row_groups).
Threads: any.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from feeding.errors import FeedSettingsError
from feeding.reading.splits import UNTOLD

_MAY_TAKE_NAN = re.compile(r"!=|\b(?!is_in\()\w+\(")
"""What may be true of NaN in the text of an expression: `!=`, and each function but `is_in`."""
_QUOTED = re.compile(r'(?<=[\s\[(,=])"(?:[^"\\\n]|\\.)*"(?=[\s\]),}])')
"""A text in an expression; no quote within a column's name, and none that arrow has not escaped."""


class RowFilter:
    """Keeps the rows for which an expression is true.

    Args:
        filters: [("column", ">", 3), …], all of which must hold; a list of such lists, one of which
            must hold; or a pyarrow.compute expression.

    Raises:
        FeedSettingsError: `filters` is not one of these.
    """

    def __init__(self, filters: Any) -> None:
        try:
            found = (
                filters if isinstance(filters, pc.Expression) else pq.filters_to_expression(filters)
            )
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise FeedSettingsError(
                f"filters must be [(column, operator, value), …] or a pyarrow.compute expression, "
                f"got {filters!r}: {error}"
            ) from None
        self._expression: pc.Expression = found
        self._text = str(found)
        self._alternatives: list[list[Any]] | None = None
        """Tuples of which one list must hold; None: an expression of pyarrow."""
        if not isinstance(filters, pc.Expression):
            is_one = isinstance(filters[0][0], str)
            self._alternatives = [list(filters)] if is_one else [list(each) for each in filters]

    @functools.cached_property
    def choice(self) -> str:
        """The conditions as text, in an order of its own.

        UNTOLD for an expression of pyarrow, whose text may be shortened.
        """
        if self._alternatives is None:
            return UNTOLD
        return repr(sorted({_conditions(every) for every in self._alternatives}))

    def may_use(self, path: Iterable[str]) -> bool:
        """Return whether the expression may use a column; True for a few others too.

        Args:
            path: the column's field names from the top of the row.
        """
        return all(name in self._text for name in path)

    def names(self, column: str) -> bool:
        """Return whether the expression names a column; True for a few others too.

        Args:
            column: its name.
        """
        if self._alternatives is not None:
            return any(each[0] == column for every in self._alternatives for each in every)
        text = self._text if '"' in column else _QUOTED.sub('""', self._text)
        return bool(re.search(rf"(?<![\w.]){re.escape(column)}(?![\w.])", text))

    def groups(self, footer: bytes, schema: pa.Schema, constants: Mapping[str, Any]) -> set[int]:
        """Return the row groups that may hold matching rows, by their statistics.

        Args:
            footer: a Parquet file without its pages.
            schema: schema of the rows, constants included.
            constants: values by column of the columns that are constant in the file.

        Raises:
            FeedSettingsError: the expression does not fit the columns.
        """
        known: Any = pc.scalar(True)
        for name, value in constants.items():
            known &= pc.field(name) == pa.scalar(value, schema.field(name).type)
        try:
            file = pa.BufferReader(footer)
            whole = ds.ParquetFileFormat().make_fragment(file, partition_expression=known)
            found = whole.subset(self._expression, schema=schema).row_groups
            if (certain := self._without_nan(schema)) is not self._expression:
                found = whole.subset(certain, schema=schema).row_groups
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise FeedSettingsError(
                f"filters do not fit the columns: {' '.join(str(error).split())[:300]}"
            ) from None
        return {group.id for group in found}

    def _without_nan(self, schema: pa.Schema) -> pc.Expression:
        """Return what a row group can be excluded by: statistics do not count NaN.

        Of floats from 5 to 5, one may be NaN, for which `!= 5` is true.
        """
        floats = {field.name for field in schema if _has_float(field.type)}
        if self._alternatives is None:
            is_used = any(self.may_use([name]) for name in floats)
            return (
                pc.scalar(True)
                if is_used and _MAY_TAKE_NAN.search(self._text)
                else self._expression
            )
        kept = [
            [each for each in every if each[0] not in floats or each[1] not in ("!=", "not in")]
            for every in self._alternatives
        ]
        if kept == self._alternatives:
            return self._expression
        return pq.filters_to_expression(kept) if all(kept) else pc.scalar(True)

    def rows(self, batch: pa.RecordBatch, constants: Mapping[str, pa.Scalar]) -> pa.RecordBatch:
        """Return the matching rows of a batch.

        Args:
            batch: rows of one file.
            constants: values by column of the columns that are constant in the file.
        """
        for name, value in constants.items():
            batch = batch.append_column(name, pa.repeat(value, batch.num_rows))
        # RecordBatch.filter of pyarrow 18 fails where no row is left.
        try:
            found = pa.Table.from_batches([batch]).filter(self._expression)
        except pa.ArrowNotImplementedError:  # many functions do not take dictionary arrays
            found = pa.Table.from_batches([_without_codes(batch)]).filter(self._expression)
        found = found.combine_chunks()
        return found.to_batches()[0] if found.num_rows else batch.slice(0, 0)


def _has_float(kind: pa.DataType) -> bool:
    """Return whether values have floats, at any depth; True for a few others too."""
    return any(name in str(kind) for name in ("float", "double"))


def _without_codes(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def _conditions(given: Iterable[Any]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted({_condition(*each) for each in given}))


def _condition(column: str, operator: str, value: Any) -> tuple[str, ...]:
    if operator in ("in", "not in"):
        values = value if hasattr(value, "to_pylist") else pa.array(list(value))
        return (column, operator, *sorted(set(map(repr, values.to_pylist()))))
    # As pyarrow's: numpy's numbers, and their text, are those of its release.
    found = value if isinstance(value, pa.Scalar) else pa.scalar(value)
    return (column, "==" if operator == "=" else operator, repr(found.as_py()))
