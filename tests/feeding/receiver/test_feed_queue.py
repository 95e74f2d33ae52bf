"""Order, epochs and counts of one feed, as tables of events."""

import contextlib

import hypothesis
import pytest
from hypothesis import strategies as st

from feeding.columnar.batch import EpochEnd, FeedEnd
from feeding.columnar.chunk import Chunk
from feeding.columnar.rows import rows_of
from feeding.config import FeedConfig
from feeding.encode.packer import Packer
from feeding.errors import LateChunk
from feeding.receiver.batch_reader import ChunkRows, receipt_of
from feeding.receiver.feed_queue import FeedQueue
from tests.support.packed import packed


def chunk(*rows, epoch=0, session=0, last=False):
    packer = Packer(
        FeedConfig(), epoch=epoch, mode="inference" if session else "train", session=session
    )
    if last:
        (only,) = packer.chunks(iter(rows))
        return only
    return packed(packer, rows)


def read(queue):
    """Pop until there is nothing; chunks become their rows."""
    out = []
    while (item := queue.pop()) is not None:
        if isinstance(item, EpochEnd):
            out.append(f"end {item.epoch}")
        elif isinstance(item, FeedEnd):
            return [*out, "over"]
        else:
            take(queue, item)
            out += rows_of(item)
    return out


def take(queue, item, num_rows=None):
    """Hand rows of a chunk to the trainer, as a batch."""
    part = ChunkRows(item, 0, item.num_rows if num_rows is None else num_rows)
    queue.count_taken(part.num_rows)
    queue.hand(receipt_of([part]))


def pop_chunk(queue):
    item = queue.pop()
    assert isinstance(item, Chunk)
    return item


def consistent(queue):
    stats = queue.stats()
    assert stats.fed_rows == stats.trained_rows + stats.dropped_rows + stats.in_flight_rows
    assert min(stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) >= 0
    assert stats.trained_rows <= stats.taken_rows
    for epoch in stats.epochs:
        assert min(epoch.trained_rows, epoch.dropped_rows) >= 0
        assert epoch.trained_rows + epoch.dropped_rows <= epoch.accepted_rows
    assert stats.unread_bytes >= 0
    return stats


TABLE = {
    "rows then their end": ("+0:1 +0:2 f0", [1, 2, "end 0"]),
    "an epoch without rows ends at once": ("f0", ["end 0"]),
    "a later epoch waits behind the marker": ("+1:3 +0:1 f0", [1, "end 0", 3]),
    "a later epoch alone does not overtake": ("+1:3", []),
    "two epochs": ("+0:1 f0 +1:2 f1", [1, "end 0", 2, "end 1"]),
    "markers before the reader comes": ("f0 f1", ["end 0", "end 1"]),
    "a repeated order is harmless": ("+0:1 f0 f0", [1, "end 0"]),
    "a worker that joined late skips what it never had": ("f3 +4:1 f4", ["end 3", 1, "end 4"]),
    "an earlier end that was lost is made up for": ("+0:1 +1:2 f1", [1, "end 0", 2, "end 1"]),
    "the end of the feed": ("+0:1 f0 x", [1, "end 0", "over"]),
    "the end of the feed ends the epoch under way": ("+0:1 x", [1, "end 0", "over"]),
    "the end of a feed without rows": ("x", ["over"]),
    "rows come again before the end": ("+0:1 f0 r0:1 +0:2", [1, 2]),
    "and the end is ordered behind them": ("+0:1 f0 r0:1 +0:2 f0:1", [1, 2, "end 0"]),
    "an order that a round overtook": ("+0:1 r0:1 f0", [1]),
    "a feeder of a round that is over": ("+0:1 f0 r0:1 f0:1 r0:1", [1, "end 0"]),
    "a feeder of a round that never came here": ("+0:1 f0:1 r0:1", [1, "end 0"]),
    "one more round": ("+0:1 f0 r0:1 f0:1 r0:2", [1]),
    "rounds without an order between them": ("+0:1 f0 r0:1 r0:2 r0:1 f0:2", [1, "end 0"]),
}


