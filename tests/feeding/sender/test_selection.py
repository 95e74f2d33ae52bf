"""Which rows of a partition are sent again, and which an earlier attempt has fed."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.config import FeedConfig
from feeding.protocol.row_ranges import AcceptedRows
from feeding.sender.feeder import Selection
from feeding.sender.task import FeedTask
from rpc.auth.handshake import Credentials

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=6)


@pytest.mark.fault("F37")
@given(SPANS, SPANS, st.none() | st.just([(3, 9), (12, 25)]))
def test_a_row_that_two_workers_accepted_counts_once(first, second, only):
    selection = Selection(only)
    rows: list[int] = []
    for spans in (first, second):
        accepted = AcceptedRows()
        places: set[tuple[int, int]] = set()
        at = 0
        for row, count in spans:
            accepted.add(row, count, at)
            places |= {(row + place, at + place) for place in range(count)}
            at += count
        for row, count, position in selection.exclude(accepted):
            rows += range(row, row + count)
            assert {(row + place, position + place) for place in range(count)} <= places
    given_rows = {row + n for row, count in (*first, *second) for n in range(count)}
    wanted = {row for row in given_rows if only is None or 3 <= row < 9 or 12 <= row < 25}
    assert sorted(rows) == sorted(wanted)


def test_lost_rows_of_a_partition_that_is_gone_are_not_asked_for():
    """Spark fails the job of a partition that its data no longer has; they count as dropped."""
    task = FeedTask(targets=(), credentials=Credentials.generate, epoch=0, config=FeedConfig())
    again = dataclasses.replace(task, again={0: ((3, 5),), 3: ((0, 2),), 2: ((1, 2),)})
    assert again.order(3) == [0, 2]
    assert (again.feeds_all_in_order, task.feeds_all_in_order) == (False, True)
