"""Splits read side by side: the order, its independence of blocks, the bounds of memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.columnar.batch import Batch, Ragged
from feeding.columnar.ops import Columns, num_rows, rows_within
from feeding.columnar.schema import ColumnGroup, ColumnSpec, Schema
from feeding.errors import FeedSettingsError
from feeding.reading.lanes import Lanes, turn_rows
from feeding.reading.positions import WorkerPart
from feeding.reading.reader import DirectReader
from feeding.reading.splits import SourceFile, Split

COLUMN = ColumnSpec("n", "tensor", "scalar", "int64")


class Pieces:
    """One file whose pieces have known rows, each row the number of its piece.

    Args:
        rows: of each piece.
        block: rows that come at a time.
        held_bytes: of a piece.
    """

    schema = Schema((COLUMN,), ColumnGroup("dict", ("n",), (None,)))

    def __init__(self, rows: list[int], block: int, held_bytes: int = 0) -> None:
        self._file = SourceFile("f", 1, piece_rows=tuple(rows), held_bytes=held_bytes)
        self._block = block
        self.open = 0
        self.most_open = 0

    def files(self) -> list[SourceFile]:
        return [self._file]

    @property
    def num_skipped(self) -> int:
        return 0

    def read(self, split: Split) -> Iterator[Columns]:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return self._blocks(split)

    def _blocks(self, split: Split) -> Iterator[Columns]:
        for start in range(split.start, split.stop, self._block):
            yield (np.full(min(self._block, split.stop - start), split.piece),)
        self.open -= 1


def epoch(reader: DirectReader, batch_size: int = 50) -> list[list[int]]:
    batches = []
    while isinstance(batch := reader.next_batch(batch_size), Batch):
        batches.append(np.asarray(batch.columns["n"]).tolist())
    return batches


def test_lanes_take_turns_and_an_ended_one_takes_the_next_split():
    source = Pieces([5, 2, 3, 4], block=3)
    part = WorkerPart(tuple(Split("f", 0, n, piece) for piece, n in enumerate([5, 2, 3, 4])))
    lanes, found = Lanes(source, part, 2, 2), []
    while lanes.is_ready():
        rows = lanes.peek(100)
        lanes.move(num_rows(rows))
        found += np.asarray(rows[0]).tolist()
    assert found == [0, 0, 1, 1, 0, 0, 0, 2, 2, 3, 3, 2, 3, 3]


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.tuples(st.integers(1, 50), st.integers(1, 50)),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(8, 600),
)
def test_the_order_does_not_depend_on_blocks_and_batches(pieces, blocks, width, window, most_bytes):
    orders = [
        epoch(
            DirectReader(
                Pieces(pieces, block),
                0,
                1,
                seed=4,
                shuffle_rows=window,
                interleave=width,
                most_bytes=most_bytes,
            ),
            batch_size,
        )
        for block, batch_size in zip(blocks, (50, 3), strict=True)
    ]
    one, other = ([n for batch in order for n in batch] for order in orders)
    assert one == other


def test_batches_of_sorted_pieces_are_mixed():
    """24 months in 24 row groups: each batch has rows of most of the 16 that are open."""
    source = Pieces([2000] * 24, block=500)
    reader = DirectReader(source, 0, 1, seed=1, shuffle_rows=8192, interleave=16)
    batches = epoch(reader, 256)
    months = [len(set(batch)) for batch in batches]
    assert np.mean(months) > 10
    assert source.most_open == 17  # one is opened ahead
    alone = epoch(DirectReader(Pieces([2000] * 24, 500), 0, 1, seed=1, shuffle_rows=4096), 256)
    assert max(len(set(batch)) for batch in alone) <= 4


@pytest.mark.parametrize(("held", "opened"), [(10, 9), (30, 3), (60, 2), (1000, 2)])
def test_fewer_pieces_are_open_where_they_hold_more_bytes(held, opened):
    source = Pieces([20] * 12, 5, held)
    reader = DirectReader(source, 0, 1, seed=1, interleave=8, most_bytes=100)
    assert sum(map(len, epoch(reader))) == 240
    assert source.most_open == opened


def test_a_window_ends_before_it_exceeds_its_bytes():
    source = Pieces([100], 30)
    reader = DirectReader(source, 0, 1, seed=1, shuffle_rows=64, most_bytes=4 * 8 * 10)
    places = []
    while isinstance(batch := reader.next_batch(1), Batch):
        places.append(batch.position.place)
    assert {place.rows for place in places} == {0, 10}


def test_bytes_of_rows():
    texts = np.array(["a", "bcd", ""], object)
    ragged = Ragged(np.zeros(5, np.float32), np.array([0, 2, 2, 5]))
    columns = (np.zeros((3, 2), np.int16), texts, ragged)
    found = [rows_within(columns, most) for most in (-1, 12, 13, 20, 35, 36)]
    assert found == [(0, 0), (0, 0), (1, 13), (2, 20), (2, 20), (3, 36)]
    assert [rows_within(columns[:1], most) for most in (-1, 3, 9, 99)] == [
        (0, 0), (0, 0), (2, 8), (3, 12),
    ]  # fmt: skip


def test_turns_are_short_in_small_windows():
    assert [turn_rows(window) for window in (1, 2560, 4096, 1 << 20)] == [16, 20, 32, 512]


@pytest.mark.parametrize("wrong", [{"interleave": 0}, {"interleave": 1.5}, {"most_bytes": 0}])
def test_impossible_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(FeedSettingsError, match=f"{name} must be an int >= 1"):
        DirectReader(Pieces([1], 1), 0, 1, seed=1, **wrong)


def test_held_bytes_are_no_part_of_the_files_identity():
    (file,) = Pieces([1], 1).files()
    assert dataclasses.replace(file, held_bytes=5, base="/d") == file
