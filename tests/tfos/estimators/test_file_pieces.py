"""A model's file comes back whole, also where several workers answer."""

from __future__ import annotations

import random

import pytest

from tfos.errors import NoResultError
from tfos.estimators.file_pieces import PIECE_BYTES, FilePieces, joined

SIZES = [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7]


@pytest.mark.parametrize("size", SIZES)
def test_one_workers_file_is_put_together(size):
    content = random.Random(size).randbytes(size)
    assert joined(lambda places: [FilePieces(content).piece(place) for place in places]) == content


def test_pieces_of_two_workers_are_asked_for_again():
    files = [random.Random(n).randbytes(PIECE_BYTES * 2 + n) for n in range(2)]
    # The first piece of one file, then pieces of both, too few of the second, and all of it.
    turns = iter([[0], [0, 1], [1, 1], [1, 1, 1]])

    def ask(places: list[int]) -> list[bytes]:
        turn = zip(next(turns), places, strict=True)
        return [FilePieces(files[who]).piece(at) for who, at in turn]

    assert joined(ask) == files[1]


def test_workers_that_never_agree_are_an_error():
    files = [random.Random(n).randbytes(PIECE_BYTES * 2) for n in range(2)]
    with pytest.raises(NoResultError, match="whole in 5 tries"):
        joined(lambda places: [FilePieces(files[place % 2]).piece(place) for place in places])
