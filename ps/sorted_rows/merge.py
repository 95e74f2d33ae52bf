"""Merging and comparing two streams of sorted rows in one pass. Pure; numpy alone.

Covers: which parts of two streams have the same ids, the newer state of both, what has changed.
Does not: sort (ps.sorted_rows.sorter).      Memory: one batch of each stream.
Threads: none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ps.sorted_rows.order import Array, SortedBatch, hashed, joined


class _Cursor:
    """The part of a stream that is not consumed yet."""

    def __init__(self, batches: Iterator[SortedBatch]) -> None:
        self._batches = batches
        self._rest: SortedBatch | None = None
        self._hashes: Array = np.empty(0, np.uint64)

    def fill(self) -> bool:
        """Have at least one row; return False at the end of the stream."""
        while not self._hashes.size:
            self._rest = next(self._batches, None)
            if self._rest is None:
                return False
            self._hashes = hashed(self._rest.ids)
        return True

    @property
    def last(self) -> np.uint64:
        """Hash of the last row in memory."""
        return np.uint64(self._hashes[-1])

    def take(self, bound: np.uint64) -> SortedBatch | None:
        """Consume the rows whose hashes are up to `bound`."""
        if self._rest is None:
            return None
        stop = int(np.searchsorted(self._hashes, bound, side="right"))
        taken, self._rest = self._rest.part(0, stop), self._rest.part(stop, self._hashes.size)
        self._hashes = self._hashes[stop:]
        return taken


def aligned(
    older: Iterator[SortedBatch], newer: Iterator[SortedBatch]
) -> Iterator[tuple[SortedBatch | None, SortedBatch | None]]:
    """Yield parts of both streams that cover the same range of hashes; None: nothing of one.

    Args:
        older: one stream.
        newer: the other one, of rows with the same dim and dtype.
    """
    one, other = _Cursor(older), _Cursor(newer)
    while True:
        filled = [cursor for cursor in (one, other) if cursor.fill()]
        if not filled:
            return
        bound = min(cursor.last for cursor in filled)
        yield one.take(bound), other.take(bound)


def merged(
    older: Iterator[SortedBatch], newer: Iterator[SortedBatch], *, keeps_removed: bool
) -> Iterator[SortedBatch]:
    """Yield the newer state: of an id that both have, the newer stream's entry.

    Args:
        older: the state, or changes to it.
        newer: changes to that.
        keeps_removed: yield removed ids too, as changes to an older state; else leave them out.
    """
    for before, after in aligned(older, newer):
        parts = [] if after is None else [after]
        if before is not None:
            parts.append(before if after is None else before.only(~_is_in(before.ids, after.ids)))
        both = joined(parts)
        if not keeps_removed:
            both = both.only(~both.removed)
        yield both.only(np.argsort(hashed(both.ids)))


def present(batches: Iterator[SortedBatch]) -> Iterator[SortedBatch]:
    """Yield what is a row, without removed ids."""
    for batch in batches:
        yield batch.only(~batch.removed)


def changes(older: Iterator[SortedBatch], newer: Iterator[SortedBatch]) -> Iterator[SortedBatch]:
    """Yield what turns the older state into the newer one: other rows, and removed ids.

    Args:
        older: the whole earlier state.
        newer: the whole later state.
    """
    for before, after in aligned(older, newer):
        if before is None or after is None:
            whole = after if before is None else _as_removed(before)
            if whole is not None:
                yield whole
            continue
        gone = _as_removed(before.only(~_is_in(before.ids, after.ids)))
        both = joined([after.only(~_is_equal(before, after)), gone])
        yield both.only(np.argsort(hashed(both.ids)))


def _as_removed(batch: SortedBatch) -> SortedBatch:
    return SortedBatch(batch.ids, np.zeros_like(batch.rows), np.ones(batch.ids.size, np.bool_))


def _is_in(ids: Array, others: Array) -> Array:
    """Return which ids are among others; both in the order of their hashes."""
    return _places(ids, others) >= 0


def _places(ids: Array, others: Array) -> Array:
    """Return the position in `others` of each id, -1 where it is not there."""
    if not others.size:
        return np.full(ids.size, -1)
    places = np.searchsorted(hashed(others), hashed(ids)).clip(max=others.size - 1)
    return np.where(others[places] == ids, places, -1)


def _is_equal(before: SortedBatch, after: SortedBatch) -> Array:
    """Return which rows of `after` are bit for bit those of `before`."""
    places = _places(after.ids, before.ids)
    (known,) = np.nonzero(places >= 0)
    bits = f"u{after.rows.dtype.itemsize}"
    same = (
        before.rows[places[known]].view(bits) == np.ascontiguousarray(after.rows[known]).view(bits)
    ).all(axis=1)
    is_equal = np.zeros(after.ids.size, np.bool_)
    is_equal[known] = same
    return is_equal
