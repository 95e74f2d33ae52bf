"""Routing of ids: the server and the segment of an id; and a batch's ids, ready to be sent.

Covers: the cut of a table's virtual buckets into parts, deduplication, summing of equal ids.
Does not: check what users give (ps.tables.ids), send (ps.client.tables).
Runs in: servers and workers; imports numba.      Threads: any; no state.

The first bits of an id's hash name one of 4096 virtual buckets. Buckets are dealt to the servers in
contiguous ranges (ps.manifest.sharding), and a server's range is cut again into its segments.
Parts are numbered through all servers, so both cuts together are one array of 4096 numbers.
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
from ps.tables.ids import as_bits
from ps.tables.kernels import NUM_BUCKETS

Array = np.ndarray[Any, Any]


@functools.lru_cache(maxsize=64)
def parts_of_buckets(num_servers: int, num_segments: int) -> Array:
    """Return the part of each bucket, int32, ascending: server * num_segments + segment.

    All callers share the array: it must not be changed.
    """
    parts = np.empty(NUM_BUCKETS, np.int32)
    for server, owned in enumerate(deal([1] * NUM_BUCKETS, num_servers)):
        for place, bucket in enumerate(owned):
            parts[bucket] = server * num_segments + place * num_segments // len(owned)
    return parts


@dataclass(frozen=True, slots=True)
class RoutedIds:
    """One table's ids of a batch: each distinct one once, in the order of servers and segments.

    Made by `Router.route`; serves a lookup and the push after it.
    """

    shape: tuple[int, ...]
    """Of the ids as they were given."""
    unique: Array
    """int64: the distinct ids as they travel."""
    inverse: Array
    """int32, flat: for each given id its place in `unique`."""
    server_ends: tuple[int, ...]
    """Where each server's ids end in `unique`."""

    def own(self, server: int) -> slice:
        """Which of the distinct ids are this server's."""
        return slice(self.server_ends[server - 1] if server else 0, self.server_ends[server])

    def num_own(self, server: int) -> int:
        """How many distinct ids are this server's."""
        return len(range(self.unique.size)[self.own(server)])

    def given(self, server: int) -> int:
        """How many of the given ids this server's distinct ones stand for, about."""
        return -(-self.inverse.size * self.num_own(server) // max(1, self.unique.size))

    def expand(self, values: Array) -> Array:
        """Return one row per given id, in their shape, from one per distinct id."""
        out = np.empty((self.inverse.size, values.shape[1]), values.dtype)
        kernels.expand(values, self.inverse, out)
        return out.reshape((*self.shape, values.shape[1]))

    def summed(self, grads: Array) -> Array:
        """Return one row per distinct id: the sum over equal ids, in the order they were given."""
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
        self._num_parts = num_servers * spec.segments
        self._parts = parts_of_buckets(num_servers, spec.segments)

    def route(self, ids: ArrayLike) -> RoutedIds:
        """Check, deduplicate and arrange ids.

        Raises:
            IdError: see ps.tables.ids.
        """
        bits = as_bits(self.spec, ids)
        flat = np.ascontiguousarray(bits.reshape(-1))
        inverse = np.empty(flat.size, np.int32)
        found = np.empty(flat.size, np.int64)
        heads = np.full(1 << (2 * flat.size).bit_length(), -1, np.int32)
        unique = found[: kernels.distinct(flat, heads, inverse, found)]
        arranged = np.empty(unique.size, np.int64)
        ends = np.empty(self._num_parts, np.int64)
        kernels.arrange(unique, self._parts, inverse, ends, arranged)
        last = self.spec.segments
        return RoutedIds(bits.shape, arranged, inverse, tuple(ends[last - 1 :: last].tolist()))