@pytest.mark.parametrize(("events", "expected"), TABLE.values(), ids=TABLE.keys())
def test_events_are_read_in_order(events, expected):
    queue = FeedQueue("input")
    for event in events.split():
        apply(queue, event)
    assert read(queue) == expected
    consistent(queue)


def apply(queue, event):
    if event == "x":
        queue.finish()
    elif event == "d":
        queue.drain()
    elif event.startswith("s"):
        queue.settle(int(event[1:] or 0))
    elif event.startswith("r"):
        queue.reopen(*map(int, event[1:].split(":")))
    elif event.startswith("f"):
        queue.flush(*map(int, event[1:].split(":")))
    else:
        epoch, row = event[1:].split(":")
        queue.offer(chunk(int(row), epoch=int(epoch)))


@pytest.mark.parametrize("before", ["f0", "+0:1 f0", "f1", "x"])
def test_a_chunk_of_an_ended_epoch_is_refused_and_not_counted(before):
    queue = FeedQueue("input")
    for event in before.split():
        apply(queue, event)
    fed = queue.fed_rows
    with pytest.raises(LateChunk, match="had ended when rows 0"):
        queue.offer(chunk(5, epoch=0))
    assert queue.fed_rows == fed


def test_draining_drops_what_is_unread_and_what_comes():
    queue = FeedQueue("input")
    queue.offer(chunk(1, 2, 3))
    queue.offer(chunk(4, 5))
    take(queue, pop_chunk(queue), 2)
    queue.drain()
    queue.offer(chunk(6, epoch=0))
    queue.flush(0)
    stats = consistent(queue)
    assert (stats.fed_rows, stats.trained_rows, stats.dropped_rows) == (6, 2, 4)
    assert (stats.unread_bytes, queue.epoch) == (0, 1)
    assert read(queue) == ["over"]
    queue.finish()
    queue.offer(chunk(7, epoch=0))  # its task should not fail
    assert consistent(queue).dropped_rows == 5


def test_unread_bytes_follow_the_chunks():
    queue = FeedQueue("input")
    queue.offer(chunk([1.0] * 100))
    assert queue.unread_bytes == 800
    pop_chunk(queue)
    assert (queue.unread_bytes, queue.taken_bytes) == (0, 800)
    queue.offer(chunk([1.0] * 5, session=7))
    assert isinstance(queue.pop(7), Chunk)
    assert (queue.unread_bytes, queue.taken_bytes) == (0, 840), "a feeder sees it go on"


def test_an_abandoned_session_leaves_only_the_end_of_its_batch():
    queue = FeedQueue("input")
    queue.offer(chunk(1, 2, session=7))
    queue.offer(chunk(3, session=7, last=True))
    queue.offer(chunk(4, session=8, last=True))
    take(queue, pop_chunk(queue))
    queue.abandon(7)
    marker = pop_chunk(queue)
    assert (marker.num_rows, marker.meta.last_in_partition) == (0, True)
    assert read(queue) == [4]
    assert consistent(queue).dropped_rows == 1


def test_a_session_abandoned_after_the_end_does_not_take_the_end_back():
    queue = FeedQueue("input")
    queue.offer(chunk(1, session=7))
    pop_chunk(queue)
    queue.finish()
    assert [queue.pop(), queue.pop()] == [EpochEnd(0), FeedEnd()]
    queue.abandon(7)
    assert queue.pop() == FeedEnd()
    assert queue.epoch == 1


def test_a_session_abandoned_after_the_reader_has_stopped_leaves_nothing_to_read():
    queue = FeedQueue("input")
    queue.offer(chunk(1, session=7))
    queue.drain()
    assert not queue.session_bytes(7), "its feeder waits until they are read"
    queue.abandon(7)
    assert queue.pop() == FeedEnd()


