"""Search of ids among sorted rows, and the copy of their rows: one compiled loop.

Covers: the kernel and its signatures.
Does not: map files, check ids.      Imports numba.
Threads: any; the kernel runs without the GIL and changes nothing but `out`.

The first bits of an id's hash name a bucket of 2 to 4 ids. A lookup costs two cache misses that
memory serves, the id and its row, and a third in the directory, which is small. Ids are taken in
blocks, one step for the whole block before the next step, so that the misses of a block overlap.
Many ids in one bucket, which only ids chosen on purpose give, are halved.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba import types

from ps.jit.cache import CACHE, inlined, kernel
from ps.jit.intrinsics import prefetch
from ps.tables.hash_index import mix

Array = np.ndarray[Any, Any]

_BLOCK = 64
_MAX_BITS = 40
_FEW = 8
"""Ids that are compared one by one."""
_LINE_BYTES = 64


@inlined
def _position(ids: Array, start: Any, stop: Any, wanted: Any) -> Any:
    """Return the position of an id in [start, stop) of the sorted ids, or -1."""
    bits = mix(wanted)
    while stop - start > _FEW:
        middle = (start + stop) // 2
        if mix(ids[middle]) <= bits:
            start = middle
        else:
            stop = middle
    for at in range(start, stop):
        if ids[at] == wanted:
            return at
    return -1


@inlined
def _shift_of(starts: Array) -> Any:
    """Return by how many bits a hash is shifted to name its bucket; 0: no directory's size."""
    for power in range(1, _MAX_BITS):
        if (1 << power) + 1 == starts.size:
            return np.uint64(64 - power)
    return np.uint64(0)


@inlined
def _find_block(starts: Array, ids: Array, wanted: Array, shift: Any, found: Array) -> None:
    """Write the position of each wanted id to `found`, -1 where there is none."""
    for i in range(wanted.size):
        found[i] = np.int64(mix(wanted[i]) >> shift)
        prefetch(starts, found[i])
    for i in range(wanted.size):
        prefetch(ids, min(np.int64(starts[found[i]]), ids.size - 1))
    for i in range(wanted.size):
        bucket = found[i]
        start = min(np.int64(starts[bucket]), ids.size)
        stop = min(np.int64(starts[bucket + 1]), ids.size)
        found[i] = _position(ids, start, stop, wanted[i])


@inlined
def _copy_block(rows: Array, found: Array, unseen: Array, out: Array) -> Any:
    """Copy the rows at these positions; return how many positions are -1."""
    dim = rows.shape[1]
    flat = rows.reshape(rows.size)
    step = max(1, _LINE_BYTES // rows.itemsize)
    for at in found:
        if at >= 0:
            for j in range(0, dim, step):
                prefetch(flat, at * dim + j)
    missing = 0
    for i in range(found.size):
        at = found[i]
        if at >= 0:
            for j in range(dim):
                out[i, j] = rows[at, j]
        else:
            missing += 1
            for j in range(min(dim, unseen.size)):
                out[i, j] = unseen[j]
    return missing


@kernel
def lookup(starts: Array, ids: Array, rows: Array, unseen: Array, wanted: Array, out: Array) -> int:
    """Copy the row of each wanted id to `out`; return how many ids have none, -1: nothing fits.

    Args:
        starts: [2^k + 1] uint32, the directory, k >= 1.
        ids: [n] int64, sorted by hash.
        rows: [n, dim].
        unseen: [dim], the row of an id without one; or [0]: `out` keeps what it has there.
        wanted: [m] int64.
        out: [m, dim]; filled.
    """
    if out.shape[1] != rows.shape[1] or out.shape[0] != wanted.size:
        return -1
    shift = _shift_of(starts)
    if not shift or not ids.size or ids.size != rows.shape[0]:
        return -1
    positions = np.empty(_BLOCK, np.int64)
    missing = 0
    for begin in range(0, wanted.size, _BLOCK):
        stop = min(begin + _BLOCK, wanted.size)
        found = positions[: stop - begin]
        _find_block(starts, ids, wanted[begin:stop], shift, found)
        missing += _copy_block(rows, found, unseen, out[begin:stop])
    return missing


_STARTS = types.Array(types.uint32, 1, "C", readonly=True)
_IDS = types.Array(types.int64, 1, "C", readonly=True)


def warm(dtype: str) -> int:
    """Load or compile the kernel for a table's dtype; return how many were new."""
    element = numba.from_dtype(np.dtype(dtype))
    row = types.Array(element, 1, "C", readonly=True)
    read = types.Array(element, 2, "C", readonly=True)
    write = types.Array(element, 2, "C")
    return int(CACHE.load(lookup, (_STARTS, _IDS, read, row, _IDS, write)))
