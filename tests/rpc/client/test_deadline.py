"""A thread that could not look before a deadline gives the peer its time once more."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from rpc.client import deadline
from rpc.client.deadline import LATE_S, Deadline
from rpc.client.pending_call import PendingCall
from rpc.errors import DeadlineExceeded
from tests.support.held_gil import holding_gil_before
from tests.support.rpc import bed

TIMEOUT_S = 0.5


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return clock


def test_a_look_in_time_ends_at_the_deadline(clock):
    ends = Deadline(0.0, 5.0)
    assert ends.left_s() == 5.0
    clock.now_s = 5.0 + LATE_S / 2
    assert ends.left_s() < 0
    clock.now_s = 5.0 + 2 * LATE_S / 3
    assert ends.left_s() < 0


def test_a_late_look_gives_as_much_time_as_it_was_late_and_only_once(clock):
    ends = Deadline(0.0, 5.0)
    clock.now_s = 6.5
    assert ends.left_s() == 1.5
    clock.now_s = 7.0
    assert ends.left_s() == 1.0
    ends.at_s = 9.0  # the peer said that it needs longer
    assert ends.left_s() == 2.0
    clock.now_s = 60.0
    assert ends.left_s() < 0


def test_a_host_that_was_suspended_for_an_hour_waits_no_longer_than_it_had_wanted(clock):
    ends = Deadline(100.0, 105.0)
    clock.now_s = 3600.0
    assert ends.left_s() == 5.0
    ends.at_s = 3603.0  # the peer said that it needs longer
    assert ends.left_s() == 5.0
    clock.now_s = 3604.0
    assert ends.left_s() == 1.0
    clock.now_s = 3606.0
    assert ends.left_s() < 0


@pytest.mark.socket
@pytest.mark.fault("F07")
def test_a_call_that_its_own_process_held_up_gets_its_answer(monkeypatch):
    """Nothing of the request was sent when its time was over."""
    with bed() as made, made.connect() as connection:
        held = holding_gil_before(PendingCall.advance, 2 * TIMEOUT_S)
        monkeypatch.setattr(PendingCall, "advance", held)
        try:
            reply = connection.call(b"echo", [b"abc"], timeout_s=TIMEOUT_S)
        except DeadlineExceeded as error:
            pytest.fail(str(error))
        assert bytes(reply.payload) == b"abc"
