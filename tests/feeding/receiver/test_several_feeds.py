"""Several feeds of one worker at once: none holds up another, each is counted by itself."""

import dataclasses

import pytest

from feeding.columnar.batch import Batch, EpochEnd, FeedEnd
from feeding.errors import FeedTimeout
from feeding.receiver.batch_reader import BatchReader
from tests.support.feed import CONFIG, WAIT_S, Background, eventually, feed_task, workers

pytestmark = pytest.mark.socket

SMALL = dataclasses.replace(CONFIG, max_inflight_bytes=500)
FEEDS = ("left", "right")
WIDE = [[0.5] * 10] * 200


def num_rows(item):
    assert isinstance(item, Batch)
    return item.num_rows


def feed_all(some, feed, sizes, config=SMALL):
    """Feed an epoch of partitions of these sizes, one after the other."""

    def run():
        for partition, size in enumerate(sizes):
            task = feed_task(some, config=config, feed=feed)
            list(task(partition, iter([[float(row)] * 10 for row in range(size)])))
        for worker in some:
            worker.channel.flush(feed, 0)

    return Background(run)


def read_by_turns(worker, batch_size):
    """Read a batch of each feed in turn until the epoch of each has ended; count their rows."""

    def run():
        rows = dict.fromkeys(FEEDS, 0)
        reading = {feed: BatchReader(worker.channel, feed) for feed in FEEDS}
        while reading:
            for feed, reader in list(reading.items()):
                item = reader.next_batch(batch_size)
                if isinstance(item, Batch):
                    rows[feed] += item.num_rows
                else:
                    del reading[feed]
        return rows

    return Background(run)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("sizes", [[300, 0, 300], [5], []])
def test_feeds_that_are_read_by_turns_do_not_hold_each_other_up(num_workers, sizes):
    with workers(num_workers, SMALL) as some:
        feeding = [feed_all(some, "left", [200, 100]), feed_all(some, "right", sizes)]
        read = [read_by_turns(worker, 16) for worker in some]
        counts = [each.result() for each in read]
        for feeder in feeding:
            feeder.result()
        assert sum(each["left"] for each in counts) == 300
        assert sum(each["right"] for each in counts) == sum(sizes)


def test_a_full_feed_that_is_not_read_yet_leaves_room_for_the_other():
    with workers(1, SMALL) as (worker,):
        waiting = feed_all([worker], "right", [500])
        eventually(lambda: worker.channel.stats("right").unread_bytes > 500, "right is full")
        feeding = feed_all([worker], "left", [400])
        reader = BatchReader(worker.channel, "left")
        rows = 0
        while isinstance(item := reader.next_batch(16), Batch):
            rows += item.num_rows
        feeding.result()
        assert rows == 400
        assert not waiting.done
        assert worker.channel.stats("right").taken_rows == 0
        worker.channel.drain("right")
        waiting.result()
        stats = worker.channel.stats("right")
        assert stats.dropped_rows == stats.fed_rows


def test_a_feed_that_is_never_read_is_named_by_its_feeder():
    config = dataclasses.replace(SMALL, feed_timeout_s=1.0)
    with workers(1, config) as (worker,):
        feeding = feed_all([worker], "right", [500], config)
        with pytest.raises(FeedTimeout, match="no worker consumed anything of feed 'right'"):
            feeding.result()


def test_validation_of_an_epoch_is_dropped_once_the_next_epoch_is_asked_for():
    with workers(1, SMALL) as (worker,):
        channel = worker.channel
        list(feed_task([worker], config=SMALL, feed="input")(0, iter([1, 2])))
        channel.flush("input", 0, ("validation", 4))
        trained, validated = (BatchReader(channel, feed) for feed in ("input", "validation"))
        assert num_rows(trained.next_batch(8)) == 2
        assert isinstance(trained.next_batch(8), EpochEnd)

        def feed():
            return list(feed_task([worker], 4, SMALL, feed="validation")(0, iter(WIDE)))

        feeding = Background(feed)
        assert num_rows(validated.next_batch(8)) == 8
        eventually(lambda: channel.stats("validation").unread_bytes > 500, "the feeder waits")
        following = Background(lambda: trained.next_batch(8))  # nothing has come of it yet
        (report,) = feeding.result()
        channel.flush("validation", 4)
        read = 8
        while isinstance(item := validated.next_batch(8), Batch):
            read += item.num_rows  # the rest of the chunk under way
        assert isinstance(item, EpochEnd)
        assert channel.wait_flushed("validation", 4, WAIT_S)
        stats = channel.stats("validation")
        assert (stats.fed_rows, stats.trained_rows, stats.dropped_rows) == (200, read, 200 - read)
        assert read < 50
        assert report.rows == 200
        # Later epochs are read as ever.
        list(feed_task([worker], 5, SMALL, feed="validation")(0, iter(WIDE[:5])))
        channel.flush("validation", 5)
        assert num_rows(validated.next_batch(8)) == 5
        channel.finish("input")
        assert isinstance(following.result(), FeedEnd)
