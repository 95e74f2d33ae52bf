"""Rows of columns, split, joined and reordered."""

from __future__ import annotations

import numpy as np
import pytest

from feeding.columnar.batch import Ragged
from feeding.columnar.ops import joined, reordered, row_of, rows_within

RAGGED = Ragged(np.array([1, 2, 3]), np.array([0, 0, 2, 3]))


def test_the_row_of_an_item_is_no_empty_one():
    assert [row_of(RAGGED.offsets, item) for item in range(3)] == [1, 1, 2]


def test_ragged_columns_are_joined_and_reordered():
    (found,) = joined([(RAGGED,), (RAGGED,)])
    assert isinstance(found, Ragged)
    assert found.values.tolist() == [1, 2, 3, 1, 2, 3]
    assert found.offsets.tolist() == [0, 0, 2, 3, 3, 5, 6]
    (taken,) = reordered((found,), np.array([2, 0, 4]))
    assert isinstance(taken, Ragged)
    assert (taken.values.tolist(), taken.offsets.tolist()) == ([3, 1, 2], [0, 1, 1, 3])


def test_no_rows_of_a_column_are_dropped_where_only_some_parts_are_ragged():
    with pytest.raises(TypeError, match="1 of 2 parts of a column are ragged"):
        joined([(RAGGED,), (np.zeros((2, 2)),)])


def test_texts_take_their_lengths():
    texts = np.array([b"x" * 100, b"", b"y" * 50], object)
    assert rows_within((texts,), 100) == (2, 100)
    pairs = np.array([[b"x" * 60, b"x" * 40], [b"", b"y"]], object)
    assert rows_within((pairs, np.zeros(2, np.int64)), 108) == (1, 108)
    assert rows_within((pairs, np.zeros(2, np.int64)), 117) == (2, 117)


def test_texts_in_lists_take_their_lengths():
    texts = np.array([b"x" * 100, b"", b"y" * 50, b"z" * 7], object)
    ragged = Ragged(texts, np.array([0, 2, 2, 4]))  # rows of 100, 0 and 57 bytes
    assert rows_within((ragged,), 100) == (2, 100)
    assert rows_within((ragged,), 99) == (0, 0)
    assert rows_within((ragged, np.zeros(3, np.int64)), 181) == (3, 181)
