"""Sharding: assigns buckets to servers, and sizes them. Pure: bytes in, ranges out.

Covers: which server owns which buckets, buckets small enough for a small model on many servers.
Does not: hold parameters (ps.dense.shard).
"""

from __future__ import annotations

from collections.abc import Sequence

from ps.errors import PSSettingsError

BUCKET_BYTES = 262_144
"""256 KiB of gradient, values and two slots stay in a core's second-level cache."""
_LEAST_BYTES = 4096
"""Below a page, the cost of a request is more than that of its bytes."""
_STEP_BYTES = 2048
"""256 float64: the blocks of packed gradients lie as in larger buckets."""
_BUCKETS_PER_SERVER = 4
"""deal() gives a server its share and one bucket at most, so a quarter more than its share."""


def bucket_bytes_for(model_bytes: int, num_servers: int) -> int:
    """Return the size of buckets that spreads a model over all servers.

    Args:
        model_bytes: bytes of all groups.
        num_servers: >= 1.

    Returns:
        Bytes, a multiple of 2048: 256 KiB for a model of 1 MiB per server or more, less for a
        smaller one, at least 4 KiB.
    """
    if num_servers == 1:
        return BUCKET_BYTES
    wanted = model_bytes // (num_servers * _BUCKETS_PER_SERVER)
    return min(BUCKET_BYTES, max(_LEAST_BYTES, wanted - wanted % _STEP_BYTES))


def deal(bucket_bytes: Sequence[int], num_servers: int) -> tuple[range, ...]:
    """Divide the buckets into one contiguous range per server, balanced by bytes.

    A bucket belongs to the server whose equal share of all bytes contains its middle, so no server
    gets more than its share plus one bucket. Ranges are contiguous, so a server's slice of a flat
    gradient is one piece of memory and one request. With fewer buckets than servers some ranges are
    empty.

    Args:
        bucket_bytes: size of each bucket in bytes, by bucket id; sizes are >= 0.
        num_servers: >= 1.

    Returns:
        One range of bucket ids per server rank; together they are 0..len(bucket_bytes) in order.

    Raises:
        PSSettingsError: num_servers < 1 or a negative size.
    """
    if num_servers < 1:
        raise PSSettingsError(f"num_servers must be >= 1, got {num_servers}")
    smallest = min(bucket_bytes, default=0)
    if smallest < 0:
        raise PSSettingsError(f"bucket sizes must be >= 0 bytes, got {smallest}")
    total = sum(bucket_bytes)
    ends = [0] * num_servers
    before = 0
    for bucket_id, size in enumerate(bucket_bytes):
        twice_middle = 2 * before + size
        server = min(num_servers - 1, twice_middle * num_servers // max(1, 2 * total))
        ends[server] = bucket_id + 1
        before += size
    starts = [0] * num_servers
    for server in range(num_servers):
        starts[server] = ends[server - 1] if server else 0
        ends[server] = max(ends[server], starts[server])
    return tuple(range(start, stop) for start, stop in zip(starts, ends, strict=True))
