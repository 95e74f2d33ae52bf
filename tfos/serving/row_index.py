"""Row index: lookups in one or two layers of mapped tables, for one state of the rows.

The first layer is a whole export; the second one, if any, has all changes to it since. A refresh
makes another RowIndex and changes no existing one, so a reader of one sees one state.

Covers: ids of any shape to rows, layers.
Does not: build (tfos.serving.index_files), hash strings (ps.string_ids.ids).
Threads: any; immutable.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ps.errors import ShapeError
from ps.sorted_rows import search
from ps.sorted_rows.merge import merged
from ps.sorted_rows.order import SortedBatch
from ps.string_ids.ids import ids_of
from ps.tables.ids import as_bits
from tfos.errors import ExportError
from tfos.serving.export_format import ExportedTable
from tfos.serving.index_files import MappedIndex

Array = np.ndarray[Any, Any]


class RowIndex:
    """Rows of all tables of an export.

    Args:
        base: a whole export.
        overlay: changes to it; None: no changes.
    """

    def __init__(self, base: MappedIndex, overlay: MappedIndex | None = None) -> None:
        self.base = base
        self.overlay = overlay
        self.layers = (base,) if overlay is None else (base, overlay)
        self._unseen = {
            name: np.array(each.table.unseen, each.table.dtype)
            for name, each in self.layers[-1].tables.items()
        }
        for each in base.tables.values():
            search.warm(each.table.dtype)

    @property
    def state(self) -> str:
        """The state of the rows."""
        return self.layers[-1].state

    @property
    def nbytes(self) -> int:
        """Number of mapped bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def table(self, name: str) -> ExportedTable:
        """Return the record of a table, without files.

        Raises:
            ExportError: there is none.
        """
        if name not in self._unseen:
            known = ", ".join(map(repr, self._unseen)) or "none"
            raise ExportError(f"no table {name!r}; the export has {known}")
        return self.layers[-1].tables[name].table

    def lookup(self, name: str, ids: Any, out: Array | None = None) -> Array:
        """Return the rows of ids of any shape.

        Args:
            name: name of the table.
            ids: integers, or strings and bytes, which are hashed.
            out: [*shape of the ids, dim] of the table's dtype, C order, to fill; None: a new array.

        Returns:
            [*shape of the ids, dim].

        Raises:
            ExportError: there is no such table.
            IdError: ids are outside the table's range, not integers, or strings for a table of
                integers.
            ShapeError: `out` does not fit.
        """
        table = self.table(name)
        bits = as_bits(table, ids_of(table, ids))
        shape = (*bits.shape, table.dim)
        if out is None:
            out = np.empty(shape, table.dtype)
        elif out.shape != shape or out.dtype != table.dtype or not out.flags.carray:
            raise ShapeError(
                f"table {name!r} fills {table.dtype}{list(shape)} in C order, got "
                f"{out.dtype}{list(out.shape)}"
            )
        self._fill(name, np.ascontiguousarray(bits).reshape(-1), out.reshape(-1, table.dim))
        return out

    def batches(self, name: str) -> Iterator[SortedBatch]:
        """Return all rows of a table, without those that a delta has removed.

        Args:
            name: name of the table.
        """
        base = self.base.tables[name].batches()
        if self.overlay is None:
            return base
        return merged(base, self.overlay.tables[name].batches(), keeps_removed=False)

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a table; with an overlay, an upper bound.

        Args:
            name: name of the table.
        """
        found = [layer.tables[name] for layer in self.layers]
        return sum(each.num_rows - each.num_removed for each in found)

    def _fill(self, name: str, wanted: Array, out: Array) -> None:
        unseen = self._unseen[name]
        for number, layer in enumerate(self.layers):
            mapped = layer.tables[name]
            if mapped.num_rows:
                missing = unseen if number == 0 else unseen[:0]  # keep the base's rows
                search.lookup(mapped.starts, mapped.ids, mapped.rows, missing, wanted, out)
            elif number == 0:
                out[:] = unseen
