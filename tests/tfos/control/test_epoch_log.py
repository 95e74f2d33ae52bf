"""The driver's log of trained epochs: what is kept, of which feed, what is still to come."""

from __future__ import annotations

from tfos.control.epoch_log import MAX_EPOCHS, EpochLog
from tfos.control.messages import BestSaved, EpochTrained, FitReading


def epoch(number: int, feed: str = "input", fit: int = 1) -> EpochTrained:
    return EpochTrained(fit, number, {"loss": 0.5}, feed=feed, fed_epoch=number if feed else -1)


def test_epochs_since_a_moment_are_those_of_the_feed_in_order():
    log = EpochLog()
    for each in (epoch(0), epoch(0, ""), epoch(1)):
        log.note(each)
    before = log.count
    for each in (epoch(2), epoch(0, "other"), epoch(3)):
        log.note(each)
    assert [each.epoch for each in log.since(before, "input")] == [2, 3]
    assert len(log.since(before)) == 3
    assert len(log.since(0)) == 6
    assert log.since(log.count) == ()


def test_the_newest_epochs_of_a_stream_are_kept():
    log = EpochLog()
    for number in range(MAX_EPOCHS + 5):
        log.note(epoch(number))
    assert len(log.since(0)) == MAX_EPOCHS
    assert [each.epoch for each in log.since(MAX_EPOCHS + 3)] == [MAX_EPOCHS + 3, MAX_EPOCHS + 4]


def test_an_epoch_is_awaited_while_a_fit_reads_the_feed_and_has_not_reported_it():
    log = EpochLog()
    assert not log.is_awaited("input", 0), "a loop of the user's own reports nothing"
    log.note(FitReading("input"))
    assert log.is_awaited("input", 0)
    assert not log.is_awaited("other", 0)
    log.note(epoch(0))
    assert not log.is_awaited("input", 0)
    assert log.is_awaited("input", 1)
    log.note(FitReading("input", is_over=True))
    assert not log.is_awaited("input", 1)


def test_the_best_is_the_last_that_the_chief_has_named():
    log = EpochLog()
    assert log.best is None
    for step in (3, 7):
        log.note(BestSaved(f"/s/step-{step}", step, "val_loss", 1 / step))
    assert log.best == BestSaved("/s/step-7", 7, "val_loss", 1 / 7)
