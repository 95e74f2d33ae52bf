"""Counts and ids at the head of a payload for tables: read, checked, cut into segments.

Covers: payload sizes, which come before any memory is taken; ids; the units of the record.
Does not: read gradients (ps.server.row_updates), answer (ps.server.table_handlers).
Runs in: PS processes.
Threads: any; every call reads into memory of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ps.errors import ManifestMismatch, ShapeError
from ps.server.request import Incoming
from ps.tables.ids import MAX_IDS
from ps.tables.table import Table

Array = np.ndarray[Any, Any]


class TablePart(NamedTuple):
    """What a request brings for one table."""

    table: Table
    first_unit: int
    """Position of the table's first segment in the record."""
    ids: Array
    slices: list[slice]
    """Which of the ids are each segment's."""


class TableIntake:
    """The tables of one server, and the layout of what is sent to them.

    Args:
        tables: its shares, in the order of the manifest.
        first_unit: number of the first table segment among the record's units.
    """

    def __init__(self, tables: Sequence[Table], first_unit: int) -> None:
        self.tables = tuple(tables)
        self._first_units: list[int] = []
        for table in tables:
            self._first_units.append(first_unit)
            first_unit += len(table.segments)

    def table(self, number: int) -> Table:
        """Return a table by its number in the manifest."""
        if number >= len(self.tables):
            raise ManifestMismatch(
                f"the manifest has {len(self.tables)} tables, asked was number {number}"
            )
        return self.tables[number]

    def read(
        self,
        call: Incoming,
        pushed: Sequence[int] = (),
        wanted: Sequence[int] = (),
        *,
        others_nbytes: int = 0,
    ) -> tuple[list[TablePart], list[TablePart]]:
        """Read counts and ids, and check them against the payload and the tables.

        Args:
            call: the request, whose payload begins with them.
            pushed: numbers of the tables whose gradients are in the payload as well.
            wanted: numbers of the tables whose rows are requested.
            others_nbytes: bytes of the payload that are no table's.

        Returns:
            What is pushed, and what is asked for.

        Raises:
            ShapeError: the payload has another size than the counts say.
            ManifestMismatch: there is no such table.
            IdError: an id that its table does not take, or that is not this server's.
        """
        tables = [self.table(number) for number in (*pushed, *wanted)]
        for numbers in (pushed, wanted):
            if len(set(numbers)) < len(numbers):
                raise ShapeError("a table occurs twice in one request; join its ids")
        counts = np.empty((len(tables), 2), np.int64)
        if call.payload_bytes < counts.nbytes:
            raise ShapeError(
                f"the counts of {len(tables)} tables take {counts.nbytes} bytes, the payload has "
                f"{call.payload_bytes}"
            )
        read_array(call, counts)
        _check_counts(tables, counts, len(pushed), (call.payload_bytes, others_nbytes))
        ids = np.empty(int(counts[:, 0].sum()), np.int64)
        read_array(call, ids)
        parts: list[TablePart] = []
        start = 0
        for number, table, (size, given) in zip(
            (*pushed, *wanted), tables, counts.tolist(), strict=True
        ):
            own = ids[start : start + size]
            parts.append(TablePart(table, self._first_units[number], own, table.split(own)))
            table.count(given=given)
            start += size
        return parts[: len(pushed)], parts[len(pushed) :]


def read_array(call: Incoming, array: Array) -> None:
    """Fill an array from the payload.

    Args:
        call: the request, read up to here.
        array: writable, C order.
    """
    if array.size:
        call.read_into(array.data.cast("B"))


def _check_counts(
    tables: Sequence[Table], counts: Array, num_pushed: int, payload: tuple[int, int]
) -> None:
    """Refuse counts that are out of range or do not fit the payload, before memory is taken."""
    sizes: list[int] = counts[:, 0].tolist()
    payload_bytes, others_nbytes = payload
    expected = counts.nbytes + others_nbytes
    for at, (table, (size, given)) in enumerate(zip(tables, counts.tolist(), strict=True)):
        if not 0 <= size <= MAX_IDS or not 0 <= given <= MAX_IDS:
            raise ShapeError(
                f"table {table.spec.name!r}: {size} ids for {given} in one request; each must be "
                f"in 0..{MAX_IDS}"
            )
        expected += size * (8 + (at < num_pushed) * table.spec.value_nbytes)
    if payload_bytes != expected:
        raise ShapeError(
            f"{sizes} ids of {len(tables)} tables take {expected} bytes"
            f"{f' with {others_nbytes} of the groups' if others_nbytes else ''}, the payload has "
            f"{payload_bytes}"
        )
