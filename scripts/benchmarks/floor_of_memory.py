"""What the memory of a machine allows a large table: random reads, and pages at their first use.

Covers: the memory accesses of a lookup without anything else; giving memory back to the system.
Does not: look anything up. Used by scripts/benchmarks/table_size.py.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from ps.jit.intrinsics import prefetch

Array = np.ndarray[Any, Any]

HUGE_PAGE_BYTES = 2 << 20
SLOT_BYTES = 16
"""Bytes of the index, per row."""
AHEAD = 12
PARTS = 4
"""Segments of a table; the ids of a request are arranged by them."""
REPEATS = 101


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]  # numba is untyped
def _sum_of(column: Array, at: Array) -> int:
    """Read a number for each row."""
    total = 0
    for i in range(at.size):
        if i + AHEAD < at.size:
            prefetch(column, at[i + AHEAD])
        total += column[at[i]]
    return total


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]  # numba is untyped
def _copy(rows: Array, at: Array, out: Array) -> None:
    """Copy the values of each row."""
    flat = rows.reshape(rows.size)
    width = rows.shape[1]
    for i in range(at.size):
        if i + AHEAD < at.size:
            prefetch(flat, at[i + AHEAD] * width)
        row = at[i]
        for j in range(out.shape[1]):
            out[i, j] = rows[row, j]


class MemoryFloor:
    """Arrays as large as a table's with one slot per row, on huge pages where there are any.

    Args:
        num_rows: number of rows of the table.
        dim: numbers of a row; it has a slot beside each, of float32 both.
        nbytes: memory to hold, at least what the arrays take.
    """

    def __init__(self, num_rows: int, dim: int, nbytes: int) -> None:
        self._dim = dim
        self._given = 0
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=private)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        self._start = -whole.ctypes.data % HUGE_PAGE_BYTES
        self._all: Array | None = whole[self._start : self._start + nbytes]
        self.first_use_ms = self._used_ms(self._all)
        """Processor time in which the system hands out 2 MiB that nobody has used."""
        some = min(nbytes, 32 * HUGE_PAGE_BYTES) // mmap.PAGESIZE * mmap.PAGESIZE
        self._memory.madvise(mmap.MADV_DONTNEED, self._start, some)
        self.second_use_ms = self._used_ms(self._all[:some])
        """The same for memory that was given back just before."""
        ends = np.cumsum([num_rows * 2 * dim * 4, num_rows * 8, num_rows * SLOT_BYTES])
        self._rows = self._all[: ends[0]].view(np.float32).reshape(num_rows, 2 * dim)
        self._ids = self._all[ends[0] : ends[1]].view(np.int64)
        self._slots = self._all[ends[1] : ends[2]].view(np.int64)

    def lookups_ms(self, sizes: Sequence[int], num_ids: int) -> list[float]:
        """Return the median processor time of lookups of this many ids, drawn evenly.

        Args:
            sizes: sizes of several tables; each is the first rows, and they take turns.
            num_ids: number of ids of a lookup.
        """
        random = np.random.default_rng(0)
        outs = np.array_split(np.empty((num_ids, self._dim), np.float32), PARTS)
        times_s: list[list[float]] = [[] for _ in sizes]
        for _ in range(REPEATS):
            for num_rows, taken_s in zip(sizes, times_s, strict=True):
                parts = [
                    random.integers(num_rows * k // PARTS, num_rows * (k + 1) // PARTS, len(each))
                    for k, each in enumerate(outs)
                ]
                begun_s = time.thread_time()
                for at, part in zip(parts, outs, strict=True):
                    _sum_of(self._slots, at)
                    _sum_of(self._ids, at)
                    _copy(self._rows, at, part)
                taken_s.append(time.thread_time() - begun_s)
        return [round(float(np.median(taken_s)) * 1e3, 4) for taken_s in times_s]

    def give_back(self, nbytes: int) -> None:
        """Give some of the memory back to the system; lookups are over."""
        end = len(self._memory) - HUGE_PAGE_BYTES
        start = min(self._given // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, end)
        self._given += nbytes
        stop = min(self._given // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, end)
        if stop > start:
            self._memory.madvise(mmap.MADV_DONTNEED, self._start + start, stop - start)

    def close(self) -> None:
        """Give everything back."""
        self._all = None
        del self._rows, self._ids, self._slots
        self._memory.close()

    @staticmethod
    def _used_ms(memory: Array) -> float:
        """Touch memory, [n] uint8; return the processor time of 2 MiB."""
        begun_s = time.thread_time()
        memory[:: mmap.PAGESIZE] = 1
        return round((time.thread_time() - begun_s) * 1e3 * HUGE_PAGE_BYTES / memory.size, 3)
