"""Growable arrays: memory whose pages move instead of being copied.

Covers: a 1-d or 2-d array whose first axis grows.
Does not: lock (ps.tables.segment), map memory (ps.tables.pages).
Runs in: PS processes, on Linux.
Threads: none; the owner of the array serialises `reserve` with every use of a view.

Growth remaps pages instead of copying them, so even gigabytes take a moment, and pages that were
never written take no memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ps.tables.pages import Pages

Array = np.ndarray[Any, Any]

_GROWTH = 1.5


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
        self._pages = Pages(self.row_nbytes)
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
        nbytes = max(num_rows * self.row_nbytes, int(self._pages.array.nbytes * _GROWTH))
        self.rows = np.empty(0, self._dtype)  # memory with a view is copied
        try:
            self._pages.grow(nbytes)
        finally:
            self.rows = self._view()

    def _view(self) -> Array:
        flat = self._pages.array
        num_rows = flat.nbytes // self.row_nbytes
        return flat[: num_rows * self.row_nbytes].view(self._dtype).reshape(-1, *self._row_shape)
