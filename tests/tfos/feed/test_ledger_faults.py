"""Tasks that are repeated, workers that are lost: what is trained, what again, what counted."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.columnar.batch import Batch
from feeding.encode.packer import Packer
from feeding.errors import LateChunk, RowsChanged
from feeding.protocol.messages import Hello
from feeding.receiver.batch_reader import BatchReader
from feeding.receiver.data_feed import DataFeed
from feeding.sender.feeder import Feeder, FeedReport
from feeding.sender.shuffle import Shuffle
from tests.support.feed import Background, Worker, eventually, feed_task, read_epochs, workers
from tfos.control.messages import EpochRowCounts
from tfos.feed.ledger import EpochLedger, num_rows

pytestmark = pytest.mark.socket

ROWS = list(range(1000))

NAMES = {0: "w:0", 1: "w:1", 2: "w:2"}


class Killed(Exception):
    """A task's Python process ends here."""


def until(row: int, rows: list[int]) -> Any:
    """Rows of a task that dies before this one."""
    yield from rows[:row]
    raise Killed


def run(task: Any, partition: int, rows: Any) -> FeedReport:
    (report,) = task(partition, iter(rows))
    return report


def values(reading: Background) -> list[list[int]]:
    return [[v for batch in epoch for v in batch.nest().tolist()] for epoch in reading.result()]


def end(*some: Worker, epoch: int = 0, rounds: int = 0) -> None:
    for worker in some:
        worker.channel.flush("input", epoch, rounds=rounds)
        assert worker.channel.wait_flushed("input", epoch, 20.0)
        worker.channel.finish("input")


def last(worker: Worker, epoch: int = 0) -> EpochRowCounts:
    for each in worker.channel.stats("input").epochs:
        if each.epoch == epoch:
            counts = each.accepted_rows, each.trained_rows
            return EpochRowCounts(epoch, *counts, dropped_rows=each.dropped_rows)
    return EpochRowCounts(epoch)


def test_rows_that_one_reader_kept_do_not_hide_what_another_one_trained_behind_them():
    with workers(1) as (worker,):
        ledger = EpochLedger("input", 0)
        ledger.add([run(feed_task([worker]), 0, ROWS)])
        looks = BatchReader(worker.channel)
        looks.reads_ahead = True
        looks.begin()
        assert isinstance(looks.next_batch(100), Batch)
        trains = BatchReader(worker.channel)
        assert trains.begin() == 100
        for _ in range(3):
            trains.next_batch(100)
        left = 112  # with the rest of the first reader's seventh chunk of 16
        counts = last(worker)
        assert (counts.trained_rows, counts.dropped_rows) == (200, left)
        assert BatchReader(worker.channel).begin() == 0
        assert trains.begin() == 0
        worker.channel.flush("input", 0)
        while isinstance(trains.next_batch(100), Batch):
            pass
        done = ledger.report({0: last(worker)}, NAMES, seconds=1.0)
        assert (done.fed_rows, done.trained_rows, done.dropped_rows) == (1000, 1000 - left, left)


@pytest.mark.fault("F37")
@pytest.mark.parametrize("dies_at", [0, 1, 16, 500, 999, 1000])
@pytest.mark.parametrize("shuffle", [None, Shuffle(3, 100)], ids=["in order", "shuffled"])
def test_a_partition_fed_again_is_trained_once_where_that_is_asked(dies_at, shuffle):
    with workers(2) as both:
        reading = [read_epochs(worker) for worker in both]
        task = feed_task(both, exactly_once=True, shuffle=shuffle)
        with pytest.raises(Killed):
            run(task, 0, until(dies_at, ROWS))
        fed = sum(worker.channel.stats("input").fed_rows for worker in both)
        assert dies_at == 0 or fed < dies_at
        report = run(task, 0, ROWS)
        end(*both)
        assert sorted(v for r in reading for v in values(r)[0]) == ROWS
        ledger = EpochLedger("input", 0)
        ledger.add([report])
        done = ledger.report({w.rank: last(w) for w in both}, NAMES, seconds=1.0)
        assert (done.fed_rows, done.trained_rows) == (1000, 1000)
        assert (done.dropped_rows, done.repeated_rows) == (0, 0)


