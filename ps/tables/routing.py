"""Routing of ids: the server and the segment of an id; a batch's ids in the order of servers.

Covers: the division of a table's virtual buckets into parts, deduplication, summing of equal ids.
Does not: check ids (ps.tables.ids), send (ps.client.tables).
Runs in: servers and workers; imports numba.      Threads: any; no state.

The first bits of an id's hash select one of 4096 virtual buckets. Servers own contiguous ranges of
buckets (ps.manifest.sharding), and a server's range is divided into its segments. Parts are
numbered through all servers, so one array of 4096 numbers describes both divisions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ps.manifest.sharding import deal
from ps.manifest.table_spec import TableSpec
from ps.tables import kernels
from ps.tables.hash_index import new_key
from ps.tables.ids import as_bits, check_one_request
from ps.tables.kernels import NUM_BUCKETS
from rpc.field_texts import with_field_texts

Array = np.ndarray[Any, Any]


@functools.lru_cache(maxsize=64)
def parts_of_buckets(num_servers: int, num_segments: int) -> Array:
    """Return the part of each bucket, [4096] int32, ascending: server * num_segments + segment.

    All callers share the array: it must not be changed.

    Args:
        num_servers: servers that share the table, >= 1.
        num_segments: segments of one server's share, >= 1.
    """
    parts = np.empty(NUM_BUCKETS, np.int32)
    for server, owned in enumerate(deal([1] * NUM_BUCKETS, num_servers)):
        for place, bucket in enumerate(owned):
            parts[bucket] = server * num_segments + place * num_segments // len(owned)
    return parts


def arranged(ids: Array, parts: Array, ends: Array, key: np.uint64) -> tuple[Array, Array]:
    """Return the distinct ids sorted by part, and where each given id is among them.

    Args:
        ids: [n] int64.
        parts: [4096] int32, part of each virtual bucket.
        ends: [num_parts] int64; filled with the end of each part.
        key: any, of ps.tables.hash_index.new_key.

    Returns:
        [num_unique] int64, in each part in the order of their first occurrence; [n] int32.
    """
    inverse = np.empty(ids.size, np.int32)
    found = np.empty(ids.size, np.int64)
    heads = np.full(1 << (2 * ids.size).bit_length(), -1, np.int32)
    unique = found[: kernels.distinct(ids, key, heads, inverse, found)]
    out = np.empty(unique.size, np.int64)
    kernels.arrange(unique, parts, inverse, ends, out)
    return out, inverse


@with_field_texts
@dataclass(frozen=True, slots=True, weakref_slot=True)
class RoutedIds:
    """Distinct ids of one table's batch, in the order of servers and segments.

    Made by `Router.route`, for a lookup and the push after it.
    """

    shape: tuple[int, ...]
    """Shape of the given ids."""
    unique: Array
    """[num_unique] int64: the distinct ids, as bits."""
    inverse: Array
    """[n] int32: index in `unique` of each given id, flattened."""
    server_ends: tuple[int, ...]
    """End of each server's ids in `unique`."""

    def own(self, server: int) -> slice:
        """Slice of a server's ids in `unique`."""
        return slice(self.server_ends[server - 1] if server else 0, self.server_ends[server])

    def num_own(self, server: int) -> int:
        """Number of a server's distinct ids."""
        return len(range(self.unique.size)[self.own(server)])

    def given(self, server: int) -> int:
        """Approximate number of given ids that this server's distinct ones replace."""
        return -(-self.inverse.size * self.num_own(server) // max(1, self.unique.size))

    def expand(self, values: Array) -> Array:
        """Return values per given id, [*shape, dim], from distinct ones, [num_unique, dim]."""
        out = np.empty((self.inverse.size, values.shape[1]), values.dtype)
        kernels.expand(np.ascontiguousarray(values), self.inverse, out)
        return out.reshape((*self.shape, values.shape[1]))

    def summed(self, grads: Array) -> Array:
        """Return gradients [*shape, dim] summed over equal ids, in order: [num_unique, dim]."""
        out = np.zeros((self.unique.size, grads.shape[-1]), grads.dtype)
        flat = np.ascontiguousarray(grads).reshape(-1, grads.shape[-1])
        kernels.sum_equal(flat, self.inverse, out)
        return out


class Router:
    """Routes the ids of one table.

    Args:
        spec: the table.
        num_servers: servers that share it.
    """

    def __init__(self, spec: TableSpec, num_servers: int) -> None:
        self.spec = spec
        self._num_parts = num_servers * spec.num_parts
        self._parts = parts_of_buckets(num_servers, spec.num_parts)
        self._key = new_key()

    def route(self, ids: ArrayLike) -> RoutedIds:
        """Check, deduplicate and sort ids.

        Args:
            ids: integers of any shape.

        Raises:
            IdError: see ps.tables.ids.
        """
        bits = as_bits(self.spec, ids)
        check_one_request(self.spec, bits)
        flat = np.ascontiguousarray(bits.reshape(-1))
        ends = np.empty(self._num_parts, np.int64)
        unique, inverse = arranged(flat, self._parts, ends, self._key)
        last = self.spec.num_parts
        return RoutedIds(bits.shape, unique, inverse, tuple(ends[last - 1 :: last].tolist()))
