"""Growable arrays: memory whose pages move instead of being copied.

Covers: a 1-d or 2-d array whose first axis grows.      Does not: lock (ps.tables.segment).
Runs in: PS processes, on Linux (mremap).
Threads: none; the owner of the array serialises `reserve` with every use of a view.

Growth remaps pages instead of copying them, so even gigabytes take a moment, and pages that were
never written take no memory.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_GROWTH = 1.5
_MIN_BYTES = mmap.PAGESIZE
_HUGE_PAGES_FROM_BYTES = 32 << 20
"""Above this size huge pages reduce TLB misses; below it half-empty huge pages would waste
memory."""


class GrowingArray:
    """Rows of one dtype in one contiguous piece of memory; new rows are zero.

    A view of `rows` stays valid after `reserve` and shows the rows of that moment.

    Args:
        dtype: dtype of the elements.
        width: elements of a row; None makes the array 1-d.
    """

    def __init__(self, dtype: np.dtype[Any], width: int | None = None) -> None:
        self._dtype = dtype
        self._row_shape = () if width is None else (width,)
        self.row_nbytes = dtype.itemsize * (1 if width is None else width)
        self._memory = _new_memory(max(_MIN_BYTES, self.row_nbytes))
        self.rows: Array = self._view()
        """[capacity] or [capacity, width]; after `reserve` it is another array."""

    @property
    def capacity(self) -> int:
        """Number of rows that fit."""
        return len(self.rows)

    def reserve(self, num_rows: int) -> None:
        """Make room for at least `num_rows` rows; existing rows keep their content.

        Raises:
            MemoryError: the system has no more; the array is unchanged.
        """
        if num_rows <= self.capacity:
            return
        nbytes = max(num_rows * self.row_nbytes, int(len(self._memory) * _GROWTH))
        nbytes += -nbytes % mmap.PAGESIZE
        self.rows = np.empty(0, self._dtype)  # memory with a view cannot move
        try:
            self._grow(nbytes)
            if nbytes >= _HUGE_PAGES_FROM_BYTES:
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            raise MemoryError(f"no memory for {nbytes} bytes of table rows: {error}") from error
        finally:
            self.rows = self._view()

    def _grow(self, nbytes: int) -> None:
        try:
            self._memory.resize(nbytes)
        except BufferError:  # a view exists, in a traceback for example: it keeps its memory
            larger = _new_memory(nbytes)
            larger[: len(self._memory)] = self._memory[:]
            self._memory = larger

    def _view(self) -> Array:
        num_rows = len(self._memory) // self.row_nbytes
        flat = np.frombuffer(self._memory, np.uint8, count=num_rows * self.row_nbytes)
        return flat.view(self._dtype).reshape((num_rows, *self._row_shape))


def _new_memory(nbytes: int) -> mmap.mmap:
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