@pytest.mark.fault("F37")
@pytest.mark.parametrize("dies_at", [16, 500, 1000])
def test_rows_that_are_trained_twice_by_default_are_counted(dies_at):
    with workers(2) as both:
        reading = [read_epochs(worker) for worker in both]
        with pytest.raises(Killed):
            run(feed_task(both), 0, until(dies_at, ROWS))
        report = run(feed_task(both), 0, ROWS)
        end(*both)
        seen = Counter(v for r in reading for v in values(r)[0])
        assert set(seen) == set(ROWS)
        ledger = EpochLedger("input", 0)
        ledger.add([report])
        done = ledger.report({w.rank: last(w) for w in both}, NAMES, seconds=1.0)
        assert (done.fed_rows, done.trained_rows, done.dropped_rows) == (1000, 1000, 0)
        assert done.repeated_rows == seen.total() - 1000 <= dies_at
        assert done.repeated_rows or dies_at == 16


@pytest.mark.fault("F37")
def test_an_attempt_that_spark_gave_up_feeds_nothing_beside_the_one_after_it():
    with workers(1) as (worker,):
        reading = read_epochs(worker)
        task = feed_task([worker], exactly_once=True)
        second: list[FeedReport] = []

        def overtaken() -> Any:
            yield from ROWS[:500]
            second.append(run(task, 0, ROWS))
            yield from ROWS[500:]

        with pytest.raises(LateChunk, match="another attempt feeds partition 0 of epoch 1 now"):
            run(task, 0, overtaken())
        end(worker)
        assert second[0].rows == 1000
        assert sorted(values(reading)[0]) == ROWS


@pytest.mark.fault("F37")
def test_an_attempt_that_spark_gave_up_takes_its_claim_back_by_no_later_greeting():
    with workers(1) as (worker,):
        task = feed_task([worker], exactly_once=True)
        hello = Hello(feed="input", exactly_once=True)
        packer = Packer(task.config)
        first = Feeder(task.targets, task.credentials(), task.config, packer, hello)
        (chunk,) = Packer(task.config).chunks(iter(ROWS[:10]))
        first._begin()
        run(task, 0, ROWS[:100])
        (link,) = first._links
        first._greet(link)
        link.put(chunk, 10.0, first._hello.attempt)
        with pytest.raises(LateChunk, match="another attempt feeds partition 0 of epoch 1 now"):
            first._settle()
        link.close()
        assert worker.channel.stats("input").fed_rows == 100


@pytest.mark.fault("F37")
def test_a_partition_that_lost_rows_meanwhile_is_refused():
    with workers(1) as (worker,):
        read_epochs(worker)
        task = feed_task([worker], exactly_once=True)
        with pytest.raises(Killed):
            run(task, 0, until(500, ROWS))
        with pytest.raises(RowsChanged, match=r"has 300 rows, but had at least 4\d\d when it was"):
            run(task, 0, ROWS[:300])
        worker.channel.finish("input")


@pytest.mark.fault("F37")
def test_a_partition_that_lost_all_of_its_rows_meanwhile_is_refused():
    with workers(1) as (worker,):
        task = feed_task([worker], exactly_once=True)
        run(task, 0, ROWS[:100])
        with pytest.raises(RowsChanged, match="has 0 rows, but had at least 100 when it was fed"):
            run(task, 0, [])
        assert worker.channel.stats("input").fed_rows == 100


@pytest.mark.fault("F37")
def test_a_partition_without_rows_is_claimed_and_fed_like_any_other():
    with workers(1) as (worker,):
        reading = read_epochs(worker)
        task = feed_task([worker], exactly_once=True)
        empty = run(task, 1, [])
        assert (empty.rows, empty.partition_rows, empty.lost) == (0, 0, ())
        run(task, 0, ROWS[:100])
        end(worker)
        assert sorted(values(reading)[0]) == ROWS[:100]