@hypothesis.given(
    st.lists(
        st.sampled_from(
            [
                "+0:1",
                "+1:1",
                "+2:1",
                "f0",
                "f1",
                "f2",
                "f0:1",
                "r0:1",
                "r0:2",
                "r1:1",
                "pop",
                "lose",
                "s",
                "s1",
                "x",
                "d",
            ]
        ),
        max_size=25,
    )
)
def test_counts_hold_whatever_happens(events):
    queue = FeedQueue("input")
    ends: list = []
    for event in events:
        if event in ("pop", "lose"):
            item = queue.pop()
            if isinstance(item, EpochEnd):
                ends.append(item.epoch)
                queue.close_epoch(item.epoch)
            elif isinstance(item, Chunk) and event == "pop":
                take(queue, item)
            elif isinstance(item, Chunk):
                queue.count_taken(item.num_rows)
        else:
            with contextlib.suppress(LateChunk):
                apply(queue, event)
        consistent(queue)
    assert ends == sorted(set(ends))


def epoch_of(queue, number):
    return next(each for each in queue.stats().epochs if each.epoch == number)


def test_a_batch_is_trained_when_the_trainer_comes_back():
    queue = FeedQueue("input")
    assert [queue.offer(chunk(1, 2, 3)), queue.offer(chunk(4)), queue.offer(chunk(9, epoch=1))] == [
        0,
        3,
        0,
    ]
    take(queue, pop_chunk(queue))
    assert (queue.trained_rows, queue.taken_rows) == (0, 3)
    take(queue, pop_chunk(queue))
    queue.settle(keep=1)
    assert queue.trained_rows == 3
    assert epoch_of(queue, 0).trained_rows == 3
    queue.flush(0)
    assert queue.pop() == EpochEnd(0)
    assert not queue.is_over(0)
    queue.settle()
    assert queue.is_over(0)
    assert (epoch_of(queue, 0).accepted_rows, epoch_of(queue, 1).trained_rows) == (4, 0)


def test_rows_that_the_trainer_leaves_out_are_trained_with_the_batch_before_them():
    queue = FeedQueue("input")
    for rows in (1, 2, 3):
        queue.offer(chunk(*range(rows)))
    take(queue, pop_chunk(queue))
    take(queue, pop_chunk(queue))
    last = pop_chunk(queue)
    queue.count_taken(last.num_rows)
    queue.hand(receipt_of([ChunkRows(last, 0, 3)]), with_last=True)
    queue.settle(1)
    assert consistent(queue).trained_rows == 1
    queue.settle()
    assert consistent(queue).trained_rows == 6


def test_rows_of_train_are_counted_apart_from_those_of_inference():
    queue = FeedQueue("input")
    queue.offer(chunk(1, 2, 3, session=7))
    queue.offer(chunk(4, 5))
    take(queue, pop_chunk(queue))
    queue.settle()
    assert (queue.trained_rows, queue.train_rows) == (3, 0)
    take(queue, pop_chunk(queue))
    queue.drain()
    assert (queue.trained_rows, queue.train_rows) == (5, 2)


def test_rows_that_were_read_ahead_and_lost_do_not_hold_up_the_epoch():
    queue = FeedQueue("input")
    queue.offer(chunk(1, 2))
    queue.offer(chunk(3))
    queue.offer(chunk(4, epoch=1))
    take(queue, pop_chunk(queue))
    queue.count_taken(pop_chunk(queue).num_rows)  # by a reader that is closed before it hands it on
    queue.flush(0)
    assert queue.pop() == EpochEnd(0)
    queue.settle()
    assert not queue.is_over(0)
    queue.close_epoch(0)
    assert queue.is_over(0)
    stats = consistent(queue)
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (2, 1, 1)
    assert epoch_of(queue, 0).trained_rows == 2


