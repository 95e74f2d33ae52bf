"""Row filter of Parquet files, by statistics of row groups and by rows.

Covers: RowFilter, from tuples or a pyarrow expression.
Does not: read files (row_groups).
Threads: any.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from feeding.errors import FeedSettingsError


class RowFilter:
    """Keeps the rows for which an expression is true.

    Args:
        filters: [("column", ">", 3), …], all of which must hold; a list of such lists, one of which
            must hold; or a pyarrow.compute expression.

    Raises:
        FeedSettingsError: `filters` is none of these.
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

    def may_use(self, path: Iterable[str]) -> bool:
        """Return whether the expression may use a column; True for a few others too.

        Args:
            path: the column's field names from the top of the row.
        """
        return all(name in self._text for name in path)

    def groups(self, footer: bytes, schema: pa.Schema, constants: Mapping[str, Any]) -> set[int]:
        """Return the row groups that may hold matching rows, by their statistics.

        Args:
            footer: a Parquet file without its pages.
            schema: of the rows, constants included.
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
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise FeedSettingsError(
                f"filters do not fit the columns: {' '.join(str(error).split())[:300]}"
            ) from None
        return {group.id for group in found}

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


def _without_codes(batch: pa.RecordBatch) -> pa.RecordBatch:
    arrays = [
        column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, names=batch.schema.names)
