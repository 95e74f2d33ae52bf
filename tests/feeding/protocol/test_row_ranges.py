"""Ranges of rows, and what a worker accepted, beside plain sets and lists."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from feeding.protocol.row_ranges import AcceptedRows, RowRanges, rows_and_end

MOST = 40
spans = st.tuples(st.integers(0, MOST), st.integers(0, MOST))


def rows_of(some):
    return {row for start, stop in some for row in range(start, stop)}


@given(st.lists(spans, max_size=12), spans)
def test_ranges_are_sets(given_spans, asked):
    ranges, oracle = RowRanges(given_spans), rows_of(given_spans)
    assert rows_of(ranges) == oracle
    found = list(ranges)
    assert found == sorted(found)
    # Ranges that touch are one.
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(found))
    assert ranges.num_rows == len(oracle)
    assert bool(ranges) == bool(oracle)
    assert ranges.stop == max(oracle, default=-1) + 1
    assert ranges.first_gap == next(row for row in range(MOST + 2) if row not in oracle)
    window = set(range(*asked))
    assert rows_of(ranges.inside(*asked)) == window & oracle
    assert rows_of(ranges.outside(*asked)) == window - oracle


entries = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(0, 5)), max_size=9)


@given(entries, st.integers(0, 90))
def test_what_was_accepted_is_told_by_position(steps, position):
    accepted, places = AcceptedRows(), {}
    row = place = 0
    for skipped_rows, count, skipped_places in steps:
        row, place = row + skipped_rows, place + skipped_places
        accepted.add(row, count, place)
        places.update({row + at: place + at for at in range(count)})
        row, place = row + count, place + count
    assert accepted.num_rows == len(places)
    assert rows_of(accepted.spans()) == set(places)
    before, behind = accepted.split(position)
    assert rows_of(before.spans()) == {row for row, at in places.items() if at < position}
    assert rows_of(behind) == {row for row, at in places.items() if at >= position}
    assert accepted.rows_before(position) == before.num_rows
    packed = accepted.pack()
    assert list(AcceptedRows.unpack(packed)) == list(accepted)
    assert rows_and_end(packed) == (len(places), max(places.values(), default=-1) + 1)


def test_what_a_worker_accepts_in_turn_takes_little_room():
    """Of 10 million rows in chunks of 256, every other chunk goes to one worker."""
    accepted = AcceptedRows()
    for number in range(20_000):
        accepted.add(number * 512, 256, number * 256)
    assert len(accepted) == 20_000
    assert len(accepted.pack()) < 10_000