def test_a_batch_that_the_trainer_has_is_not_dropped_with_what_was_read_ahead_and_lost():
    queue = FeedQueue("input")
    queue.offer(chunk(1, 2))
    queue.offer(chunk(3))
    take(queue, pop_chunk(queue))
    queue.count_taken(pop_chunk(queue).num_rows)
    queue.flush(0)
    assert queue.pop() == EpochEnd(0)
    queue.close_epoch(0)
    stats = consistent(queue)
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (0, 1, 2)
    assert not queue.is_over(0)
    queue.settle()
    stats = consistent(queue)
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (2, 1, 0)
    assert queue.is_over(0)


def test_rows_that_another_reader_took_are_dropped_once_rows_behind_them_are_handed_out():
    queue = FeedQueue("input")
    queue.offer(chunk(1, 2))
    queue.offer(chunk(3, 4, 5))
    queue.offer(chunk(6, 7, 8, 9))
    take(queue, pop_chunk(queue))
    lost = pop_chunk(queue)
    queue.count_taken(lost.num_rows)  # by a reader that never hands it on
    take(queue, pop_chunk(queue))
    stats = consistent(queue)
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (0, 3, 6)
    queue.settle()
    stats = consistent(queue)
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (6, 3, 0)
    epoch = epoch_of(queue, 0)
    assert (epoch.accepted_rows, epoch.trained_rows, epoch.dropped_rows) == (9, 6, 3)
    queue.hand(receipt_of([ChunkRows(lost, 0, 2)]))  # that reader is back
    assert consistent(queue).dropped_rows == 3
    queue.settle()
    stats = consistent(queue)
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (8, 1, 0)
    epoch = epoch_of(queue, 0)
    assert (epoch.trained_rows, epoch.dropped_rows) == (8, 1)
    queue.offer(chunk(10))
    take(queue, pop_chunk(queue))
    queue.settle()
    stats = consistent(queue)  # what is behind them all leaves out none a second time
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (9, 1, 0)


def test_rows_that_another_reader_took_keep_no_epoch_open():
    queue = FeedQueue("input")
    queue.offer(chunk(1))
    queue.offer(chunk(2))
    queue.count_taken(pop_chunk(queue).num_rows)  # by a reader that never hands it on
    take(queue, pop_chunk(queue))
    queue.settle()
    assert not queue.is_over(0), "its end was not read"
    queue.flush(0)
    assert queue.pop() == EpochEnd(0)
    assert queue.is_over(0)


def test_epochs_behind_a_skipped_one_keep_their_rows():
    queue = FeedQueue("input")
    queue.offer(chunk(1))
    queue.offer(chunk(2, epoch=1))
    queue.skip(0)
    assert read(queue) == [2]


@pytest.mark.parametrize("last", [0, 2])
def test_rows_of_a_skipped_epoch_that_were_read_hold_nothing_up(last):
    queue = FeedQueue("input")
    queue.offer(chunk(1))
    queue.count_taken(pop_chunk(queue).num_rows)
    queue.skip(last)
    assert queue.pop() == EpochEnd(0), "the end of the epoch that the reader is in"
    assert queue.is_over(last)
    assert consistent(queue).dropped_rows == 1
    queue.offer(chunk(2, epoch=last + 1))
    assert read(queue) == [2]


def test_rows_of_inference_are_read_in_the_epoch_that_the_reader_is_in():
    queue = FeedQueue("input")
    queue.offer(chunk(1))
    queue.flush(0)
    assert read(queue) == [1, "end 0"]
    queue.offer(chunk(2, session=7))
    assert read(queue) == [2]


def test_rows_of_inference_are_read_behind_a_skipped_epoch():
    """Their feeder waited for the end of its time, and the rows were in flight for good."""
    queue = FeedQueue("validation")
    for value in (1, 3):
        queue.offer(chunk(value))
        queue.offer(chunk(value + 1, session=7))
    queue.offer(chunk(5, epoch=1))
    queue.skip(0)
    assert queue.session_bytes(7) > 0
    assert read(queue) == [2, 4, 5]
    assert queue.unread_bytes == 0


