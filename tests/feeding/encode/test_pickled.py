"""Pickled batches become the same chunks as their rows; what is not recognised is unpickled."""

import itertools
import pickle
import random

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from feeding.columnar.rows import rows_of
from feeding.config import FeedConfig
from feeding.encode import pickled
from feeding.encode.packer import Packer
from feeding.encode.pickled import PickledPacker
from feeding.errors import RowError

RANDOM = random.Random(3)


class Loads:
    """pickle.loads that counts."""

    def __init__(self):
        self.calls = 0

    def __call__(self, data):
        self.calls += 1
        return pickle.loads(data)


def batches_of(rows, size):
    return [pickle.dumps(rows[at : at + size], 5) for at in range(0, len(rows), size)]


def pack(rows, size=10, **settings):
    settings.setdefault("chunk_rows", 16)
    loads = Loads()
    packer = PickledPacker(FeedConfig(**settings), loads, partition=3)
    chunks = list(packer.chunks(iter(batches_of(rows, size))))
    assert packer.rows_read == len(rows)
    assert [c.meta.last_in_partition for c in chunks] == [False] * (len(chunks) - 1) + [True]
    at = 0
    for chunk in chunks:
        assert chunk.meta.first_row == at
        at += chunk.num_rows
    return chunks, loads


def ints(count):
    return [RANDOM.randrange(256) for _ in range(count)]


def floats(count):
    return [RANDOM.random() for _ in range(count)]


RECOGNISED = {
    "pixels": lambda: ints(784),
    "floats": lambda: floats(784),
    "two numbers": lambda: ints(2),
    "more than a lot": lambda: ints(3072),
    "exactly a lot": lambda: ints(1000),
    "pixels and label": lambda: (ints(50), RANDOM.randrange(10)),
    "floats and label": lambda: (floats(50), RANDOM.random()),
    "x, y, weight": lambda: (ints(5), floats(3), RANDOM.random()),
    "pairs of lists": lambda: (ints(5), ints(5)),
    "pairs of numbers": lambda: (RANDOM.random(), RANDOM.randrange(200)),
    "numbers": lambda: RANDOM.randrange(100),
    "unsigned 16 bit": lambda: [RANDOM.randrange(256, 65536) for _ in range(9)],
    "signed 32 bit": lambda: [
        RANDOM.randrange(65536, 1 << 31) * RANDOM.choice([1, -1]) for _ in "abc"
    ],
}


@pytest.mark.parametrize("make", RECOGNISED.values(), ids=RECOGNISED.keys())
@pytest.mark.parametrize("size", [2, 7, 57])
def test_plain_rows_are_never_unpickled(make, size):
    rows = [make() for _ in range(57)]
    chunks, loads = pack(rows, size)
    # A batch of one row is pickled in another way.
    assert loads.calls == (57 % size == 1)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows
    (ordinary,) = Packer(FeedConfig(chunk_rows=100), partition=3).chunks(iter(rows))
    assert {chunk.meta.schema for chunk in chunks} == {ordinary.meta.schema}