@pytest.mark.fault("F37")
def test_many_entries_are_recalled_page_by_page(monkeypatch):
    monkeypatch.setattr("feeding.protocol.messages.MAX_RECALLED", 7)
    with workers(1) as (worker,):
        reading = read_epochs(worker)
        task = feed_task([worker], exactly_once=True)

        def beside_others() -> Any:
            """Between any two of its chunks the worker takes rows of another partition."""
            for partition, first in enumerate(range(0, 900, 16), start=1):
                run(task, partition, [-1])
                yield from ROWS[first : first + 16]
            raise Killed

        with pytest.raises(Killed):
            run(task, 0, beside_others())
        assert len(worker.channel._state.queue("input").rows(0).accepted_of(0)) > 14
        run(task, 0, ROWS)
        end(worker)
        assert sorted(v for v in values(reading)[0] if v >= 0) == ROWS


class Trainer:
    """A training loop in a thread; it may be held before any batch. `trained` is what it did."""

    def __init__(self, worker: Worker, batch_size: int = 10, most: int | None = None) -> None:
        self.batches: list[list[Any]] = []
        self._go_on = threading.Event()
        self._most = most
        self._feed = DataFeed(worker.channel)
        self._batch_size = batch_size
        self._thread = Background(self._loop)

    def _loop(self) -> None:
        while not self._feed.should_stop():
            batch = self._feed.next_batch(self._batch_size)
            if self._most is not None and len(self.trained) >= self._most:
                assert self._go_on.wait(20.0)
            if batch:
                assert isinstance(batch, list)
                self.batches.append(batch)

    @property
    def trained(self) -> list[Any]:
        return [row for batch in self.batches for row in batch]

    def go_on(self) -> None:
        self._go_on.set()

    def end(self) -> None:
        self._thread.result()


PAIRS = [[(partition, row) for row in range(400)] for partition in range(2)]


@pytest.mark.fault("F01")
@pytest.mark.parametrize("shuffle", [None, Shuffle(3, 64)], ids=["in order", "shuffled"])
def test_what_a_lost_worker_had_not_trained_is_fed_again_to_whom_has_not_ended(shuffle):
    """All were told to end the epoch: the order is taken back where its end was not read."""
    with workers(3) as (dying, ended, busy):
        everybody = [dying, ended, busy]
        lost, quick, slow = Trainer(dying, most=50), Trainer(ended), Trainer(busy, most=50)
        ledger, task = EpochLedger("input", 0), feed_task(everybody, shuffle=shuffle)
        ledger.add([run(task, p, rows) for p, rows in enumerate(PAIRS)])
        eventually(lambda: last(dying).trained_rows == 50, "the one that dies has trained 50 rows")
        for worker in everybody:
            worker.channel.flush("input", 0)
        assert ended.channel.wait_flushed("input", 0, 20.0)
        said = last(dying)
        dying.listener.close()
        again = ledger.take_lost({0: said})
        assert num_rows(again) == said.accepted_rows - 50 > 0
        task = feed_task(everybody, shuffle=shuffle, again=again, round_number=1)
        reports = [run(task, p, PAIRS[p]) for p in again]
        assert {worker for report in reports for worker in report.accepted} == {2}
        assert ledger.add(reports, again=True) == 0
        slow.go_on()
        for worker in (ended, busy):
            end(worker, rounds=1)
        seen = Counter([*lost.trained[:50], *quick.trained, *slow.trained])
        assert seen == Counter(pair for pairs in PAIRS for pair in pairs)
        lasts = {0: said, 1: last(ended), 2: last(busy)}
        done = ledger.report(lasts, NAMES, seconds=1.0)
        assert (done.fed_rows, done.trained_rows, done.dropped_rows) == (800, 800, 0)
        assert done.repeated_rows == num_rows(again)
        lost.go_on()
        dying.channel.finish("input")


@pytest.mark.fault("F01")
def test_rows_that_nobody_can_take_any_more_are_dropped_and_counted():
    with workers(2) as (dying, ended):
        held = Trainer(dying, most=0)
        quick = Trainer(ended)
        ledger, task = EpochLedger("input", 0), feed_task([dying, ended])
        ledger.add([run(task, 0, PAIRS[0])])
        for worker in (dying, ended):
            worker.channel.flush("input", 0)
        assert ended.channel.wait_flushed("input", 0, 20.0)
        said = last(dying)
        dying.listener.close()
        again = ledger.take_lost({0: said})
        report = run(feed_task([dying, ended], again=again, round_number=1), 0, PAIRS[0])
        assert ledger.add([report], again=True) == num_rows(again) == said.accepted_rows
        done = ledger.report({0: said, 1: last(ended)}, NAMES, seconds=1.0)
        assert done.trained_rows == len(quick.trained)
        assert done.fed_rows == done.trained_rows + done.dropped_rows == 400
        assert done.repeated_rows == 0
        held.go_on()
        dying.channel.finish("input")


