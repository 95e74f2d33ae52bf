"""Arrays that grow in place keep their rows, and never move under somebody who looks at them."""

from __future__ import annotations

import resource

import numpy as np
import pytest

from ps.tables.growable_array import GrowingArray


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
