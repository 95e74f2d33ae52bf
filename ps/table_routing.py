"""Which server, and which of its segments, holds an id. Pure.

Covers: the cut of a table's virtual buckets into parts.      Does not: hash (ps.table_kernels).

The first bits of an id's hash name one of 4096 virtual buckets. Buckets are dealt to the servers in
contiguous ranges (ps.sharding), and a server's range is cut again into its segments. Parts are
numbered through all servers, so both cuts together are one table of 4096 numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps.sharding import deal

Array = np.ndarray[Any, Any]


def parts_of_buckets(num_buckets: int, num_servers: int, num_segments: int) -> Array:
    """Return the part of each bucket, int32, ascending: server * num_segments + segment."""
    parts = np.empty(num_buckets, np.int32)
    for server, owned in enumerate(deal([1] * num_buckets, num_servers)):
        for place, bucket in enumerate(owned):
            parts[bucket] = server * num_segments + place * num_segments // len(owned)
    return parts
