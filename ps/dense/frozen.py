"""One server's part of the frozen groups: values that are set once and never pushed to.

Covers: the buckets' memory, filling them, their bytes.
Does not: talk to anybody (ps.server.handlers), write files (ps.checkpoint.writer).
Runs in: PS processes.
Threads: filled by one before anybody else sees it; immutable from then on, so there is no lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps.manifest.manifest import Bucket, Layout, Manifest
from ps.manifest.sharding import deal

Array = np.ndarray[Any, Any]


class FrozenValues:
    """The frozen buckets that one server owns; zeros at first.

    Args:
        manifest: what is trained. Its frozen groups may be none.
        rank: this server's rank.
        num_servers: servers that share the buckets.
    """

    def __init__(self, manifest: Manifest, *, rank: int, num_servers: int) -> None:
        layout = Layout.frozen(manifest)
        owned = deal(layout.bucket_bytes(), num_servers)[rank]
        self.buckets: tuple[Bucket, ...] = layout.buckets[owned.start : owned.stop]
        """Owned buckets by ascending id."""
        self._arrays = {
            bucket.id: np.zeros(bucket.num_elements, layout.group(bucket.group).numpy_dtype)
            for bucket in self.buckets
        }

    def __contains__(self, bucket_id: int) -> bool:
        return bucket_id in self._arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def load(self, bucket_id: int, values: Array) -> None:
        """Set a bucket's values: 1-d, of its dtype and size.

        Args:
            bucket_id: number of the bucket.
            values: [num_elements] of the group's dtype.
        """
        np.copyto(self._arrays[bucket_id], values)

    def memory(self) -> list[memoryview]:
        """Return the buckets' bytes in order, to be filled."""
        return [array.data.cast("B") for array in self._arrays.values()]

    def views(self) -> list[memoryview]:
        """Return the buckets' bytes in order, read-only."""
        return [view.toreadonly() for view in self.memory()]
