"""The driver's ledger of an epoch, beside a simulation that follows every single row."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeding.protocol.row_ranges import AcceptedRows, RowRanges
from feeding.sender.feeder import FeedReport
from tfos.control.messages import EpochRowCounts
from tfos.feed.ledger import EpochLedger, num_rows
from tfos.feed.suspects import Rows

NAMES = dict(enumerate([f"worker:{rank}" for rank in range(3)]))


class Epoch:
    """Workers that accept rows in chunks and train them in order; it knows where each row is."""

    def __init__(self, seed: int, sizes: list[int]) -> None:
        self.random = random.Random(seed)
        self.sizes = sizes
        self.queues: list[list[tuple[int, int]]] = [[] for _ in NAMES]
        self.trained = [0] * len(NAMES)
        self.said = [0] * len(NAMES)
        self.alive = set(range(len(NAMES)))

    def task(self, partition: int, wanted: list[int], *, fails: bool = False) -> FeedReport | None:
        """Feed rows of a partition; a task that fails stops somewhere and reports nothing."""
        accepted = {worker: AcceptedRows() for worker in range(len(NAMES))}
        stop = self.random.randint(0, len(wanted)) if fails else len(wanted)
        at = 0
        while at < stop:
            worker = self.random.choice(sorted(self.alive))
            count = 1
            while count < 4 and at + count < stop and wanted[at + count] == wanted[at] + count:
                count += 1
            accepted[worker].add(wanted[at], count, len(self.queues[worker]))
            self.queues[worker] += [(partition, wanted[at] + i) for i in range(count)]
            at += count
        packed = {worker: rows.pack() for worker, rows in accepted.items() if rows}
        return None if fails else FeedReport(partition, rows=len(wanted), accepted=packed)

    def train_some(self) -> None:
        for worker in self.alive:
            self.trained[worker] = self.random.randint(
                self.trained[worker], len(self.queues[worker])
            )
            if self.random.random() < 0.5:
                self.said[worker] = self.trained[worker]

    def train_all(self) -> None:
        for worker in self.alive:
            self.said[worker] = self.trained[worker] = len(self.queues[worker])

    def last(self) -> dict[int, EpochRowCounts]:
        return {
            worker: EpochRowCounts(0, len(queue), self.said[worker])
            for worker, queue in enumerate(self.queues)
        }

    def feed_again(self, rows: Rows) -> list[FeedReport]:
        reports = []
        for partition, spans in rows.items():
            report = self.task(partition, [row for span in spans for row in range(*span)])
            assert report is not None
            reports.append(report)
        return reports


@given(
    st.integers(0, 1 << 32),
    st.lists(st.integers(0, 30), max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.integers(0, 2),
    st.booleans(),
)
def test_every_row_is_trained_whatever_fails_and_all_are_counted(
    seed, sizes, retried, losses, returns
):
    epoch, ledger = Epoch(seed, sizes), EpochLedger("input", 0)
    for partition, size in enumerate(sizes):
        if retried[partition] and not returns:
            assert epoch.task(partition, list(range(size)), fails=True) is None
        report = epoch.task(partition, list(range(size)))
        assert report is not None
        assert ledger.add([report]) == 0
        epoch.train_some()
    for lost in range(1, 1 + losses):
        epoch.alive.remove(lost)
        again = ledger.take_lost({lost: epoch.last()[lost]})
        assert ledger.take_lost({lost: epoch.last()[lost]}) == {}
        ledger.add(epoch.feed_again(again), again=True)
        epoch.train_some()
    epoch.train_all()
    if returns:  # the chief's main_fun, early: the rest is dropped
        epoch.said[0] = epoch.random.randint(0, epoch.trained[0])
        heard = {row for w, queue in enumerate(epoch.queues) for row in queue[: epoch.said[w]]}
        done = ledger.report(epoch.last(), NAMES, seconds=1.0)
        assert (done.fed_rows, done.trained_rows) == (sum(sizes), len(heard))
        assert done.dropped_rows == sum(sizes) - len(heard)
        return
    done = ledger.report(epoch.last(), NAMES, seconds=1.0)
    assert done.fed_rows == sum(sizes)
    assert (done.trained_rows, done.dropped_rows) == (sum(sizes), 0)
    known = [row for w, queue in enumerate(epoch.queues) for row in queue[: epoch.said[w]]]
    assert len(set(known)) == sum(sizes)
    if not losses:
        assert done.repeated_rows == len(known) - len(set(known))
    assert sum(done.per_worker.values()) == len(known)


@pytest.mark.fault("F01")
def test_rows_that_a_lost_worker_said_it_trained_are_not_fed_again():
    ledger = EpochLedger("input", 3)
    lost, other = AcceptedRows([(0, 10, 0), (20, 10, 10)]), AcceptedRows([(10, 10, 0)])
    report = FeedReport(4, rows=30, accepted={0: other.pack(), 1: lost.pack()})
    assert ledger.add([report]) == 0
    assert ledger.counts_on(1)
    assert not ledger.counts_on(2)  # it accepted nothing that its crash could be blamed on
    again = ledger.take_lost({1: EpochRowCounts(3, accepted_rows=20, trained_rows=13)})
    assert (again, num_rows(again)) == ({4: ((23, 30),)}, 7)
    assert not ledger.counts_on(1)
    fed = FeedReport(4, rows=7, dropped_rows=2, accepted={0: AcceptedRows([(23, 5, 10)]).pack()})
    assert ledger.add([fed], again=True) == 2
    last = {0: EpochRowCounts(3, 15, 15), 1: EpochRowCounts(3, 20, 13)}
    done = ledger.report(last, NAMES, seconds=1.0)
    assert (done.fed_rows, done.trained_rows, done.dropped_rows) == (30, 28, 2)
    assert done.repeated_rows == 5
    assert done.per_worker == {"worker:0": 15, "worker:1": 13}


def test_rows_that_a_worker_dropped_when_main_fun_returned_are_dropped_not_repeated():
    ledger = EpochLedger("input", 0)
    accepted = AcceptedRows([(0, 50, 0)])
    ledger.add([FeedReport(0, rows=60, dropped_rows=10, accepted={0: accepted.pack()})])
    done = ledger.report({0: EpochRowCounts(0, 50, 20)}, NAMES, seconds=1.0)
    assert (done.fed_rows, done.trained_rows, done.dropped_rows) == (60, 20, 40)
    assert done.repeated_rows == 0


def test_rows_before_the_position_that_a_worker_dropped_are_not_trained():
    ledger = EpochLedger("input", 0)
    kept, lost = AcceptedRows([(0, 60, 0)]), AcceptedRows([(60, 40, 0)])
    ledger.add([FeedReport(0, rows=100, accepted={0: kept.pack(), 1: lost.pack()})])
    counts = EpochRowCounts(0, 40, 20, 32, dropped_rows=10)
    assert ledger.take_lost({1: counts}, {1: "a crash"}) == {0: ((90, 100),)}
    ledger.add(
        [FeedReport(0, rows=10, accepted={0: AcceptedRows([(90, 10, 60)]).pack()})], again=True
    )
    last = {0: EpochRowCounts(0, 70, 65, dropped_rows=5), 1: counts}
    done = ledger.report(last, NAMES, seconds=1.0)
    assert (done.fed_rows, done.trained_rows, done.dropped_rows) == (100, 85, 15)
    assert done.repeated_rows == 10
    assert done.per_worker == {"worker:0": 65, "worker:1": 20}


def test_rows_of_several_lost_workers_are_put_together():
    ledger = EpochLedger("input", 0)
    accepted = {1: AcceptedRows([(0, 5, 0)]).pack(), 2: AcceptedRows([(5, 5, 0)]).pack()}
    ledger.add([FeedReport(0, rows=10, accepted=accepted)])
    again = ledger.take_lost({1: EpochRowCounts(0), 2: EpochRowCounts(0)})
    assert again == {0: ((0, 10),)}
    assert RowRanges(again[0]).num_rows == 10


def test_blamed_rows_are_left_out_of_what_is_fed_again():
    ledger = EpochLedger("input", 0)
    rows = {0: ((0, 10), (20, 30)), 1: ((5, 6),), 2: ((0, 9),)}
    kept = ledger.leave_out(rows, {0: ((8, 24),), 1: ((0, 50),)})
    assert kept == {0: ((0, 8), (24, 30)), 2: ((0, 9),)}
    assert ledger.report({}, {}, seconds=1.0).skipped_rows == 7


def test_crashes_before_rows_were_left_out_blame_no_others():
    ledger = EpochLedger("input", 0)
    ledger.suspects.note(0, "killed by SIGSEGV", {0: ((0, 10),)})
    ledger.leave_out({0: ((0, 10),)}, {0: ((0, 5),)})
    for worker in (1, 2):
        ledger.suspects.note(worker, "killed by SIGSEGV", {0: ((5, 10),)})
    assert ledger.suspects.blamed() == {}


def test_rows_that_no_worker_was_left_to_take_are_fed_again_and_not_dropped_yet():
    ledger = EpochLedger("input", 0)
    ledger.add([FeedReport(0, rows=10, partition_rows=10, dropped_rows=10)])
    report = FeedReport(1, rows=9, partition_rows=9, dropped_rows=9, unsent=((2, 6), (8, 9)))
    assert ledger.add([report]) == 4
    assert ledger.has_unsent
    assert ledger.take_lost({}) == {1: ((2, 6), (8, 9))}
    assert not ledger.has_unsent


def test_rows_of_a_partition_that_was_computed_otherwise_replace_no_lost_ones():
    ledger = EpochLedger("input", 0)
    rows = AcceptedRows([(0, 10, 0)]).pack()
    ledger.add([FeedReport(0, rows=10, partition_rows=10, accepted={1: rows})])
    ledger.take_lost({1: EpochRowCounts(0)})
    again = FeedReport(0, rows=10, partition_rows=12, accepted={2: rows})
    assert ledger.add([again], again=True) == 10
    assert not ledger.counts_on(2)
