"""A model's file comes back whole, also where several workers answer."""

from __future__ import annotations

import random

import pytest

from tfos.errors import NoResultError
from tfos.estimators import file_pieces
from tfos.estimators.file_pieces import PIECE_BYTES, FilePieces, joined

SIZES = [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 7]


@pytest.mark.parametrize("size", SIZES)
def test_one_workers_file_is_put_together(size):
    content = random.Random(size).randbytes(size)
    assert joined(lambda places: [FilePieces(content).piece(at) for at in places], 1) == content


def test_a_large_file_comes_by_several_requests_of_which_each_is_bounded(monkeypatch):
    monkeypatch.setattr(file_pieces, "PIECE_BYTES", 8)
    files = [FilePieces(random.Random(n).randbytes(1000)) for n in range(3)]
    asked, turn = [], random.Random(0)

    def ask(places: list[int]) -> list[bytes]:
        asked.append(len(places))
        who = turn.choice(files)
        return [who.piece(place) for place in places]

    assert joined(ask, 3) in [each._content for each in files]
    assert max(asked) == 16


def test_a_file_may_take_more_requests_than_may_bring_nothing(monkeypatch):
    """At 16 MiB a request: a model of 500 MiB."""
    monkeypatch.setattr(file_pieces, "PIECE_BYTES", 1)
    content = random.Random(0).randbytes(500)
    assert joined(lambda places: [FilePieces(content).piece(at) for at in places], 1) == content


def test_pieces_that_come_out_of_order_are_put_in_order():
    files = [random.Random(n).randbytes(PIECE_BYTES * 2 + 1) for n in range(2)]
    turns = iter([[0], [1, 1], [1]])  # of the other worker first its second and third piece

    def ask(places: list[int]) -> list[bytes]:
        turn = zip(next(turns), places, strict=True)
        return [FilePieces(files[who]).piece(at) for who, at in turn]

    assert joined(ask, 2) == files[1]


def test_a_file_that_is_not_the_one_that_was_cut_is_an_error():
    answer = FilePieces(b"trained").piece(0).replace(b"trained", b"changed")
    with pytest.raises(NoResultError, match="did not come back as its worker saved it"):
        joined(lambda _: [answer], 1)


def test_pieces_of_two_workers_are_asked_for_again():
    files = [random.Random(n).randbytes(PIECE_BYTES * 2 + n) for n in range(2)]
    # A piece of the one, twice of the other, and the rest of the first.
    turns = iter([[0], [1], [1], [0]])

    def ask(places: list[int]) -> list[bytes]:
        turn = zip(next(turns), places, strict=True)
        return [FilePieces(files[who]).piece(at) for who, at in turn]

    assert joined(ask, 2) == files[0]


def test_workers_that_never_agree_are_an_error():
    files = [random.Random(n).randbytes(PIECE_BYTES * 2) for n in range(2)]
    with pytest.raises(NoResultError, match="the last 21 requests, answered by any of 2 workers"):
        joined(lambda places: [FilePieces(files[place % 2]).piece(place) for place in places], 2)
