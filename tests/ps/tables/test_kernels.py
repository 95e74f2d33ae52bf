"""Loops over ids and rows against numpy, and that none of them ever reads or writes outside."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.tables import hash_index, kernels
from ps.tables.routing import Router, parts_of_buckets
from tests.support.tables import table

KEY = hash_index.new_key()
IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=80)
KERNELS = (
    *("gather", "mark", "evict", "check_parts", "distinct", "first_repeated", "arrange"),
    *("expand", "sum_equal"),
    *("count_up", "draw"),
)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    kernels.warm_server(["float32"])
    kernels.warm_client(["float32"])


def heads_for(ids):
    return np.full(1 << (2 * max(1, ids.size)).bit_length(), -1, np.int32)


def deduplicated(ids):
    inverse, unique = np.empty(ids.size, np.int32), np.empty(ids.size, np.int64)
    count = kernels.distinct(ids, KEY, heads_for(ids), inverse, unique)
    return unique[:count], inverse


def arranged(ids, num_servers, num_segments):
    parts = parts_of_buckets(num_servers, num_segments)
    unique, inverse = deduplicated(ids)
    ends, out = np.empty(num_servers * num_segments, np.int64), np.empty_like(unique)
    kernels.arrange(unique, parts, inverse, ends, out)
    return parts, out, inverse, ends


@settings(max_examples=50)
@given(IDS)
def test_distinct_ids_come_once_and_in_order_of_appearance(numbers):
    ids = np.array(numbers + numbers[::2], np.int64)
    unique, inverse = deduplicated(ids)
    assert unique.tolist() == list(dict.fromkeys(ids.tolist()))
    assert np.array_equal(unique[inverse], ids)


@settings(max_examples=50)
@given(IDS, IDS)
def test_the_first_repeated_id_is_found(numbers, more):
    ids = np.array([*dict.fromkeys(numbers), *more], np.int64)
    everything = ids.tolist()
    repeated = (i for i, number in enumerate(everything) if number in everything[:i])
    assert kernels.first_repeated(ids, KEY, heads_for(ids)) == next(repeated, -1)


@settings(max_examples=50)
@given(IDS, st.integers(1, 5), st.integers(1, 6))
def test_arranged_ids_are_what_the_servers_check(numbers, num_servers, num_segments):
    ids = np.array(numbers, np.int64)
    parts, out, inverse, ends = arranged(ids, num_servers, num_segments)
    assert np.array_equal(out[inverse], ids)
    start = 0
    for server in range(num_servers):
        mine = ends[server * num_segments : (server + 1) * num_segments]
        own = out[start : mine[-1]]
        found = np.empty(num_segments, np.int64)
        first = server * num_segments
        assert kernels.check_parts(own, parts, first, -1, found) == -1
        assert np.array_equal(found + start, mine)
        start = int(mine[-1])
    assert start == out.size


def test_an_id_of_another_server_or_out_of_order_or_too_large_is_found():
    ids = np.arange(1000)
    parts, out, _, ends = arranged(ids, 2, 3)
    found = np.empty(3, np.int64)
    check = kernels.check_parts
    assert check(out, parts, 0, 999, found) == ends[2]
    assert check(out[ends[2] :].copy(), parts, 0, 999, found) == 0
    assert check(out[: ends[2]][::-1].copy(), parts, 0, 999, found) > 0
    own = out[: ends[2]].copy()
    assert check(own, parts, 0, 900, found) == np.flatnonzero(own > 900)[0]
    assert check(np.array([-1]), parts, 0, 2**63 - 1, found) == 0


@pytest.mark.parametrize(
    "stored", [np.asfortranarray, lambda rows: np.repeat(rows, 2, axis=1)[:, ::2]]
)
def test_rows_and_gradients_may_be_stored_in_any_order(stored):
    routed = Router(table(dim=3), 2).route([[5, 9], [9, 7]])
    rows = np.arange(9, dtype=np.float32).reshape(3, 3)
    expanded = routed.expand(stored(rows))
    np.testing.assert_array_equal(expanded, rows[routed.inverse].reshape(2, 2, 3))
    times = np.bincount(routed.inverse)[:, None]
    np.testing.assert_array_equal(routed.summed(stored(expanded)), rows * times)


def test_gradients_of_equal_ids_are_summed_in_their_order():
    random = np.random.default_rng(0)
    ids = random.integers(0, 50, 400)
    unique, inverse = deduplicated(ids)
    grads = random.standard_normal((400, 3)).astype(np.float32)
    total = np.zeros((unique.size, 3), np.float32)
    kernels.sum_equal(grads, inverse, total)
    expected = np.zeros_like(total)
    np.add.at(expected, inverse, grads)
    assert np.array_equal(total, expected)
    out = np.empty_like(grads)
    kernels.expand(total, inverse, out)
    assert np.array_equal(out, total[inverse])


@pytest.mark.attack("A31")
@pytest.mark.parametrize("row", [3, 2**31, 2**63 - 1])
def test_a_row_number_outside_is_refused(row: int):
    slab, rows = np.ones((3, 4), np.float32), np.array([1, row], np.int64)
    assert kernels.gather(slab, rows, np.empty((2, 2), np.float32)) == 1
    assert kernels.mark(np.zeros(3, np.int64), rows, 1, np.zeros(rows.size, np.int64)) == 1
    assert kernels.gather(slab, rows[:1], np.empty((1, 5), np.float32)) == 0
    out = np.zeros((2, 2), np.float32)
    kernels.expand(slab[:, :2].copy(), np.array([1, 9], np.int32), out)
    kernels.sum_equal(out, np.array([-1, 9], np.int32), out[:1])
    assert out.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    ids, versions = np.arange(3), np.arange(3)
    slots = np.zeros(64, np.uint64)
    assert kernels.evict(slots, ids, KEY, versions, slab, rows[1:]) == 3


class Guarded(np.ndarray):
    """An array that raises for every position that C would not check."""

    def _check(self, key) -> None:
        for axis, position in enumerate(key if isinstance(key, tuple) else (key,)):
            if not isinstance(position, slice) and not 0 <= int(position) < self.shape[axis]:
                raise IndexError(f"position {position} of axis {axis} in {self.shape}")

    def __getitem__(self, key):
        self._check(key)
        return super().__getitem__(key)

    def __setitem__(self, key, value) -> None:
        self._check(key)
        super().__setitem__(key, value)


def guarded(array):
    return array.view(Guarded)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loops as plain Python."""
    for module, names in ((kernels, KERNELS), (hash_index, ("find", "insert", "move"))):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name).py_func)
    places = ("_slot_of", "_candidate", "_enter", "_home", "_next", "_distance", "_prefetch_home")
    inside = (*places, "relink", "unlink", "keyed", "mix")
    for name in inside:
        function = getattr(hash_index, name).py_func
        monkeypatch.setattr(hash_index, name, function)
        if hasattr(kernels, name):
            monkeypatch.setattr(kernels, name, function)
    for module in (hash_index, kernels):
        monkeypatch.setattr(module, "prefetch", lambda array, at: array[at])


