"""Lists of texts as values of bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.columnar.texts import packed, unpacked
from feeding.errors import ChunkError

ROWS = st.lists(st.lists(st.text(max_size=5), max_size=4), min_size=1, max_size=6)


def packed_rows(rows: list[list[str]]) -> list[memoryview]:
    """The bytes of each row."""
    texts = [text.encode() for row in rows for text in row]
    starts = np.cumsum([0, *map(len, texts)])
    offsets = np.cumsum([0, *map(len, rows)])
    data, bounds = packed(np.frombuffer(b"".join(texts), np.uint8), starts, offsets)
    return [data.data[low:high] for low, high in itertools.pairwise(bounds)]


@pytest.mark.slow
@given(ROWS)
def test_rows_come_back(rows: list[list[str]]):
    assert [unpacked(row, "tags") for row in packed_rows(rows)] == rows


def test_the_bytes_are_lengths_and_texts():
    (row,) = packed_rows([["a", "", "é"]])
    assert bytes(row) == bytes.fromhex("01000000 61 00000000 02000000 c3a9")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("05000000 61", r"column 'tags': a text ends at byte 9 of a row of 5"),
        ("0100", r"'tags': a text ends at byte \d+ of a row of 2"),
        ("01000000 ff", "'tags': text that is not UTF-8"),
    ],
)
def test_bytes_that_are_no_texts_are_refused(row: str, message: str):
    with pytest.raises(ChunkError, match=message):
        unpacked(memoryview(bytes.fromhex(row)), "tags")
