"""Shares: how many bytes of a model each server has, and whether requests can bring and pull them.

Covers: the limit of one server's share, and of a seed, which brings both layouts at once; how many
servers would do.
Does not: deal the buckets (ps.manifest.sharding).      Pure; no threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps.errors import PSSettingsError
from ps.manifest.manifest import Layout, Manifest
from ps.manifest.sharding import deal
from rpc.limits import DEFAULT_LIMITS

MAX_SHARE_BYTES = DEFAULT_LIMITS.max_payload_bytes
"""Limit of one request or reply."""


def shares(manifest: Manifest, num_servers: int) -> list[int]:
    """Return the bytes of each server's values, frozen ones included."""
    return _shares((Layout.of(manifest), Layout.frozen(manifest)), num_servers)


def check_pulls(manifest: Manifest, *, num_servers: int, rank: int) -> None:
    """Refuse values that no pull could bring; a frozen group's are pulled apart from the others.

    Args:
        manifest: manifest of the model.
        num_servers: number of servers that it is dealt to.
        rank: rank of the server that checks its own.

    Raises:
        PSSettingsError: has the least number of servers for it.
    """
    for layout in (Layout.of(manifest), Layout.frozen(manifest)):
        nbytes = _shares((layout,), num_servers)[rank]
        if nbytes > MAX_SHARE_BYTES:
            least = _least((layout,), num_servers, 0)
            raise PSSettingsError(
                f"ps:{rank} of {num_servers} would hold {nbytes} bytes of values, but a server "
                f"answers a pull with at most {MAX_SHARE_BYTES}: start at least {least} servers",
                {"least_servers": str(least)},
            )


def check_seed(manifest: Manifest, *, num_servers: int, manifest_bytes: int) -> None:
    """Refuse values that no seed could bring: the manifest, the frozen ones and the others at once.

    Args:
        manifest: manifest of the model.
        num_servers: number of servers that it is dealt to.
        manifest_bytes: size of the encoded manifest, in bytes.

    Raises:
        PSSettingsError: has the least number of servers for it.
    """
    largest = max(shares(manifest, num_servers))
    if largest + manifest_bytes > MAX_SHARE_BYTES:
        layouts = (Layout.of(manifest), Layout.frozen(manifest))
        least = _least(layouts, num_servers, manifest_bytes)
        raise PSSettingsError(
            f"a seed would bring one of {num_servers} servers {largest} bytes of values, frozen "
            f"ones included, and a manifest of {manifest_bytes}, but one request has at most "
            f"{MAX_SHARE_BYTES}: start at least {least} servers",
            {"least_servers": str(least)},
        )


def _shares(layouts: Sequence[Layout], num_servers: int) -> list[int]:
    found = [0] * num_servers
    for layout in layouts:
        sizes = layout.bucket_bytes()
        for rank, owned in enumerate(deal(sizes, num_servers)):
            found[rank] += sum(sizes[owned.start : owned.stop])
    return found


def _least(layouts: Sequence[Layout], num_servers: int, others_bytes: int) -> int:
    """Return how many servers would do, more than `num_servers`; with a bucket each none helps."""
    most = max(len(layout.buckets) for layout in layouts)
    least = num_servers + 1
    while least < most and max(_shares(layouts, least)) + others_bytes > MAX_SHARE_BYTES:
        least += 1
    return least
