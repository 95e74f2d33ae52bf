"""Which ends of epochs a worker that joins now has missed."""

from __future__ import annotations

from tfos.control.epoch_log import EpochLog
from tfos.control.messages import Flush
from tfos.control.restarts.joining import OpenEpochs


def test_an_end_that_was_taken_back_is_not_missed_but_those_of_other_epochs_and_feeds():
    """A worker that gets it would end the epoch, and not train the rows that are fed again."""
    epochs = OpenEpochs()
    for feed, epoch in (("input", 0), ("input", 1), ("extra", 0)):
        epochs.note(Flush(feed, epoch))
    epochs.revoke("input", 0)
    _, missed = epochs.joining(EpochLog())
    assert missed == (Flush("input", 1), Flush("extra", 0))


def test_of_several_orders_to_end_an_epoch_the_newest_is_missed():
    epochs = OpenEpochs()
    epochs.note(Flush("input", 0))
    epochs.note(Flush("input", 0, rounds=1))
    _, missed = epochs.joining(EpochLog())
    assert missed == (Flush("input", 0, rounds=1),)


def test_the_validation_of_an_epoch_before_it_joins_is_none_of_a_workers():
    epochs = OpenEpochs()
    for epoch in range(2):
        epochs.note(Flush("input", epoch, ("validation", epoch)))
    for feed in ("input", "validation"):
        epochs.come_to(feed, 2)
    joining, missed = epochs.joining(EpochLog())
    assert (dict(joining.feeds), missed) == ({"input": 2, "validation": 2}, ())
