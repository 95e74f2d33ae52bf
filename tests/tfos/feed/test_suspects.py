"""Which rows are blamed for the crashes of workers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.protocol.row_ranges import AcceptedRows
from feeding.sender.feeder import FeedReport
from tfos.control.messages import EpochRowCounts
from tfos.feed.ledger import EpochLedger
from tfos.feed.suspects import MOST_CRASHES, Suspects

pytestmark = pytest.mark.fault("F54")
ORDER = "in the partition's order"


def crashes(*had: dict[int, list[tuple[int, int]]]) -> Suspects:
    suspects = Suspects()
    for process, rows in enumerate(had):
        suspects.note(process, f"worker:{process} killed by SIGSEGV", rows)
    return suspects


def test_two_crashes_blame_nothing():
    assert crashes({3: [(0, 40)]}, {3: [(0, 40)]}).blamed() == {}


def test_only_what_was_at_all_three_crashes_is_blamed():
    suspects = crashes(
        {3: [(0, 100)], 4: [(0, 9)]}, {3: [(40, 90)], 5: [(0, 9)]}, {3: [(10, 50), (80, 200)]}
    )
    assert suspects.blamed() == {3: ((40, 50), (80, 90))}


def test_three_crashes_without_a_common_row_blame_nothing():
    assert crashes({0: [(0, 10)]}, {0: [(5, 20)]}, {0: [(10, 30)]}, {1: [(0, 30)]}).blamed() == {}


def test_of_more_crashes_the_rows_that_were_at_most_of_them_are_blamed():
    all_of_them = {0: [(0, 100)]}
    assert crashes(all_of_them, all_of_them, all_of_them, {0: [(7, 9)]}).blamed() == {0: ((7, 9),)}


def test_rows_that_one_crash_reports_twice_count_once():
    suspects = crashes({0: [(0, 10)]}, {0: [(0, 10)]})
    suspects.note(1, "worker:1 killed by SIGSEGV", {0: [(5, 20)]})
    assert suspects.blamed() == {}


def test_what_was_read_at_each_crash_is_blamed_rather_than_what_was_accepted():
    accepted = {3: [(0, 100)]}
    suspects = Suspects()
    for process, (start, stop) in enumerate([(32, 48), (40, 56), (30, 46)]):
        suspects.note(process, "killed", accepted, {3: [(start, stop)]})
    assert suspects.blamed() == {3: ((40, 46),)}


def test_a_crash_of_which_nothing_more_is_known_has_all_accepted_rows():
    suspects = Suspects()
    for process, read in enumerate([{3: [(32, 48)]}, None, {3: [(30, 46)]}]):
        suspects.note(process, "killed", {3: [(20, 100)]}, read)
    assert suspects.blamed() == {3: ((32, 46),)}


def test_accepted_rows_are_blamed_where_none_was_read_each_time():
    suspects = Suspects()
    for process, start in enumerate([0, 10, 20]):
        suspects.note(process, "killed", {3: [(0, 100)]}, {3: [(start, start + 10)]})
    assert suspects.blamed() == {3: ((0, 100),)}


@given(
    st.lists(
        st.dictionaries(
            st.integers(0, 1), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)))
        ),
        max_size=6,
    )
)
def test_blamed_rows_are_those_that_a_count_of_single_rows_finds(had):
    counts: dict[tuple[int, int], int] = {}
    for rows in had:
        single = {
            (p, row) for p, spans in rows.items() for low, high in spans for row in range(low, high)
        }
        for row in single:
            counts[row] = counts.get(row, 0) + 1
    most = max(counts.values(), default=0)
    expected = {row for row, count in counts.items() if count == most >= MOST_CRASHES}
    found = crashes(*had).blamed()
    assert {
        (p, row) for p, spans in found.items() for span in spans for row in range(*span)
    } == expected


def test_the_sentence_names_epoch_feed_rows_partition_crashes_and_the_next_step():
    guilty = {3: [(0, 100)]}, {3: [(40, 90)]}, {3: [(45, 60)]}
    suspects = crashes(guilty[0], {9: [(0, 9)]}, *guilty[1:], {3: [(0, 9)]})
    text = suspects.text("epoch 2 of 'input'", ORDER)
    assert text.startswith("epoch 2 of 'input': rows 45 to 59 of partition 3 were at 3 crashes (")
    assert "worker:0 killed by SIGSEGV; worker:2 killed by SIGSEGV; worker:3 killed" in text
    assert "worker:1" not in text
    assert "worker:4" not in text
    assert "Look at them and leave out the bad ones" in text
    assert text.endswith(ORDER)


def test_many_ranges_are_counted():
    spans = {0: [(start, start + 1) for start in range(0, 20, 2)]}
    text = crashes(spans, spans, spans).text("epoch 1 of 'input'", ORDER)
    assert "rows 0 to 0 of partition 0, rows 2 to 2" in text
    assert "and 6 more ranges" in text


def test_the_ledger_suspects_what_a_crashed_worker_had_not_trained():
    ledger = EpochLedger("input", 0)
    trained = [30, 20, 45]
    first, rest = AcceptedRows([(0, 100, 0)]), AcceptedRows([(0, 100, 0)])
    ledger.add([FeedReport(2, rows=100, partition_rows=100, accepted={0: first.pack()})])
    for process, count in enumerate(trained):
        last = EpochRowCounts(0, 100, count)
        ledger.take_lost({process: last}, {process: f"worker:{process} killed by SIGKILL"})
        again = FeedReport(2, rows=100, partition_rows=100, accepted={process + 1: rest.pack()})
        ledger.add([again], again=True)
    assert ledger.suspects.blamed() == {2: ((45, 100),)}


def test_the_ledger_suspects_what_a_crashed_worker_had_read_if_that_is_known():
    ledger = EpochLedger("input", 0)
    again = False
    for process, (trained, taken) in enumerate([(30, 46), (20, 40), (24, 48)]):
        first, rest = AcceptedRows([(50, 50, 0)]), AcceptedRows([(0, 50, 50)])
        accepted = {process: first.pack()}
        ledger.add([FeedReport(2, 50, 100, accepted=accepted)], again=again)
        ledger.add([FeedReport(2, 50, 100, accepted={process: rest.pack()})], again=again)
        again = True
        last = EpochRowCounts(0, 100, trained, taken)
        rows = ledger.take_lost({process: last}, {process: "killed by SIGKILL"})
        assert rows == {2: ((0, 50), (50 + trained, 100))}
    assert ledger.suspects.blamed() == {2: ((80, 90),)}


def test_a_crashed_worker_that_had_read_nothing_is_no_reason_to_blame_a_row_that_others_read():
    ledger, rows = EpochLedger("input", 0), AcceptedRows([(0, 100, 0)]).pack()
    for process, taken in enumerate([40, 40, 0]):
        report = FeedReport(2, rows=100, partition_rows=100, accepted={process: rows})
        ledger.add([report], again=process > 0)
        last = EpochRowCounts(0, 100, 0, taken)
        ledger.take_lost({process: last}, {process: "killed by SIGKILL"})
    assert ledger.suspects.blamed() == {2: ((0, 100),)}  # what receives rows may crash, too


def test_what_is_known_of_one_crash_narrows_what_was_at_the_others():
    """The fourth worker is cut off, no crash."""
    ledger, rows = EpochLedger("input", 0), AcceptedRows([(0, 100, 0)]).pack()
    for process in range(4):
        report = FeedReport(2, rows=100, partition_rows=100, accepted={process: rows})
        ledger.add([report], again=process > 0)
    last = dict(
        enumerate(EpochRowCounts(0, 100, *each) for each in [(30, 46), (20,), (24, 48), ()])
    )
    assert ledger.take_lost(last, dict.fromkeys(range(3), "killed")) == {2: ((0, 100),)}
    assert ledger.suspects.blamed() == {2: ((30, 46),)}


def test_a_worker_that_was_lost_in_another_way_leaves_no_suspects():
    ledger = EpochLedger("input", 0)
    for process in range(4):
        rows = AcceptedRows([(0, 10, 0)]).pack()
        ledger.add([FeedReport(0, rows=10, partition_rows=10, accepted={process: rows})])
        assert ledger.take_lost({process: EpochRowCounts(0)}) == {0: ((0, 10),)}
    assert ledger.suspects.blamed() == {}
