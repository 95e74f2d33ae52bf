"""Fits at once: each waits in its turn until its nodes fit beside those that run."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from tests.support.feed import eventually
from tests.support.waiting import WAIT_S
from tfos.errors import NotEnoughSlots
from tfos.estimators import slots
from tfos.estimators.slots import SlotQueue


class Fit(threading.Thread):
    """Holds slots until it is told to end."""

    def __init__(self, queue, count, total=3):
        super().__init__(daemon=True)
        self.began, self.end = threading.Event(), threading.Event()
        self._take = lambda: queue.take(count, lambda: total)
        self.start()

    def run(self):
        with self._take():
            self.began.set()
            assert self.end.wait(WAIT_S)

    def finish(self):
        self.end.set()
        self.join(WAIT_S)


def test_fits_wait_for_those_before_them():
    queue = SlotQueue()
    first = Fit(queue, 2)
    assert first.began.wait(WAIT_S)
    second = Fit(queue, 2)
    eventually(lambda: len(queue._waiting) >= 1, "a fit waits")
    third = Fit(queue, 1)
    eventually(lambda: len(queue._waiting) >= 2, "a fit waits")
    assert not second.began.is_set()
    assert not third.began.is_set()  # it would fit, but is not the next one
    first.finish()
    assert second.began.wait(WAIT_S)
    assert third.began.wait(WAIT_S)
    second.finish()
    third.finish()
    assert queue._taken == 0


def test_a_fit_that_never_fits_is_left_to_the_cluster_to_refuse():
    fit = Fit(SlotQueue(), 9)
    assert fit.began.wait(WAIT_S)
    fit.finish()


def test_a_fit_that_fails_gives_its_slots_back():
    queue = SlotQueue()
    try:
        with queue.take(3, lambda: 3):
            raise ValueError
    except ValueError:
        pass
    with queue.take(3, lambda: 3):
        assert queue._taken == 3


def test_a_fit_gives_up_where_no_other_ends_in_time():
    queue = SlotQueue()
    first = Fit(queue, 2)
    assert first.began.wait(WAIT_S)
    with (
        pytest.raises(
            NotEnoughSlots, match=r"needs 2 task slots, .* 2 of 3; none .* for 0 s. Find"
        ),
        queue.take(2, lambda: 3, timeout_s=0.0),
    ):
        pytest.fail("there is 1 slot")
    first.finish()
    with queue.take(2, lambda: 3, timeout_s=0.0):
        assert queue._taken == 2


def test_a_fit_waits_for_as_long_as_others_begin_and_end(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(slots, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(slots, "_LOOK_S", 0.0)
    queue = SlotQueue()

    def total() -> int:
        now_s[0] += 60.0
        if now_s[0] <= 180.0:
            queue._count(0)  # as a fit that ends while another one begins
        return 3

    with queue.take(2, total):
        with pytest.raises(NotEnoughSlots), queue.take(2, total, timeout_s=100.0):
            pytest.fail("there is 1 slot")
        assert now_s[0] > 180.0 + 100.0
