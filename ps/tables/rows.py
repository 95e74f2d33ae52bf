"""Row batches: rows copied out of a table or into one.

Covers: the types that tables and checkpoints share.      Does not: import numba.
Threads: none; values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

ROWS_AT_ONCE = 1 << 14
"""Rows copied under a segment's lock at once: about a millisecond for rows of 256 bytes."""


class RowBatch(NamedTuple):
    """Rows of a table, as copies."""

    ids: Array
    """int64[n]; for a table of uint64 ids their bits."""
    rows: Array
    """[n, width] of the table's dtype: values, then slots; see ps.optim.row_rules."""
    versions: Array
    """int64[n]: the push that changed the row last."""


class Dropped(NamedTuple):
    """Ids whose rows were dropped."""

    ids: Array
    """int64[n]"""