@pytest.mark.fault("F01")
def test_rows_that_come_again_after_the_epochs_end_are_unsent_if_a_worker_may_come_back():
    with workers(2) as (dying, ended):
        held, quick = Trainer(dying, most=0), Trainer(ended)
        ledger, task = EpochLedger("input", 0), feed_task([dying, ended], keeps_unsent=True)
        ledger.add([run(task, 0, PAIRS[0])])
        for worker in (dying, ended):
            worker.channel.flush("input", 0)
        assert ended.channel.wait_flushed("input", 0, 20.0)
        said = last(dying)
        dying.listener.close()
        again = ledger.take_lost({0: said})
        task = feed_task([dying, ended], again=again, round_number=1, keeps_unsent=True)
        report = run(task, 0, PAIRS[0])
        assert (report.unsent, report.no_worker) == (again[0], "")
        assert ledger.add([report], again=True) == 0
        assert ledger.has_unsent
        assert ledger.take_lost({}) == again
        held.go_on()
        dying.channel.finish("input")
        assert len(quick.trained) == 400 - num_rows(again)


@pytest.mark.fault("F01")
@pytest.mark.parametrize("shuffle", [None, Shuffle(3, 64)], ids=["in order", "shuffled"])
def test_rows_of_a_partition_that_is_another_one_when_fed_again_count_as_dropped(shuffle):
    with workers(2) as (dying, other):
        held, busy = Trainer(dying, most=0), Trainer(other)
        ledger, both = EpochLedger("input", 0), [dying, other]
        first = run(feed_task(both, shuffle=shuffle), 0, PAIRS[0])
        ledger.add([first])
        said = last(dying)
        dying.listener.close()
        again = ledger.take_lost({0: said})
        task = feed_task(both, shuffle=shuffle, again=again, round_number=1)
        report = run(task, 0, [*PAIRS[0], (0, 400)])
        assert (first.partition_rows, report.partition_rows) == (400, 401)
        assert report.dropped_rows == 0
        assert ledger.add([report], again=True) == num_rows(again) > 0
        end(other, rounds=1)
        done = ledger.report({0: said, 1: last(other)}, NAMES, seconds=1.0)
        assert done.trained_rows == 400 - num_rows(again)
        assert done.fed_rows == done.trained_rows + done.dropped_rows == 400
        assert done.repeated_rows == num_rows(again)
        assert len(busy.trained) == 400
        held.go_on()
        dying.channel.finish("input")


@pytest.mark.fault("F01")
def test_a_task_that_outlives_its_round_keeps_no_epoch_open():
    """Spark's second copy of a task, or one whose executor it gave up, says hello last."""
    with workers(1) as (worker,):
        trainer = Trainer(worker, most=50)
        run(feed_task([worker]), 0, PAIRS[0])
        worker.channel.flush("input", 0)
        again = feed_task([worker], again={1: ((0, 400),)}, round_number=1)
        assert run(again, 1, PAIRS[1]).dropped_rows == 0
        worker.channel.flush("input", 0, rounds=1)
        late = run(again, 1, PAIRS[1])
        assert (late.dropped_rows, late.accepted) == (400, {})
        trainer.go_on()
        end(worker, rounds=1)
        trainer.end()
        assert Counter(trainer.trained) == Counter(pair for pairs in PAIRS for pair in pairs)


@st.composite
def feeds(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["int", "float", "text", "list", "ragged", "tuple", "dict"]))
    sizes = draw(st.lists(st.one_of(st.just(0), st.integers(0, 90)), max_size=6))
    return {
        "kind": kind,
        "sizes": sizes,
        "num_workers": draw(st.integers(1, 3)),
        "batch_size": draw(st.integers(1, 40)),
        "epochs": draw(st.integers(1, 2)),
        "seed": draw(st.one_of(st.none(), st.integers(0, 99))),
        "window": draw(st.sampled_from([1, 7, 64])),
        "dies_at": {p: draw(st.integers(0, size)) for p, size in enumerate(sizes) if size % 3 == 1},
        "exactly_once": draw(st.booleans()),
    }


