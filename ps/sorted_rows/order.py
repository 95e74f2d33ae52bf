"""Order of sorted rows: by the hash of the id, which is one to one. Pure; numpy alone.

Covers: the hash, the check of the order, the size of a batch, the directory of buckets.
Does not: search (ps.sorted_rows.search).      Threads: none.

Ids may be hashes, consecutive numbers or both; hashed, they spread evenly, so that equal ranges of
hashes have nearly equally many ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

MAX_SORTED_ROWS = (1 << 32) - 2
"""Positions in a directory have 32 bits."""
BATCH_BYTES = 16 << 20
"""Rows of one batch: at most this many bytes, and at least one row."""
_BATCH_ROWS = 1 << 16
IDS_PER_BUCKET = 2
"""At least this many on average, below twice as many: 1 to 2 bytes of directory a row. Measured
with 10 M ids: 1, 2, 4, 8 per bucket look 6,656 ids up in 0.3, 0.45, 0.5 and 0.55 ms."""

_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


class SortedBatch(NamedTuple):
    """Consecutive rows in the order of their ids' hashes, each id once."""

    ids: Array
    """[n] int64."""
    rows: Array
    """[n, dim]."""
    removed: Array
    """[n] bool: the id has no row any more; only in what adds to an older state."""

    def part(self, start: int, stop: int) -> SortedBatch:
        """Return the rows [start, stop) without a copy."""
        return SortedBatch(*(column[start:stop] for column in self))

    def only(self, chosen: Array) -> SortedBatch:
        """Return copies of the rows that a mask or positions choose."""
        return SortedBatch(*(column[chosen] for column in self))


def batch_rows(row_nbytes: int) -> int:
    """Return how many rows of this size are one batch."""
    return max(1, min(_BATCH_ROWS, BATCH_BYTES // row_nbytes))


def joined(batches: Sequence[SortedBatch]) -> SortedBatch:
    """Return one batch of several; at least one."""
    return SortedBatch(*(np.concatenate(columns) for columns in zip(*batches, strict=True)))


def hashed(ids: Array) -> Array:
    """Return the hash of each id, [n] uint64: the finalizer of SplitMix64.

    ps.tables.hash_index.mix is the same for kernels.

    Args:
        ids: [n] int64.
    """
    bits = np.ascontiguousarray(ids).view(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * _MULTIPLIER_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MULTIPLIER_2
    return bits ^ (bits >> np.uint64(31))


def first_out_of_order(hashes: Array, before: int) -> int:
    """Return the position of the first hash that does not exceed the one before it; -1: none.

    Args:
        hashes: [n] uint64.
        before: the hash before the first one; -1: there is none.
    """
    if not hashes.size:
        return -1
    if int(hashes[0]) <= before:
        return 0
    (wrong,) = np.nonzero(hashes[1:] <= hashes[:-1])
    return int(wrong[0]) + 1 if wrong.size else -1


def directory_bits(num_rows: int) -> int:
    """Return how many first bits of a hash name its bucket.

    Args:
        num_rows: number of rows of the table.
    """
    return max(1, (num_rows // IDS_PER_BUCKET).bit_length() - 1)


class Directory:
    """Positions of the buckets, counted while the sorted ids pass by.

    Args:
        num_rows: number of rows that will be added.
    """

    def __init__(self, num_rows: int) -> None:
        self.bits = directory_bits(num_rows)
        self._counts = np.zeros((1 << self.bits) + 1, np.uint32)

    def add(self, hashes: Array) -> None:
        """Count sorted hashes, [n] uint64."""
        if not hashes.size:
            return
        buckets = (hashes >> np.uint64(64 - self.bits)).astype(np.int64)
        first = int(buckets[0])
        counts = np.bincount(buckets - first)
        self._counts[first + 1 : first + 1 + counts.size] += counts.astype(np.uint32)

    def starts(self) -> Array:
        """Return the positions, [2^bits + 1] uint32; the last one is the number of rows."""
        return np.cumsum(self._counts, dtype=np.uint32)
