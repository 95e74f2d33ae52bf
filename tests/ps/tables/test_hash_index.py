"""The index against a dictionary, with hostile ids, while it grows and while rows go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.tables import hash_index, kernels
from ps.tables.hash_index import HashIndex
from ps.tables.routing import Router
from tests.support.tables import table

IDS = st.integers(-(2**63), 2**63 - 1)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    kernels.warm_server(["float32"])
    kernels.warm_client(["float32"])


def unmixed(bits: int, key: int = 0) -> int:
    """The id whose hash under a key is `bits`: the index's hash backwards."""
    number = bits
    number ^= (number >> 31) ^ (number >> 62)
    number = number * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    number ^= (number >> 27) ^ (number >> 54)
    number = number * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    number ^= (number >> 30) ^ (number >> 60) ^ key
    return number - 2**64 if number >= 2**63 else number


class Model:
    """An index, its column of ids, and what it should answer."""

    def __init__(self) -> None:
        self.index = HashIndex()
        self.ids = np.zeros(1 << 16, np.int64)
        self.num_rows = 0
        self.random = np.random.default_rng(0)

    def add(self, ids) -> None:
        known = set(self.ids[: self.num_rows].tolist())
        new = [number for number in dict.fromkeys(ids) if number not in known]
        stop = self.num_rows + len(new)
        self.ids[self.num_rows : stop] = new
        self.index.add(self.ids, stop)
        self.num_rows = stop

    def remove(self, rows) -> None:
        slots = self.index.settled()
        live, stop = self.ids[: self.num_rows], self.num_rows
        versions, slab = np.arange(stop), np.zeros((stop, 2), np.float32)
        slab[:, 0] = versions
        self.num_rows = kernels.evict(
            slots, live, self.index.key, versions, slab, np.array(rows, np.int64)
        )
        self.index.removed(self.num_rows)
        assert (slab[: self.num_rows, 0] == versions[: self.num_rows]).all()

    def check(self, absent=()) -> None:
        live = self.ids[: self.num_rows]
        assert np.array_equal(self.rows_of(live), np.arange(self.num_rows))
        strangers = [number for number in absent if number not in set(live.tolist())]
        assert (self.rows_of(np.array(strangers, np.int64)) == -1).all()

    def rows_of(self, ids):
        rows = np.full(ids.size, -2)
        missing = self.index.find(self.ids, ids, rows)
        assert missing == (rows < 0).sum()
        for guess in (rows, self.random.integers(-2, 2 * self.num_rows + 2, ids.size)):
            again = guess.copy()
            assert self.index.find_again(self.ids, ids, again) == missing
            assert np.array_equal(again, rows)
        return rows


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(st.tuples(st.lists(IDS, max_size=60), st.sets(st.integers(0, 200))), max_size=8))
def test_it_answers_as_a_dictionary_while_ids_come_and_go(steps):
    model = Model()
    seen: list[int] = []
    for ids, places in steps:
        seen += ids
        model.add(ids)
        model.check(seen)
        model.remove(sorted(place for place in places if place < model.num_rows))
        model.check(seen)


def test_ids_with_one_hash_but_for_a_bit_are_kept_apart():
    model = Model()
    key = int(model.index.key)
    same_slot = [unmixed(k, key) for k in range(500)]  # equal in the half that slots hold
    model.add(same_slot[:400])
    model.check(same_slot)
    model.remove(range(0, 400, 2))
    assert model.num_rows == 200
    model.check(same_slot)


def longest_run(slots) -> int:
    """The most slots in a row that are taken: how far a search goes at worst."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], slots != 0, [0]]).astype(np.int8)))
    return int((edges[1::2] - edges[::2]).max())


@pytest.mark.attack("A35")
def test_nobody_can_choose_ids_that_share_a_slot():
    """Without a key they would be one run of 5,000 slots, and 80,000 of them cost 12 s."""
    model = Model()
    model.add([unmixed(k) for k in range(4000)] + [unmixed(k << 20) for k in range(1, 1000)])
    model.check()
    assert longest_run(model.index.settled()) < 500
    assert Model().index.key != model.index.key


@pytest.mark.attack("A35")
def test_nobody_can_choose_ids_that_slow_the_search_for_distinct_ones(monkeypatch):
    ids = np.array([unmixed(k << 52) for k in range(4000)], np.int64)
    found = []
    for key in (0, 1, hash_index.new_key()):
        heads = np.full(1 << 13, -1, np.int32)
        inverse, unique = np.empty(4000, np.int32), np.empty(4000, np.int64)
        assert kernels.distinct(ids, np.uint64(key), heads, inverse, unique) == 4000
        found.append((longest_run(heads + 1), unique.tolist(), inverse.tolist()))
    assert found[0][0] == 4000
    assert found[2][0] < 500
    assert found[0][1:] == found[1][1:] == found[2][1:]
    assert Router(table(), 1)._key != Router(table(), 1)._key


@pytest.mark.attack("A35")
def test_rows_do_not_depend_on_the_key():
    """Nor does a checkpoint: it holds rows in their order."""
    random = np.random.default_rng(3)
    steps = [random.integers(0, 400, 60) for _ in range(12)]
    seen = []
    for _ in range(2):
        model = Model()
        for ids in steps:
            model.add(ids.tolist())
            model.remove(range(0, model.num_rows, 7))
        seen.append(model.ids[: model.num_rows].tolist())
    assert seen[0] == seen[1]


def test_nothing_is_lost_while_it_grows_in_steps(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hash_index, "MOVED_AT_ONCE", 5)
    model, random = Model(), np.random.default_rng(0)
    for _ in range(40):
        model.add(random.integers(-(2**63), 2**63, 50).tolist())
        model.check(random.integers(0, 2**63, 50).tolist())


def test_a_row_that_is_gone_is_not_found_again_where_its_id_still_stands():
    model = Model()
    model.add([3, 4, 5])
    rows = model.rows_of(np.array([3, 5]))
    model.remove([2])
    assert model.ids[2] == 5
    assert model.index.find_again(model.ids, np.array([3, 5]), rows) == 1
    assert rows.tolist() == [0, -1]


def test_the_slots_of_a_row_take_12_to_20_bytes():
    model = Model()
    for _ in range(60):
        model.add(range(model.num_rows, model.num_rows + 1000))
        settled = model.index.settled()
        assert model.num_rows < 100 or 12 < settled.nbytes / model.num_rows < 20


def test_zero_is_an_id_like_others():
    model = Model()
    assert model.rows_of(np.array([0]))[0] == -1
    model.add([5, 0])
    assert model.rows_of(np.array([0, 5])).tolist() == [1, 0]
