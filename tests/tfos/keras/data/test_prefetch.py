"""Reading ahead, and the epoch's length that nobody knows before its end."""

from __future__ import annotations

import threading

import pytest

from tests.support.waiting import WAIT_S
from tfos.keras.data.epoch_length import EpochLength
from tfos.keras.data.prefetch import Failure, Prefetcher

END = "end"


def prefetcher(items, depth=2):
    source = iter(items)
    return Prefetcher(lambda: next(source), lambda item: item == END, depth=depth, name="read")


def test_each_start_reads_one_epoch():
    reader = prefetcher([1, 2, END, 3, END])
    reader.start()
    assert [reader.take() for _ in range(3)] == [1, 2, END]
    reader.start()
    assert [reader.take() for _ in range(2)] == [3, END]


def test_no_more_than_depth_and_one_are_read_ahead_and_nothing_past_the_end():
    read: list[int] = []
    third = threading.Event()

    def source():
        read.append(len(read))
        if len(read) == 3:
            third.set()
        return read[-1] if len(read) < 6 else END

    reader = Prefetcher(source, lambda item: item == END, depth=2, name="read")
    reader.start()
    assert third.wait(WAIT_S)
    assert len(read) == 3
    assert [reader.take() for _ in range(6)] == [0, 1, 2, 3, 4, END]
    assert len(read) == 6


def test_an_error_is_told_where_the_batch_is_taken_and_reading_can_go_on():
    steps = iter([1, ValueError("bad row"), 2, END])

    def source():
        step = next(steps)
        if isinstance(step, Exception):
            raise step
        return step

    reader = Prefetcher(source, lambda item: item == END, depth=1, name="read")
    reader.start()
    assert reader.take() == 1
    failed = reader.take()
    assert isinstance(failed, Failure)
    assert str(failed.error) == "bad row"
    reader.start()
    assert [reader.take(), reader.take()] == [2, END]


def test_close_ends_a_reader_that_waits_for_room():
    reader = prefetcher([1, 2, 3, 4, END], depth=1)
    reader.start()
    assert reader.take() == 1
    reader.close()
    with pytest.raises(RuntimeError, match="was closed"):
        list(iter(reader.take, END))


class Feed:
    """An epoch of `total` batches."""

    def __init__(self, total):
        self.total = total
        self.batches = 0
        self.over = False

    def at_end(self):
        self.over = self.batches == self.total
        return self.over


@pytest.mark.parametrize("total", [0, 1, 5])
@pytest.mark.parametrize("per_step", [1, 4])
def test_a_loop_like_that_of_keras_runs_to_the_end_of_each_epoch(total, per_step):
    feed = Feed(total)
    length = EpochLength(feed)
    assert (length or -1) is length
    assert length > 0
    steps = 0
    for _ in range(0, length, per_step):
        if length and steps >= length:
            break
        steps += per_step
        feed.batches = min(feed.batches + per_step, total)
    assert feed.batches == total
    assert (length > 0) == (total > 0)
    assert f"{int(length)}" == str(total) == repr(length)


def test_unknown_while_it_runs():
    feed = Feed(5)
    length = EpochLength(feed)
    assert repr(length) == "unknown"
    feed.batches = 2
    assert not length > 0, "a progress bar shows no target"
    assert float(length) == 2
    assert 6 / length == 3
    assert length - 1 == 1