@pytest.mark.parametrize("count", [999, 1000, 1001, 1002, 2000, 2500, 3001])
def test_batches_of_more_rows_than_a_lot(count):
    rows = [[i % 256, i // 256] for i in range(count)]
    chunks, loads = pack(rows, 5000, chunk_rows=10_000)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows
    assert loads.calls == 0


def test_pickles_of_several_frames():
    rows = [ints(784) for _ in range(300)]
    assert pickle.dumps(rows, 5).count(b"\x95") > 3
    chunks, loads = pack(rows, 300)
    assert loads.calls == 0
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows


SHARED = [1, 2, 3]
OTHERS = {
    "text": ["a", "b", "c"],
    "a wide int among narrow ones": [[1, 2], [3, 300], [5, 6]],
    "a negative int": [[1, 2], [3, -4], [5, 6]],
    "a huge int": [[1, 2], [3, 2**40], [5, 6]],
    "a float among ints": [[1, 2], [3, 0.5], [5, 6]],
    "rows of differing lengths": [[1, 2], [3, 4, 5], [6, 7]],
    "lengths that add up": [[1, 2, 3], [4, 5], [6, 7, 8, 9]],
    "the same row again": [SHARED, SHARED, [4, 5, 6]],
    "booleans": [[True, False]] * 2 + [[False, True]],
    "dicts": [{"a": 1}, {"a": 2}, {"a": 3}],
    "arrays": [np.arange(3), np.arange(3), np.arange(3)],
    "empty lists": [[], [], []],
    "lists of one": [[1], [2], [3]],
    "long tuples": [(1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)],
    "nested": [([1, 2], (3, 4)), ([5, 6], (7, 8)), ([9, 9], (9, 9))],
}


@pytest.mark.parametrize("rows", OTHERS.values(), ids=OTHERS.keys())
def test_other_rows_go_the_ordinary_way(rows):
    chunks, loads = pack(rows, 3)
    assert loads.calls == 1
    (ordinary,) = Packer(FeedConfig(), partition=3).chunks(iter(rows))
    back = [row for chunk in chunks for row in rows_of(chunk)]
    for row, expected in zip(back, rows_of(ordinary), strict=True):
        assert np.array_equal(row, expected)


def test_other_pickle_protocols_go_the_ordinary_way():
    for protocol in range(5):
        loads = Loads()
        batch = pickle.dumps([[1, 2], [3, 4]], protocol)
        (chunk,) = PickledPacker(FeedConfig(), loads).chunks(iter([batch]))
        assert (loads.calls, rows_of(chunk)) == (1, [[1, 2], [3, 4]])


def test_kinds_of_rows_may_alternate_between_batches():
    rows = [[1, 2]] * 3 + [[1, 2]] * 3 + [[0.5, 1.5]] * 3 + [[1, 300]] * 3
    rows = [list(row) for row in rows]
    chunks, _ = pack(rows, 3)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows


@pytest.mark.parametrize("stop_after", range(1, 26))
def test_rows_are_counted_wherever_a_feeder_ends(stop_after):
    """Batches that differ in opcodes from those before, and one that is not recognised."""
    kinds = [[n % 200 for n in range(30)], [1000 + n for n in range(30)], ["x"] * 30]
    order = [0, 1, 0, 2, 0, 2, 2, 1, 0, 1]
    batches = iter([pickle.dumps(kinds[kind], 5) for kind in order])
    packer = PickledPacker(FeedConfig(chunk_rows=16), pickle.loads)
    sent = sum(c.num_rows for c in itertools.islice(packer.chunks(batches), stop_after))
    assert sent <= packer.rows_read
    assert packer.rows_read + packer.skip(batches) == 30 * len(order)


def test_rest_is_counted_without_being_packed():
    packer = PickledPacker(FeedConfig(), pickle.loads)
    assert packer.skip(iter(batches_of([[1, 2]] * 25, 10))) == 25


NUMBER = st.one_of(st.integers(0, 255), st.integers(-(2**31), 2**31), st.floats(allow_nan=False))
VECTOR = st.lists(NUMBER, min_size=2, max_size=4)


@hypothesis.given(
    st.lists(st.one_of(VECTOR, VECTOR), min_size=1, max_size=12)
    | st.lists(st.tuples(VECTOR, NUMBER), min_size=1, max_size=12)
    | st.lists(st.lists(st.integers(0, 255), min_size=3, max_size=3), min_size=1, max_size=12),
    st.integers(1, 5),
)
def test_any_rows_come_back_equal(rows, size):
    chunks, _ = pack(rows, size, chunk_rows=4)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows


@pytest.mark.parametrize("size", [3, 100])
def test_wide_rows_make_chunks_of_about_chunk_bytes_as_unpickled_ones_do(size):
    rows = [floats(30) for _ in range(100)]
    chunks, _ = pack(rows, size, chunk_rows=256, chunk_bytes=1000, max_chunk_bytes=20000)
    assert max(chunk.num_bytes for chunk in chunks) <= 2000
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows
    assert len(chunks) <= 2 * len(rows) * 240 // 1000


def test_pickled_rows_that_are_too_wide_are_refused_as_others_are():
    with pytest.raises(RowError, match=r"partition 3, row 0: 800 bytes, a row may have 700; split"):
        pack([floats(100) for _ in range(4)], chunk_bytes=500, max_chunk_bytes=700)
    once = floats(50)  # pickled by reference, so these batches are unpickled
    for rows in ([floats(50) for _ in range(9)], [once] * 9):
        chunks, _ = pack(rows, chunk_bytes=500, max_chunk_bytes=700)
        assert [chunk.num_rows for chunk in chunks] == [1] * 9


def parses(monkeypatch):
    """The numbers of runs that each parse of a row found."""
    found = []
    parse = pickled._parse

    def counted(body):
        template = parse(body)
        found.append(0 if template is None else len(template.runs))
        return template

    monkeypatch.setattr(pickled, "_parse", counted)
    return found


def test_rows_that_are_never_recognised_are_soon_parsed_no_more(monkeypatch):
    tried = parses(monkeypatch)
    rows = [[RANDOM.choice([3, 300]) for _ in range(40)] for _ in range(300)]
    chunks, loads = pack(rows, 3)
    assert loads.calls == 100
    assert len(tried) < 10
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows


def test_rows_are_recognised_again_after_others(monkeypatch):
    tried = parses(monkeypatch)
    rows = [[RANDOM.choice([3, 300]) for _ in range(9)] for _ in range(30)]
    plain = [ints(9) for _ in range(300)]
    chunks, loads = pack(rows + plain, 3)
    assert 10 <= loads.calls < 20
    assert len(tried) <= 6
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows + plain


def test_rows_of_thousands_of_runs_are_given_up_within_the_first_row(monkeypatch):
    tried = parses(monkeypatch)
    rows = [[3, 300] * 5000 for _ in range(4)]
    chunks, loads = pack(rows, 2)
    assert (tried, loads.calls) == ([0, 0], 2)
    assert [row for chunk in chunks for row in rows_of(chunk)] == rows
