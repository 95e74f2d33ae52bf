"""Memory of results and of pieces in transfer, reused when no array refers to it.

Covers: which memory is free, how much is kept.
Does not: know its content (group).
Threads: the one that makes the collective calls; results may be dropped in any thread.

The kernel clears new memory of some MB page by page, which takes as long as a copy of it. A
loop that drops each result reuses the memory of the previous one.
"""

from __future__ import annotations

import weakref

import numpy as np

from tfos.collectives.layout import Array

KEPT_BYTES = 256 << 20
"""Bytes kept per process: three results of 64 MB and their pieces. Larger results get new
memory."""
_MAX_KEPT = 64
_FEW_BYTES = 64 << 10
"""Smaller blocks are not kept: the allocator provides them at once."""


class ReusedMemory:
    """Lends memory, and takes it back when no array refers to it."""

    def __init__(self) -> None:
        self._lent: list[tuple[Array, weakref.ref[Array]]] = []
        """All kept blocks, each with the array that was lent, the most recently lent one last."""

    def take(self, num_bytes: int) -> Array:
        """Return memory of any content that no one else uses, as uint8 [num_bytes]."""
        if num_bytes <= _FEW_BYTES:
            return np.empty(num_bytes, np.uint8)
        free = [
            place
            for place, (memory, lent) in enumerate(self._lent)
            if memory.nbytes == num_bytes and lent() is None
        ]
        memory = self._lent.pop(free[-1])[0] if free else np.empty(num_bytes, np.uint8)
        # Over a memoryview, so that its parts refer to it and not to the underlying array.
        lent: Array = np.frombuffer(memory.data, np.uint8)
        self._lent.append((memory, weakref.ref(lent)))
        num_kept_bytes = sum(each.nbytes for each, _ in self._lent)
        while num_kept_bytes > KEPT_BYTES or len(self._lent) > _MAX_KEPT:
            num_kept_bytes -= self._lent.pop(0)[0].nbytes  # its users keep it
        return lent

    def clear(self) -> None:
        """Keep no more memory; lent blocks stay with their users."""
        self._lent.clear()
