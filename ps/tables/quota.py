"""Quota: the limit of rows in a server's share of a table, and the error when it is full.

Covers: the arithmetic of max_rows and max_bytes, the count of all segments.
Does not: evict (ps.tables.segment).      Threads: any; one lock guards the count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ps.errors import TableFull
from ps.manifest.table_spec import TableSpec

Array = np.ndarray[Any, Any]

BESIDE_ROW_NBYTES = 40
"""Largest overhead of a row in bytes, without its numbers: id, version, and the index at its
emptiest."""


class NoRoom(Exception):
    """A segment has too few rows to evict for a push's new ones; other segments may have more.

    The segment is unchanged. `refused`: [n] int64, ids of the push that it has not admitted.
    """

    refused: Array = np.empty(0, np.int64)


class Elsewhere(NamedTuple):
    """Eviction from all segments, for the second attempt of a push (`Table.locked`)."""

    refused: Array
    """[n] int64: ids that the first attempt has not admitted."""
    drop: Callable[[int], int]
    """Drops the given number of rows or more, or none if too few exist; returns how many."""


class Quota:
    """Limit and count of the rows in all segments of one server.

    Args:
        spec: the table.
        row_nbytes: bytes of values and slots of one row.
        share: this server's fraction of the table's buckets, in (0, 1]; 0 for a server without any.
        server: name of the server, for the error.
    """

    def __init__(self, spec: TableSpec, row_nbytes: int, share: float, server: str) -> None:
        self._row_nbytes, self._share, self._server = row_nbytes, share, server
        self._lock = threading.Lock()
        self._used = 0
        self.limit: int | None = None
        """Most rows that this server holds; None: no limit."""
        self._why = ""
        self.set_limits(spec)

    def set_limits(self, spec: TableSpec) -> None:
        """Have the limits of this table from the next push on; rows above them stay until then."""
        limits: list[tuple[float, str]] = []
        if spec.max_rows is not None:
            limits.append((spec.max_rows, f"max_rows={spec.max_rows}"))
        if spec.max_bytes is not None:
            per_row = self._row_nbytes + BESIDE_ROW_NBYTES
            why = f"max_bytes={spec.max_bytes} at {per_row} bytes a row"
            limits.append((spec.max_bytes / per_row, why))
        smallest = min(limits, default=None)
        with self._lock:
            self.limit = None if smallest is None else max(1, int(smallest[0] * self._share))
            self._why = "" if smallest is None else smallest[1]

    @property
    def used(self) -> int:
        """Current number of rows."""
        return self._used

    def take(self, num_rows: int) -> int:
        """Take `num_rows` rows, or none; return how many are lacking, 0 if they were taken."""
        with self._lock:
            lacking = 0 if self.limit is None else max(0, self._used + num_rows - self.limit)
            if not lacking:
                self._used += num_rows
            return lacking

    @property
    def excess(self) -> int:
        """Rows above the limit: of a restore, or of a limit that was lowered."""
        return 0 if self.limit is None else max(0, self._used - self.limit)

    def take_anyway(self, num_rows: int) -> None:
        """Take `num_rows` rows, also above the limit."""
        with self._lock:
            self._used += num_rows

    def give(self, num_rows: int) -> None:
        """Give rows back."""
        with self._lock:
            self._used -= num_rows

    def full(self, spec: TableSpec, num_rows: int) -> TableFull:
        """Return the error for rows that do not fit.

        Args:
            spec: the table.
            num_rows: rows that were asked for.
        """
        rest = "; raise the limit, or set when_full='lru'"
        if spec.when_full == "lru":
            rest = (
                ", which would evict rows of the same push; push fewer ids at once, or raise the "
                "limit"
            )
        return TableFull(
            f"table {spec.name!r} is full: {self._server} holds {self._used} of at most "
            f"{self.limit} rows (its share of {self._why}), a push brought {num_rows} new ids to "
            f"one segment{rest}. A run that resumes takes the limits that its program has then",
            {"table": spec.name, "rows": str(self._used), "limit": str(self.limit)},
        )
