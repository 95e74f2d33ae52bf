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


def test_a_late_call_of_a_process_that_has_left_does_not_make_it_silent():
    """Its thread for beats may send one behind the last; a process before it may, too."""
    slot = SlotState()
    slot.hear(10.0, attempt=NEXT, is_leaving=True)
    for late in (NEXT, FIRST):
        slot.hear(11.0, attempt=late)
        assert not slot.is_silent(1e6)


def test_values_are_awaited_while_their_task_runs_and_then_as_long_as_a_slot():
    is_active: bool | None = True
    job: Any = SimpleNamespace(has_active_task=lambda: is_active)
    slot = SlotState(job=job)
    slot.hear(10.0, attempt=FIRST, is_leaving=True)
    assert not slot.is_stuck(1000.0, wait_s=120.0)
    is_active = None  # Spark does not say
    assert not slot.is_stuck(2000.0, wait_s=120.0)
    is_active = False
    assert not slot.is_stuck(2120.0, wait_s=120.0)
    assert slot.is_stuck(2120.1, wait_s=120.0)
    slot.job = None  # it has brought them
    assert not slot.is_stuck(1e6, wait_s=120.0)


def test_only_the_time_in_which_the_driver_stood_still_is_subtracted_from_a_silence():
    slot = SlotState()
    slot.forgive(1000.0, now_s=1010.0)
    assert not slot.is_silent(1e6)  # there is no process
    slot.hear(10.0, attempt=FIRST)
    slot.forgive(20.0, now_s=35.0)
    assert not slot.is_silent(30.0 + SILENT_S)
    assert slot.is_silent(30.1 + SILENT_S)
    slot.forgive(1000.0, now_s=70.0)
    assert slot.is_silent(70.1 + SILENT_S)


def test_a_last_round_is_repeated_only_if_it_has_trained_an_item():
    slot = SlotState()
    for has_trained in (True, True, False):
        given_up = [
            slot.set_back("the disk is full", 0.0, pauses=False) or slot.is_given_up
            for _ in range(MAX_SETBACKS)
        ]
        assert given_up == [False, False, False, True]
        slot.try_again(1.0, is_last=True)
        assert not slot.is_given_up
        if has_trained:
            slot.item_ended()
    for _ in range(MAX_SETBACKS):
        slot.set_back("the disk is full", 2.0, pauses=False)
    slot.try_again(3.0, is_last=True)
    assert slot.is_given_up
