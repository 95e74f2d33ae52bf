"""Sorting, merging, comparing and searching rows by the hash of their ids, against dictionaries."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.sorted_rows import search
from ps.sorted_rows import sorter as sorters
from ps.sorted_rows.merge import changes, merged, present
from ps.sorted_rows.order import (
    BATCH_BYTES,
    Directory,
    SortedBatch,
    first_out_of_order,
    hashed,
    joined,
)
from ps.sorted_rows.sorter import RowSorter
from ps.tables.hash_index import mix

DIM = 3
State = dict[int, float | None]
"""Value of all numbers of a row; None: the id is removed."""
IDS = st.integers(0, 40)
STATES = st.dictionaries(IDS, st.floats(-5, 5, width=32))
CHANGES = st.dictionaries(IDS, st.none() | st.floats(-5, 5, width=32))


@pytest.fixture(scope="session")
def search_loaded() -> None:
    search.warm("float32")


@pytest.fixture(name="mixed")
def mixed_by_the_kernel() -> Any:
    return numba.njit(lambda number: mix(number))


def stream(state: State, batch_rows: int = 7) -> Iterator[SortedBatch]:
    ids = np.array(sorted(state, key=lambda one: int(hashed(np.array([one]))[0])), np.int64)
    removed = np.array([state[one] is None for one in ids.tolist()], np.bool_)
    values = np.array([state[one] or 0.0 for one in ids.tolist()], np.float32)
    whole = SortedBatch(ids, np.repeat(values[:, None], DIM, 1), removed)
    for start in range(0, ids.size, batch_rows):
        yield whole.part(start, start + batch_rows)


def state_of(batches: Iterator[SortedBatch]) -> State:
    found: State = {}
    last = -1
    for batch in batches:
        assert first_out_of_order(hashed(batch.ids), last) == -1
        last = int(hashed(batch.ids)[-1]) if batch.ids.size else last
        for one, row, is_gone in zip(*(column.tolist() for column in batch), strict=True):
            assert len(set(row)) == 1
            found[one] = None if is_gone else row[0]
    return found


@pytest.mark.slow  # compiles
def test_the_hash_is_that_of_the_tables(mixed):
    ids = np.array([0, 1, 2**63 - 1, -1, 1234567890123456789], np.int64)
    assert hashed(ids).tolist() == [int(mixed(one)) for one in ids]


@settings(max_examples=50)
@given(STATES, CHANGES, st.integers(1, 9))
def test_merging_gives_the_newer_state(older, newer, batch_rows):
    both = {**older, **newer}
    found = merged(stream(older, batch_rows), stream(newer), keeps_removed=True)
    assert state_of(found) == both
    found = merged(stream(older, batch_rows), stream(newer), keeps_removed=False)
    assert state_of(found) == {one: value for one, value in both.items() if value is not None}


@settings(max_examples=50)
@given(STATES, STATES, st.integers(1, 9))
def test_changes_turn_one_state_into_the_other(older, newer, batch_rows):
    found = state_of(changes(stream(older, batch_rows), stream(newer)))
    assert {one: v for one, v in {**older, **found}.items() if v is not None} == newer
    # bit for bit: 0.0 and -0.0 are different rows
    assert all(str(newer[one]) != str(older.get(one)) for one in found if one in newer)


@pytest.mark.parametrize("memory_bytes", [1 << 20, 200])
@pytest.mark.parametrize("is_newest_first", [True, False])
def test_of_an_id_that_comes_twice_one_entry_counts(tmp_path, memory_bytes, is_newest_first):
    dice = np.random.default_rng(1)
    entries = [(int(one), float(n)) for n, one in enumerate(dice.integers(0, 300, 900))]
    with RowSorter(
        DIM, "float32", tmp_path, is_newest_first=is_newest_first, memory_bytes=memory_bytes
    ) as sorter:
        for one, value in entries:
            if value % 5:
                sorter.add(np.array([one]), np.full((1, DIM), value, np.float32))
            else:
                sorter.remove(np.array([one]))
        expected: State = {}
        for one, value in entries[::-1] if is_newest_first else entries:
            expected[one] = value if value % 5 else None
        assert state_of(sorter.batches()) == expected
    assert list(tmp_path.iterdir()) == []


def test_a_batch_of_wide_rows_is_bounded_by_bytes(tmp_path):
    dim = 65_536
    with RowSorter(dim, "float32", tmp_path, is_newest_first=True) as sorter:
        for one in range(100):
            sorter.add(np.array([one]), np.full((1, dim), one, np.float32))
        batches = list(sorter.batches())
    assert max(batch.rows.nbytes for batch in batches) <= BATCH_BYTES
    assert state_of(iter(batches)).keys() == set(range(100))


def test_a_part_that_does_not_fit_into_memory_is_divided_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sorters, "BATCH_BYTES", 0)
    sizes: list[int] = []
    real = RowSorter._sorted

    def noted(sorter: RowSorter, records: Any) -> Iterator[SortedBatch]:
        sizes.append(records.nbytes)
        return real(sorter, records)

    monkeypatch.setattr(RowSorter, "_sorted", noted)
    hashes = np.arange(5000, dtype=np.uint64) << np.uint64(20)  # the first two bytes are equal
    ids = np.random.default_rng(0).permutation(unhashed(hashes))
    memory_bytes = 10_000
    with RowSorter(
        DIM, "float32", tmp_path, is_newest_first=False, memory_bytes=memory_bytes
    ) as sorter:
        for value in (1.0, 2.0):
            for part in np.split(ids, 100):
                sorter.add(part, np.full((part.size, DIM), value, np.float32))
        assert state_of(sorter.batches()) == dict.fromkeys(ids.tolist(), 2.0)
    assert max(sizes) <= memory_bytes
    assert list(tmp_path.iterdir()) == []


def test_a_sorter_without_rows_yields_nothing(tmp_path):
    with RowSorter(DIM, "float32", tmp_path, is_newest_first=True) as sorter:
        assert list(sorter.batches()) == []


def test_present_leaves_removed_ids_out():
    assert state_of(present(stream({1: None, 2: 3.0}))) == {2: 3.0}


def directory_of(ids: Any) -> Any:
    directory = Directory(ids.size)
    directory.add(hashed(ids[:10]))
    directory.add(hashed(ids[10:]))
    return directory.starts()


def find(starts: Any, whole: SortedBatch, wanted: Any, out: Any, unseen: Any) -> int:
    return int(search.lookup(starts, whole.ids, whole.rows, unseen, wanted, out))


@pytest.mark.slow
@pytest.mark.usefixtures("search_loaded")
@pytest.mark.parametrize("num_rows", [1, 2, 5, 63, 1000, 5000])
def test_each_id_is_found_and_others_are_unseen(num_rows):
    whole = joined(list(stream({3 * one: float(one) for one in range(num_rows)}, 1000)))
    starts = directory_of(whole.ids)
    wanted = np.random.default_rng(num_rows).integers(0, 6 * num_rows, 700)
    out = np.full((wanted.size, DIM), 9.0, np.float32)
    unseen = np.full(DIM, -1.0, np.float32)
    is_known = (wanted % 3 == 0) & (wanted < 3 * num_rows)
    assert find(starts, whole, wanted, out, unseen) == np.count_nonzero(~is_known)
    assert (out == np.where(is_known, wanted / 3, -1.0)[:, None]).all()
    out[:] = 9.0
    find(starts, whole, wanted, out, unseen[:0])  # keeps what is there
    assert (out == np.where(is_known, wanted / 3, 9.0)[:, None]).all()


@pytest.mark.usefixtures("search_loaded")
def test_ids_in_one_bucket_are_halved():
    """Nobody can make a lookup slow by ids that share a bucket: it is sorted, too."""
    dice = np.random.default_rng(0)
    bits = np.sort(dice.integers(0, 2**40, 3000).astype(np.uint64))  # all in the first bucket
    ids = unhashed(np.unique(bits))
    rows = np.repeat(np.arange(ids.size, dtype=np.float32)[:, None], DIM, 1)
    whole = SortedBatch(ids, rows, np.zeros(ids.size, np.bool_))
    out = np.empty((ids.size, DIM), np.float32)
    assert find(directory_of(ids), whole, ids, out, np.zeros(DIM, np.float32)) == 0
    assert (out == rows).all()


@pytest.mark.usefixtures("search_loaded")
@pytest.mark.parametrize("starts", [[0], [0, 1, 2, 3], [2**32 - 1] * 3, [0, 2**32 - 1, 0]])
def test_a_wrong_directory_reads_nothing_outside(starts):
    whole = joined(list(stream({1: 1.0, 2: 2.0, 3: 3.0})))
    out = np.zeros((64, DIM), np.float32)
    wanted = np.arange(64)
    find(np.array(starts, np.uint32), whole, wanted, out, np.zeros(DIM, np.float32))
    assert set(np.unique(out).tolist()) <= {0.0, 1.0, 2.0, 3.0}


def unhashed(bits: Any) -> Any:
    """Return the ids that have these hashes: the inverse of SplitMix64's finalizer."""
    mask = 2**64 - 1
    found = []
    for number in map(int, bits):
        x = number ^ (number >> 31) ^ (number >> 62)
        x = x * pow(0x94D049BB133111EB, -1, 2**64) & mask
        x = x ^ (x >> 27) ^ (x >> 54)
        x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) & mask
        x = x ^ (x >> 30) ^ (x >> 60)
        found.append(x)
    return np.array(found, np.uint64).view(np.int64)


def test_hashes_can_be_inverted():
    ids = np.array([0, 5, 2**62 + 17], np.int64)
    assert unhashed(hashed(ids)).tolist() == ids.tolist()


def test_spilled_files_are_removed_when_something_fails(tmp_path: Path):
    sorter = RowSorter(DIM, "float32", tmp_path, is_newest_first=True, memory_bytes=1)
    sorter.add(np.array([1]), np.ones((1, DIM), np.float32))
    assert len(list(tmp_path.iterdir())) == 1
    sorter.close()
    assert list(tmp_path.iterdir()) == []