def test_a_finished_feed_ends_behind_rows_of_inference_of_a_skipped_epoch():
    """Their epoch was made after the feed's end, and its own end never came."""
    queue = FeedQueue("validation")
    queue.offer(chunk(1, session=7))
    queue.finish()
    queue.skip(0)
    assert read(queue) == [1, "end 1", "over"]


def test_a_batch_of_inference_ends_with_the_feed():
    queue = FeedQueue("input")
    queue.offer(chunk(1, session=7))
    pop_chunk(queue)
    assert queue.pop(7) is None
    queue.finish()
    rest = queue.pop(7)
    assert isinstance(rest, Chunk)
    assert (rest.num_rows, rest.meta.last_in_partition) == (0, True)


def test_skipped_rows_that_come_after_the_end_of_main_fun_are_dropped_not_in_flight():
    queue = FeedQueue("validation")
    queue.skip(0)
    queue.offer(chunk(1))
    assert consistent(queue).in_flight_rows == 0
    queue.drain()
    queue.offer(chunk(2, 3, 4))
    stats = consistent(queue)
    assert (stats.fed_rows, stats.dropped_rows, stats.in_flight_rows) == (4, 4, 0)


def test_rows_of_an_ended_epoch_that_are_trained_after_all_are_dropped_no_more():
    queue = FeedQueue("input")
    queue.offer(chunk(1, 2))
    late = pop_chunk(queue)
    queue.count_taken(late.num_rows)
    queue.flush(0)
    assert queue.pop() == EpochEnd(0)
    queue.close_epoch(0)
    assert consistent(queue).dropped_rows == 2
    queue.hand(receipt_of([ChunkRows(late, 0, 2)]))
    queue.settle()
    stats = consistent(queue)
    assert (stats.trained_rows, stats.dropped_rows, stats.in_flight_rows) == (2, 0, 0)


def test_the_order_to_end_an_epoch_is_taken_back_until_its_end_is_read():
    queue = FeedQueue("input")
    queue.offer(chunk(1))
    queue.flush(0)
    assert queue.reopen(0, 1)
    queue.offer(chunk(2))
    assert read(queue) == [1, 2]
    queue.flush(0, 1)
    assert not queue.reopen(0, 1)
    assert read(queue) == ["end 0"]
    assert not queue.reopen(0, 2)
    with pytest.raises(LateChunk):
        queue.offer(chunk(3))
    queue.drain()
    assert not queue.reopen(1, 1), "no row of it would be read"
    consistent(queue)


@pytest.mark.fault("F37")
def test_a_claimed_partition_takes_rows_of_its_newest_feeder_only():
    queue = FeedQueue("input")
    assert list(queue.rows(0).claim(0, 7)) == []
    queue.offer(chunk(1, 2), owner=7)
    assert list(queue.rows(0).claim(0, 8)) == [(0, 2, 0)]
    with pytest.raises(LateChunk, match="another attempt feeds partition 0 of epoch 1 now"):
        queue.offer(chunk(3), owner=7)
    assert consistent(queue).fed_rows == 2
    queue.offer(chunk(3), owner=8)
    assert consistent(queue).fed_rows == 3


def test_what_was_accepted_of_each_partition_is_forgotten_once_the_epoch_is_over():
    queue = FeedQueue("input")
    queue.rows(0).claim(0, 7)
    for number in range(100):
        queue.offer(chunk(number), owner=7)
    assert read(queue) == list(range(100))
    queue.settle()
    queue.close_epoch(0)
    assert queue.rows(0).accepted_of(0).num_rows == 100
    queue.flush(0)
    assert read(queue) == ["end 0"]
    queue.close_epoch(0)
    assert queue.rows(0).accepted_of(0).num_rows == 0
    assert epoch_of(queue, 0).trained_rows == 100
    with pytest.raises(LateChunk):
        queue.offer(chunk(100), owner=7)
