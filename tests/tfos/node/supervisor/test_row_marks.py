"""The marks of fed rows, as a worker leaves them and its supervisor finds them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from feeding.config import FeedConfig
from feeding.sender.task import FeedTarget, FeedTask
from tfos.control import messages
from tfos.control.messages import EpochRowCounts, FeedSnapshot
from tfos.node.supervisor.row_marks import RowMarks, marked, new_file

FEEDS = ("input", "validation")
pytestmark = pytest.mark.fault("F54")


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = new_file()
    yield descriptor
    os.close(descriptor)


def test_a_worker_that_read_nothing_left_what_it_had_reported(file):
    assert marked(file, FEEDS, ()) == ()
    known = (FeedSnapshot("input", 7, trained_rows=3),)
    assert marked(file, FEEDS, known) == known


def test_marks_are_newer_than_the_last_report_and_keep_its_other_counts(file):
    marks = RowMarks(file, FEEDS)
    marks.note("input", 4, 10, 0, 20)
    marks.note("input", 5, 96, 7, 128)
    marks.note("other", 5, 1, 0, 1)
    epochs = (EpochRowCounts(4, 100, 100), EpochRowCounts(5, 900, 64))
    known = FeedSnapshot("input", 1000, trained_rows=164, dropped_rows=5, epochs=epochs)
    (found,) = marked(file, FEEDS, [known])
    assert found.epoch(5) == EpochRowCounts(5, 900, 96, 128, 7)
    assert found.epoch(4) == EpochRowCounts(4, 100, 100)
    assert (found.trained_rows, found.dropped_rows, found.fed_rows) == (196, 5, 1000)


def test_a_feed_that_was_never_reported_has_its_marks(file):
    RowMarks(file, FEEDS).note("validation", 0, 0, 0, 16)
    (found,) = marked(file, FEEDS, ())
    assert (found.feed, found.epoch(0)) == ("validation", EpochRowCounts(0, 16, 0, 16))


def test_a_report_that_is_newer_than_the_mark_stays(file):
    RowMarks(file, FEEDS).note("input", 0, 16, 0, 48)
    epochs = (EpochRowCounts(0, 64, 32, dropped_rows=4),)
    known = FeedSnapshot("input", trained_rows=32, epochs=epochs)
    (found,) = marked(file, FEEDS, [known])
    assert (found.trained_rows, found.epoch(0)) == (32, EpochRowCounts(0, 64, 32, 48, 4))


def reads_then_crashes(args, ctx):
    """Train two batches, and crash in the third one."""
    feed = ctx.get_data_feed()
    for _ in range(3):
        feed.next_batch(16)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_killed_workers_supervisor_tells_which_rows_it_had(bed):
    run = bed.start(bed.bundle("worker:0", reads_then_crashes))
    (entry,) = bed.release("worker:0")
    target = FeedTarget(0, "worker:0", entry.endpoint)
    task = FeedTask(
        targets=(target,), credentials=lambda: bed.credentials, epoch=0, config=FeedConfig()
    )
    (report,) = task(0, iter(range(100)))
    failed = bed.event("worker:0", messages.Failed)
    (counts,) = (each.epoch(0) for each in failed.feeds if each.feed == "input")
    assert (counts.trained_rows, counts.taken_rows) == (32, 48)
    assert report.rows == 100
    assert run.wait().outcome == "ended"
    bed.assert_nothing_left()
