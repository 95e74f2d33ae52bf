"""Which rows are the oldest, where a table has more than it may. Pure.

Covers: the order in which rows go: least recently pushed first, of one age the largest id first.
Does not: drop them (ps.tables.table).
Threads: none; a function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class RowAges(NamedTuple):
    """Rows of one segment; arrays of their own."""

    ids: Array
    """int64[n]; for a table of uint64 ids their bits."""
    versions: Array
    """int64[n]: the push that changed the row last."""

    def without(self, ids: Array) -> RowAges:
        """Return those of other ids."""
        is_other = ~np.isin(self.ids, ids)
        return RowAges(self.ids[is_other], self.versions[is_other])


def oldest(segments: Sequence[RowAges], num_rows: int) -> list[Array]:
    """Return for each segment the ids of its rows among the oldest `num_rows` of all.

    Every push is the next version of all segments, so versions say who is older in any of them.
    """
    ids = np.concatenate([each.ids for each in segments])
    versions = np.concatenate([each.versions for each in segments])
    is_chosen: Array = np.zeros(ids.size, np.bool_)
    if num_rows >= ids.size:
        is_chosen[:] = True
    elif num_rows > 0:
        youngest = np.partition(versions, num_rows - 1)[num_rows - 1]
        is_chosen = versions < youngest
        (equal,) = np.nonzero(versions == youngest)
        rest = equal.size - (num_rows - np.count_nonzero(is_chosen))
        order = np.argsort(ids[equal].view(np.uint64))
        is_chosen[equal[order[rest:]]] = True
    ends = np.cumsum([each.ids.size for each in segments])[:-1]
    return [
        each.ids[chosen] for each, chosen in zip(segments, np.split(is_chosen, ends), strict=True)
    ]
