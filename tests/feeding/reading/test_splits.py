"""Shares of files: every byte is dealt once, evenly, and the same way each time."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.errors import FeedSettingsError
from feeding.reading import splits
from feeding.reading.splits import PIECE_BYTES, SourceFile, Split, deal_beside, shares

FILES = st.lists(
    st.tuples(st.integers(0, 500), st.booleans()).map(lambda each: each), max_size=8
).map(lambda sizes: [SourceFile(f"f{n}", size, cut) for n, (size, cut) in enumerate(sizes)])


@given(FILES, st.integers(1, 5), st.none() | st.integers(0, 3), st.integers(0, 3))
def test_every_byte_is_dealt_once(files, num_workers, seed, epoch):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "PIECE_BYTES", 40)
        dealt = shares(files, num_workers, seed=seed, epoch=epoch)
    for file in files:
        spans = sorted((s.start, s.stop) for each in dealt for s in each if s.path == file.path)
        assert [start for start, _ in spans] == [0, *[stop for _, stop in spans[:-1]]] or not spans
        assert (spans[-1][1] if spans else 0) == file.size_bytes
        assert file.is_splittable or len(spans) <= 1
    if all(file.is_splittable for file in files):
        sizes = [sum(s.stop - s.start for s in each) for each in dealt]
        assert max(sizes) - min(sizes) <= 1


COUNTED = st.lists(st.lists(st.integers(0, 30), max_size=4), max_size=6).map(
    lambda files: [
        SourceFile(f"f{n}", 1, False, piece_rows=tuple(rows)) for n, rows in enumerate(files)
    ]
)


@given(
    COUNTED, st.integers(1, 5), st.none() | st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)
)
def test_counted_rows_are_dealt_once_and_evenly(files, num_workers, seed, epoch, batch_size):
    dealt = shares(files, num_workers, seed=seed, epoch=epoch)
    rows = [
        [(s.path, s.piece, row) for s in each for row in range(s.start, s.stop)] for each in dealt
    ]
    expected = [
        (file.path, piece, row)
        for file in files
        for piece, num_rows in enumerate(file.piece_rows)
        for row in range(num_rows)
    ]
    assert sorted(row for each in rows for row in each) == expected
    if seed is None:
        assert [row for each in rows for row in each] == expected
    sizes = [len(each) for each in rows]
    assert max(sizes) - min(sizes) <= 1
    steps = [-(-size // batch_size) for size in sizes]
    left_over = len(expected) % (num_workers * batch_size)
    assert len(set(steps)) == 1 or left_over < num_workers


def test_files_of_both_kinds_are_refused():
    files = [SourceFile("a", 10), SourceFile("b", 10, piece_rows=(3,))]
    with pytest.raises(FeedSettingsError, match="rows of b are known, those of a are not"):
        shares(files, 1)


def test_order_is_by_path_or_by_seed_and_epoch():
    files = [SourceFile(f"f{number}", 100) for number in range(20)]
    (plain,) = shares(files[::-1], 1)
    assert [each.path for each in plain] == sorted(file.path for file in files)
    orders = [shares(files, 1, seed=5, epoch=epoch) for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert shares(files[::-1], 1, seed=5, epoch=1) == orders[1]
    assert shares(files, 1, seed=6, epoch=1) != orders[1]


def test_one_worker_reads_a_file_in_one_go():
    size = 5 * PIECE_BYTES
    ((whole,),) = shares([SourceFile("f", size)], 1)
    assert (whole.start, whole.stop) == (0, size)


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("plain", "3e8ee0c3ec535a1d"),
        ("mixed", "44b5db78bdac7c0b"),
        ("gz", "6edf2ea5ec2650bb"),
        ("rows", "f3fc7009e67821c0"),
    ],
)
def test_shares_stay_what_saved_positions_point_into(kind, digest):
    chosen = random.Random(7)
    files = []
    for n in range(40):
        size = chosen.choice([0, 1, 1000, 1000, 5 * PIECE_BYTES + n, 30 * PIECE_BYTES])
        is_cut = kind == "plain" or (kind == "mixed" and n % 3 > 0)
        rows = tuple(chosen.randrange(0, 9) for _ in range(n % 4)) if kind == "rows" else None
        files.append(SourceFile(f"f{n * 7 % 40}", size, is_cut, rows))
    found = hashlib.blake2b(digest_size=8)
    for seed in (None, 3):
        for num_workers in (1, 3, 7):
            for worker, mine in enumerate(shares(files, num_workers, seed=seed, epoch=2)):
                for s in mine:
                    found.update(
                        f"{seed} {num_workers} {worker} {s.path} {s.start} {s.stop} "
                        f"{s.piece};".encode()
                    )
    assert found.hexdigest() == digest, "workers would continue elsewhere in their files"


def test_what_is_dealt_stays_what_saved_positions_point_into():
    found = hashlib.blake2b(digest_size=8)
    for seed in range(200):
        chosen = random.Random(seed)
        count = chosen.randrange(20)
        parts = [Split(f"f{n}", 0, chosen.choice([1, 5, 5, 9, 40]), None) for n in range(count)]
        loads = [chosen.randrange(0, 60) for _ in range(chosen.randrange(1, 8))]
        whole = {f"f{n}" for n in range(0, 20, chosen.choice([1, 2, 3]))}
        found.update(repr(deal_beside(parts, loads, whole)).encode())
    assert found.hexdigest() == "53db50c7ed2cc7a5", "workers would continue elsewhere"
