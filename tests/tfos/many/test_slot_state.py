"""What the driver knows of one slot, with an injected time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tfos.many.queue import SlotAttempt
from tfos.many.slot_state import AGAIN_S, MAX_SETBACKS, SILENT_S, SlotState

FIRST, NEXT = SlotAttempt(0, 0), SlotAttempt(0, 1000)


def test_a_slot_is_silent_once_it_was_heard_and_no_longer_is_unless_it_leaves():
    slot = SlotState()
    assert not slot.is_silent(1e6)
    slot.hear(10.0, attempt=FIRST)
    assert not slot.is_silent(10.0 + SILENT_S)
    assert slot.is_silent(10.1 + SILENT_S)
    slot.hear(50.0, attempt=FIRST, is_leaving=True)
    assert not slot.is_silent(1e6)
    slot.hear(60.0, attempt=NEXT)
    assert slot.is_silent(60.1 + SILENT_S)


def test_each_start_after_a_failure_waits_twice_as_long_and_the_last_one_never_comes():
    slot, pauses, given_up = SlotState(host="h"), [], []
    for number in range(MAX_SETBACKS):
        given_up.append(slot.set_back(f"failure {number}", 100.0, pauses=True))
        pauses.append(slot.resumes_s - 100.0)
    assert pauses == [1.0, 2.0, 4.0, AGAIN_S]
    assert given_up == [False, False, False, True]
    assert slot.is_given_up
    assert not slot.set_back("again", 100.0, pauses=False)  # it is told once
    assert "last time on h, without an item that ended, and is not started again: again" in (
        slot.why_given_up(3, is_alone=False)
    )


def test_a_slot_whose_values_are_read_is_not_lost_in_a_pause_of_the_driver_or_below_30_s():
    job: Any = SimpleNamespace(has_active_task=lambda: False)
    slot = SlotState(job=job)
    slot.hear(10.0, attempt=FIRST, is_leaving=True)
    assert not slot.is_stuck(10.0 + SILENT_S, wait_s=2.0)
    assert slot.is_stuck(10.1 + SILENT_S, wait_s=2.0)
    slot.forgive(1000.0, now_s=1010.0)
    assert not slot.is_stuck(1010.0 + SILENT_S, wait_s=2.0)
    assert slot.is_stuck(1011.0 + SILENT_S, wait_s=2.0)
    slot.lose()
    assert not slot.is_stuck(1e6, wait_s=2.0)