@pytest.mark.attack("A31")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("seed", range(3))
def test_no_loop_leaves_its_arrays(interpreted, seed: int):
    random = np.random.default_rng(seed)
    extremes = np.array([0, -1, 1, 2**63 - 1, -(2**63)])
    ids = np.concatenate([extremes, random.integers(-(2**63), 2**63 - 1, 50)])
    parts, out, _, _ = arranged(ids, 2, 2)
    unique = guarded(out)
    parts, row_ids = guarded(parts), guarded(np.zeros(90, np.int64))
    slots, rows = guarded(np.zeros(128, np.uint64)), guarded(np.empty(out.size, np.int64))
    versions = guarded(np.zeros(90, np.int64))
    slab = guarded(np.zeros((90, 4), np.float32))
    kernels.check_parts(unique, parts, 1, np.int64(-1), guarded(np.empty(1, np.int64)))
    assert kernels.first_repeated(unique, KEY, guarded(heads_for(out))) == -1
    np.asarray(row_ids)[: out.size] = out
    hash_index.insert(slots, row_ids, KEY, 0, out.size)
    larger = guarded(np.zeros(256, np.uint64))
    hash_index.move(slots, larger, 0, 128)
    assert hash_index.find(larger, row_ids, KEY, unique, rows) == 0
    assert hash_index.find(slots, row_ids, KEY, unique, rows) == 0
    assert kernels.mark(versions, rows, 1, np.zeros(rows.size, np.int64)) == -1
    hostile = guarded(np.array([5, -1, -(2**63), 90], np.int64))
    assert kernels.gather(slab, hostile, guarded(np.zeros((4, 2), np.float32))) == 3
    victims = guarded(np.sort(random.choice(out.size, 20, replace=False)))
    live = row_ids[: out.size]
    left = kernels.evict(slots, live, KEY, versions[: out.size], slab, victims)
    assert left == out.size - 20
    assert hash_index.find(slots, row_ids, KEY, unique, rows) == 20
    sketch, counts = guarded(np.zeros((4, 7), np.uint16)), guarded(np.empty(out.size, np.int64))
    kernels.count_up(sketch, unique, counts)
    values = guarded(np.zeros((3, 2), np.float32))
    kernels.sum_equal(guarded(np.ones((4, 2), np.float32)), hostile, values)
    kernels.expand(values, hostile, guarded(np.zeros((4, 2), np.float32)))