def make(kind: str, epoch: int, partition: int, row: int) -> Any:
    """A row that no other epoch or partition has."""
    number = epoch * 100_000 + partition * 1000 + row
    return {
        "int": number,
        "float": number / 4,
        "text": f"row {number}",
        "list": [number, 1],
        "ragged": [number] * (1 + row % 3),
        "tuple": (number, f"t{row % 5}"),
        "dict": {"a": [float(number), 0.5], "b": str(number)},
    }[kind]


@settings(max_examples=25)
@given(feeds())
def test_every_epoch_trains_the_rows_that_were_fed_in_full_batches(feed):
    """Random types, partitions, batches, workers; tasks that die and are repeated by Spark."""
    with workers(feed["num_workers"], transport="inproc") as some:
        trainers = [Trainer(worker, feed["batch_size"]) for worker in some]
        for epoch in range(feed["epochs"]):
            partitions = [
                [make(feed["kind"], epoch, p, row) for row in range(size)]
                for p, size in enumerate(feed["sizes"])
            ]
            wanted = Counter(repr(row) for rows in partitions for row in rows)
            before = [len(trainer.batches) for trainer in trainers]
            done = feed_epoch(some, epoch, partitions, feed)
            found = [t.batches[b:] for t, b in zip(trainers, before, strict=True)]
            trained = Counter(repr(row) for batches in found for b in batches for row in b)
            assert done.fed_rows == done.trained_rows == wanted.total()
            assert done.dropped_rows == 0
            assert done.repeated_rows == trained.total() - wanted.total()
            assert set(trained) == set(wanted)
            assert trained == wanted or not feed["exactly_once"]
            for batches in found:
                assert all(len(batch) == feed["batch_size"] for batch in batches[:-1])
        for worker in some:
            worker.channel.finish("input")
            stats = worker.channel.stats("input")
            assert stats.in_flight_rows == stats.dropped_rows == 0


def feed_epoch(some: list[Worker], epoch: int, partitions: list[list[Any]], feed: Any) -> Any:
    """Do what the driver and Spark do for an epoch, in turn."""
    shuffle = None if feed["seed"] is None else Shuffle(feed["seed"], feed["window"])
    task = feed_task(some, epoch, shuffle=shuffle, exactly_once=feed["exactly_once"])
    ledger = EpochLedger("input", epoch)
    for partition in task.order(len(partitions)):
        if partition in feed["dies_at"]:
            with pytest.raises(Killed):
                run(task, partition, until(feed["dies_at"][partition], partitions[partition]))
        ledger.add([run(task, partition, partitions[partition])])
    for worker in some:
        worker.channel.flush("input", epoch)
    for worker in some:
        assert worker.channel.wait_flushed("input", epoch, 20.0)
    lasts = {worker.rank: last(worker, epoch) for worker in some}
    return ledger.report(lasts, {worker.rank: str(worker.rank) for worker in some}, seconds=1.0)


@pytest.mark.fault("F37")
def test_one_worker_reads_the_same_order_for_the_same_seed_and_epoch():
    def read(seed: int, epoch: int, window: int = 50) -> list[int]:
        with workers(1, transport="inproc") as (worker,):
            trainer = Trainer(worker)
            task = feed_task([worker], 0, shuffle=Shuffle(seed, window))
            task = dataclasses.replace(task, epoch=epoch)
            worker.channel.flush("input", epoch - 1)
            for partition in task.order(4):
                run(task, partition, range(partition * 100, partition * 100 + 100))
            end(worker, epoch=epoch)
            trainer.end()
            return trainer.trained

    first = read(7, 1)
    assert first == read(7, 1)
    assert sorted(first) == list(range(400))
    assert first != read(7, 2) != read(8, 2)
    assert [row // 100 for row in read(7, 1, 1)][::100] == [row // 100 for row in first][::100]
