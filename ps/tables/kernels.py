"""Kernels over a table's rows and ids: gather, expand, deduplicate, sum, check, evict.

Covers: all loops per id or per number except the index (ps.tables.hash_index), initial values
(ps.tables.initializers) and the update rules (ps.optim.kernels). Shapes and dtypes of the
arguments: ps.tables.
Does not: lock, or decide what to keep.
Runs in: PS processes, and workers that use tables; imports numba.
Threads: any; kernels run without the GIL.

Every loop compares a number from outside with the array's size before it uses it as a position; ids
are only hashed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numba
import numpy as np
from numba import types

from ps.jit.cache import CACHE, kernel
from ps.jit.intrinsics import flush_denormals, prefetch, restore
from ps.tables import hash_index
from ps.tables.hash_index import keyed, mix, relink, unlink
from ps.tables.initializers import initialize

Array = np.ndarray[Any, Any]

BUCKET_BITS = 12
NUM_BUCKETS = 1 << BUCKET_BITS
"""Virtual buckets of a table: the unit in which ids are assigned to servers and their segments."""

_BUCKET_SHIFT = np.uint64(64 - BUCKET_BITS)
_AHEAD = 12


@kernel
def gather(slab: Array, rows: Array, out: Array) -> int:
    """Copy the values of these rows to `out`; rows below 0 are skipped.

    Args:
        slab: [capacity, width] of the table's dtype.
        rows: [n] int64, row numbers.
        out: [n, dim] of the table's dtype, dim <= width; filled.

    Returns:
        -1, or the position in `rows` of the first number that the slab does not have; then
        nothing or a part was copied.
    """
    flat = slab.reshape(slab.size)
    width = slab.shape[1]
    dim = out.shape[1]
    if dim > width:
        return 0
    for i in range(rows.size):
        if i + _AHEAD < rows.size and 0 <= rows[i + _AHEAD] < slab.shape[0]:
            prefetch(flat, rows[i + _AHEAD] * width)
        row = rows[i]
        if row >= slab.shape[0]:
            return i
        if row >= 0:
            for j in range(dim):
                out[i, j] = slab[row, j]
    return -1


@kernel
def mark(versions: Array, rows: Array, version: int, before: Array) -> int:
    """Set the version of these rows to `version`, a number that no row has yet.

    Args:
        versions: [capacity] int64; changed.
        rows: [n] int64, row numbers; those below 0 are skipped.
        version: number of the push.
        before: [n] int64; filled with the versions that the rows had, where there is a row.

    Returns:
        -1, or the position in `rows` of the first row that occurs twice or does not exist.
    """
    for i in range(rows.size):
        if i + _AHEAD < rows.size and 0 <= rows[i + _AHEAD] < versions.size:
            prefetch(versions, rows[i + _AHEAD])
        row = rows[i]
        if row >= versions.size or (row >= 0 and versions[row] == version):
            return i
        if row >= 0:
            before[i] = versions[row]
            versions[row] = version
    return -1


@kernel
def evict(
    slots: Array, row_ids: Array, key: int, versions: Array, slab: Array, victims: Array
) -> int:
    """Remove rows and move the last rows into their places, so that no hole remains.

    Args:
        slots: [capacity] uint64, the index without growth in progress; changed.
        row_ids: [num_rows] int64, the id of each row; changed.
        key: key of the index, uint64.
        versions: [num_rows] int64; changed.
        slab: [capacity, width] of the table's dtype, capacity >= num_rows; changed.
        victims: [n] int64, row numbers, ascending, each once.

    Returns:
        Number of rows left.
    """
    num_rows = row_ids.size
    for i in range(victims.size - 1, -1, -1):
        row = victims[i]
        if row < 0 or row >= num_rows:
            continue
        unlink(slots, row_ids, key, row)
        num_rows -= 1
        if row < num_rows:
            relink(slots, row_ids, key, num_rows, row)
            row_ids[row] = row_ids[num_rows]
            versions[row] = versions[num_rows]
            for j in range(slab.shape[1]):
                slab[row, j] = slab[num_rows, j]
    return num_rows


@kernel
def check_parts(ids: Array, parts: Array, first_part: int, largest: int, ends: Array) -> int:
    """Check that ids are sorted by part, and find where each part ends.

    Args:
        ids: [n] int64, ids of one table.
        parts: [4096] int32, part of each virtual bucket; see ps.tables.routing.
        first_part: the receiver's first part; it has `ends.size` of them.
        largest: the largest id that the table accepts, as the bits of an int64.
        ends: [parts of the receiver] int64; filled with the end of each part in `ids`.

    Returns:
        -1, or the position of the first id that is too large, out of order or another server's.
    """
    most = np.uint64(largest)
    at = 0
    for i in range(ids.size):
        part = parts[np.int64(mix(ids[i]) >> _BUCKET_SHIFT)] - first_part
        if np.uint64(ids[i]) > most or part < at or part >= ends.size:
            return i
        while at < part:
            ends[at] = i
            at += 1
    while at < ends.size:
        ends[at] = ids.size
        at += 1
    return -1


@kernel
def find_parts(ids: Array, parts: Array, out: Array) -> None:
    """Write the part of each id to `out`.

    Args:
        ids: [n] int64.
        parts: [4096] int32, part of each virtual bucket.
        out: [n] int32; filled.
    """
    for i in range(ids.size):
        out[i] = parts[np.int64(mix(ids[i]) >> _BUCKET_SHIFT)]


@kernel
def distinct(ids: Array, key: int, heads: Array, inverse: Array, unique: Array) -> int:
    """Find the distinct ids, in the order of their first occurrence.

    Args:
        ids: [n] int64.
        key: random, uint64; the result does not depend on it.
        heads: [power of 2, > 2 n] int32, scratch, all -1: a hash table of indexes in `unique`.
        inverse: [n] int32; filled with the index in `unique` of each id.
        unique: [n] int64; the first entries are filled with the distinct ids.

    Returns:
        Number of distinct ids.
    """
    mask = np.uint64(heads.size - 1)
    found = 0
    for i in range(ids.size):
        position = keyed(ids[i], key) & mask
        while heads[position] >= 0 and unique[heads[position]] != ids[i]:
            position = (position + np.uint64(1)) & mask
        if heads[position] < 0:
            heads[position] = found
            unique[found] = ids[i]
            found += 1
        inverse[i] = heads[position]
    return found


@kernel
def first_repeated(ids: Array, key: int, heads: Array) -> int:
    """Return the position of the first id that occurred before, or -1.

    Args:
        ids: [n] int64.
        key: random, uint64; the result does not depend on it.
        heads: [power of 2, > 2 n] int32, scratch, all -1: a hash table of positions in `ids`.
    """
    mask = np.uint64(heads.size - 1)
    for i in range(ids.size):
        position = keyed(ids[i], key) & mask
        while heads[position] >= 0:
            if ids[heads[position]] == ids[i]:
                return i
            position = (position + np.uint64(1)) & mask
        heads[position] = i
    return -1


@kernel
def arrange(unique: Array, parts: Array, inverse: Array, ends: Array, out: Array) -> None:
    """Sort distinct ids by part, with a stable counting sort.

    Args:
        unique: [num_unique] int64, distinct ids.
        parts: [4096] int32, part of each virtual bucket.
        inverse: [n] int32; changed from indexes in `unique` to indexes in `out`.
        ends: [num_parts] int64; filled with the end of each part in `out`.
        out: [num_unique] int64; filled with the sorted ids.
    """
    starts = np.zeros(ends.size + 1, np.int64)
    for i in range(unique.size):
        starts[parts[np.int64(mix(unique[i]) >> _BUCKET_SHIFT)] + 1] += 1
    for part in range(ends.size):
        starts[part + 1] += starts[part]
        ends[part] = starts[part + 1]
    places = np.empty(unique.size, np.int32)
    for i in range(unique.size):
        part = parts[np.int64(mix(unique[i]) >> _BUCKET_SHIFT)]
        place = starts[part]
        starts[part] += 1
        out[place] = unique[i]
        places[i] = place
    for i in range(inverse.size):
        inverse[i] = places[inverse[i]]


@kernel
def expand(values: Array, inverse: Array, out: Array) -> None:
    """Copy row inverse[i] of `values` to row i of `out`.

    Args:
        values: [num_unique, dim] of the table's dtype.
        inverse: [n] int32.
        out: [n, dim] of the table's dtype; filled.
    """
    for i in range(inverse.size):
        row = inverse[i]
        if 0 <= row < values.shape[0]:
            for j in range(out.shape[1]):
                out[i, j] = values[row, j]


@kernel
def sum_equal(grads: Array, inverse: Array, out: Array) -> None:
    """Add row i of `grads` to row inverse[i] of `out`, in the order of i.

    Args:
        grads: [n, dim] of the table's dtype.
        inverse: [n] int32.
        out: [num_unique, dim] of the table's dtype, zeros; changed.
    """
    for i in range(inverse.size):
        row = inverse[i]
        if 0 <= row < out.shape[0]:
            for j in range(out.shape[1]):
                out[row, j] += grads[i, j]


@kernel
def add_weighted(
    grads: Array, inverse: Array, weight: Array, last: Array, number: int, out: Array
) -> int:
    """Add row i of `grads` times weight[0] to row inverse[i] of `out`: one term of a weighted sum.

    Args:
        grads: [n, dim] of the table's dtype.
        inverse: [n] int32.
        weight: [1] of the table's dtype.
        last: [num_unique] int32, the number of the term that was added last; changed.
        number: number of this term; no other term has it.
        out: [num_unique, dim] of the table's dtype, at first zeros; changed.

    Returns:
        -1, or the position of the first row that occurs twice in this term, or is out of range.
    """
    factor = weight[0]
    bad = -1
    mode = flush_denormals()
    for i in range(inverse.size):
        row = inverse[i]
        if row < 0 or row >= out.shape[0] or last[row] == number:
            bad = i
            break
        last[row] = number
        for j in range(out.shape[1]):
            out[row, j] += grads[i, j] * factor
    restore(mode)
    return bad


@kernel
def count_up(sketch: Array, ids: Array, counts: Array) -> int:
    """Count each id once more in a count-min sketch.

    Only the smallest of an id's counters grow, which makes collisions rarer.

    Args:
        sketch: [depth, width] uint16, counters by hash, saturating at 65,535; changed.
        ids: [n] int64.
        counts: [n] int64; filled with an upper bound of how often each id was counted.

    Returns:
        How many counters of the first row became 1.

    Source: Cormode and Muthukrishnan, An Improved Data Stream Summary: The Count-Min Sketch and
    its Applications, 2005; conservative update after Estan and Varghese, 2002.
    """
    width = np.uint64(sketch.shape[1])
    num_used = 0
    for i in range(ids.size):
        low = np.uint16(65_535)
        bits = mix(ids[i])
        for k in range(sketch.shape[0]):
            low = min(low, sketch[k, np.int64(mix(bits + np.uint64(k)) % width)])
        new = low if low == 65_535 else np.uint16(low + 1)
        for k in range(sketch.shape[0]):
            position = np.int64(mix(bits + np.uint64(k)) % width)
            if k == 0 and sketch[k, position] == 0:
                num_used += 1
            sketch[k, position] = max(sketch[k, position], new)
        counts[i] = new
    return num_used


@kernel
def draw(ids: Array, key: int, threshold: int, chosen: Array) -> None:
    """Choose ids by their hash with `key`, each with probability threshold / 2^53.

    Args:
        ids: [n] int64.
        key: 64 bits that select the random stream, as int64.
        threshold: 0 to 2^53.
        chosen: [n] bool; filled.
    """
    for i in range(ids.size):
        bits = mix(mix(ids[i]) ^ np.uint64(key)) >> np.uint64(11)
        chosen[i] = bits < np.uint64(threshold)


_IDS = types.Array(types.int64, 1, "C", readonly=True)
_NUMBERS = types.Array(types.int64, 1, "C")
_PARTS = types.Array(types.int32, 1, "C", readonly=True)
_INVERSE = types.Array(types.int32, 1, "C")
_READ_INVERSE = types.Array(types.int32, 1, "C", readonly=True)
_SLOTS = types.Array(types.uint64, 1, "C")
_RECIPE = types.Array(types.float64, 1, "C", readonly=True)

_CLIENT = (
    (distinct, (_IDS, types.uint64, _INVERSE, _INVERSE, _NUMBERS)),
    (arrange, (_IDS, _PARTS, _INVERSE, _NUMBERS, _NUMBERS)),
)
_SERVER = (
    (check_parts, (_IDS, _PARTS, types.int64, types.int64, _NUMBERS)),
    (find_parts, (_IDS, _PARTS, _INVERSE)),
    *_CLIENT,
    (mark, (_NUMBERS, _IDS, types.int64, _NUMBERS)),
    (first_repeated, (_IDS, types.uint64, _INVERSE)),
    (count_up, (types.Array(types.uint16, 2, "C"), _IDS, _NUMBERS)),
    (draw, (_IDS, types.int64, types.int64, types.Array(types.boolean, 1, "C"))),
    *hash_index.SIGNATURES,
)


def _matrices(dtype: str) -> tuple[Any, Any]:
    element = numba.from_dtype(np.dtype(dtype))
    return types.Array(element, 2, "C", readonly=True), types.Array(element, 2, "C")


def _weights(dtype: str) -> Any:
    return types.Array(numba.from_dtype(np.dtype(dtype)), 1, "C")


def warm_client(dtypes: Iterable[str]) -> int:
    """Load or compile a client's kernels for tables of these dtypes; return how many were new."""
    found: list[tuple[Any, tuple[Any, ...]]] = list(_CLIENT)
    for dtype in dtypes:
        read, write = _matrices(dtype)
        found += [(expand, (read, _READ_INVERSE, write)), (sum_equal, (read, _READ_INVERSE, write))]
    return sum(CACHE.load(*each) for each in found)


def warm_server(dtypes: Iterable[str]) -> int:
    """Load or compile a server's kernels for tables of these dtypes, without the rules."""
    found: list[tuple[Any, tuple[Any, ...]]] = list(_SERVER)
    for dtype in dtypes:
        read, write = _matrices(dtype)
        found += [
            (gather, (read, _IDS, write)),
            (evict, (_SLOTS, _NUMBERS, types.uint64, _NUMBERS, write, _IDS)),
            (add_weighted, (read, _INVERSE, _weights(dtype), _INVERSE, types.int64, write)),
            (initialize, (write, _IDS, _IDS, _RECIPE, types.int64)),
        ]
    return sum(CACHE.load(*each) for each in found)
