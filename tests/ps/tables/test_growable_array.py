"""Arrays that grow in place keep their rows, and never move under somebody who looks at them."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource

import numpy as np
import pytest

from ps.tables import pages
from ps.tables.growable_array import GrowingArray
from ps.tables.pages import HUGE_FROM_BYTES, HUGE_PAGE_BYTES, Pages


@pytest.mark.parametrize("width", [None, 1, 7])
def test_rows_keep_their_content_and_new_ones_are_zero(width):
    array = GrowingArray(np.dtype(np.float32), width)
    total = 0
    for num_rows in (1, 10, 5000, 5001, 300_000):
        array.reserve(num_rows)
        assert array.capacity >= num_rows
        assert not array.rows[total:num_rows].any()
        array.rows[total:num_rows] = np.arange(total, num_rows).reshape(-1, *[1] * bool(width))
        total = num_rows
        first_of_row = array.rows if width is None else array.rows[:, -1]
        assert np.array_equal(first_of_row[:total], np.arange(total))


def test_a_view_that_somebody_keeps_stays_as_it_was():
    array = GrowingArray(np.dtype(np.int64))
    array.rows[0] = 7
    kept = array.rows
    array.reserve(100_000)
    array.rows[0] = 8
    assert kept[0] == 7
    assert array.rows[0] == 8
    array.reserve(1_000_000)
    assert array.rows[0] == 8


def test_no_memory_is_a_memory_error_and_nothing_is_lost():
    array = GrowingArray(np.dtype(np.int64))
    array.rows[0] = 7
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, before[1]))
    try:
        with pytest.raises(MemoryError, match="no memory for"):
            array.reserve(1 << 41)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert array.rows[0] == 7
    array.reserve(10_000)
    assert array.rows[0] == 7


def test_large_memory_stays_aligned_for_huge_pages_while_it_moves():
    array = GrowingArray(np.dtype(np.int64))
    for nbytes in (HUGE_FROM_BYTES, HUGE_FROM_BYTES + 1, 8 * HUGE_FROM_BYTES):
        array.reserve(nbytes // 8 + 1)
        assert array.rows.ctypes.data % HUGE_PAGE_BYTES == 0
        assert array.rows.nbytes % HUGE_PAGE_BYTES == 0


@pytest.fixture
def released(monkeypatch) -> list[int]:
    """The addresses at which memory was given back."""
    addresses: list[int] = []
    give_back = pages._munmap

    def noted(address: int, nbytes: int) -> int:
        addresses.append(address)
        return give_back(address, nbytes)

    monkeypatch.setattr(pages, "_munmap", noted)
    return addresses


@pytest.mark.parametrize("nbytes", [1 << 16, 2 * HUGE_FROM_BYTES])
def test_memory_is_released_with_its_last_view(nbytes, released):
    memory = Pages(nbytes)
    memory.array[:] = 1
    view, address = memory.array[5:9], memory.array.ctypes.data
    memory.grow(2 * nbytes)
    second = memory.array.ctypes.data
    assert address not in released
    assert memory.array[nbytes - 1] == 1
    assert view.tolist() == [1] * 4
    del view
    assert address in released
    assert second not in released
    del memory
    assert second in released


def test_no_view_is_copied_and_pages_move(monkeypatch):
    monkeypatch.setattr(ctypes, "memmove", None)
    memory = Pages(1 << 16)
    memory.array[:] = 1
    memory.grow(4 * HUGE_FROM_BYTES)
    memory.grow(8 * HUGE_FROM_BYTES)
    assert memory.array[: 1 << 16].all()
    assert not memory.array[1 << 16 :].any()


def test_a_system_without_huge_pages_uses_small_ones(monkeypatch):
    monkeypatch.setattr(pages, "_madvise", lambda *_: -1)
    memory = Pages(HUGE_FROM_BYTES)
    memory.grow(2 * HUGE_FROM_BYTES)
    memory.array[-1] = 1


def test_a_view_survives_growth_that_finds_no_memory(released):
    memory = Pages(1 << 16)
    view = memory.array[:3]
    view[:] = 4
    address = view.ctypes.data
    with pytest.raises(MemoryError, match="no memory for"):
        memory.grow(1 << 60)
    del memory
    gc.collect()
    assert view.tolist() == [4] * 3
    assert released == []
    del view
    assert released == [address]


def test_growth_that_finds_no_memory_leaves_no_addresses_reserved(monkeypatch):
    """A full table tries again with each push; addresses are as finite as memory."""
    made, mapped, released = Pages(mmap.PAGESIZE), [], []
    really_map, really_unmap = pages._mapped, pages._munmap

    def map_and_note(nbytes: int, protection: int) -> int:
        mapped.append((really_map(nbytes, protection), nbytes))
        return mapped[-1][0]

    def note_and_unmap(address: int, nbytes: int) -> int:
        released.append((address, nbytes))
        return really_unmap(address, nbytes)

    monkeypatch.setattr(pages, "_mapped", map_and_note)
    monkeypatch.setattr(pages, "_munmap", note_and_unmap)
    monkeypatch.setattr(pages, "_mremap", lambda *_: pages._FAILED)
    made.array[:] = 7
    for _ in range(3):
        with pytest.raises(MemoryError):
            made.grow(10 * mmap.PAGESIZE)
    assert released == mapped
    assert len(mapped) == 3
    assert (made.array == 7).all()
