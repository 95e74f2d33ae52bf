"""The queue of map_train: a test is a list of reports and the orders that follow."""

from __future__ import annotations

import pytest

from tfos.many.messages import Ended, Ending, EndSlot, Train, WaitForItem
from tfos.many.queue import ItemTraining, SlotAttempt, TrainingQueue, TrainingState

A, B = SlotAttempt(0, 0), SlotAttempt(1, 0)


def queue_of(count, **options):
    return TrainingQueue([f"i{n}" for n in range(count)], **{"retries": 1, **options})


def done(item, seconds=1.0, attempt=1, **metrics):
    return Ended(item, Ending.RETURNED, seconds, metrics, attempt=attempt)


def failed(item, how, seconds=0.1, error="", attempt=1):
    return Ended(item, how, seconds, error=error, attempt=attempt)


def states(queue):
    for state in TrainingState:
        assert queue.count(state) == [row.state for row in queue.table].count(state)
    return [row.state.value for row in queue.table]


def test_items_are_given_out_in_order_and_the_table_fills():
    queue = queue_of(2)
    assert [queue.draw(A), queue.draw(B)] == [Train(0, 1), Train(1, 1)]
    assert states(queue) == ["training", "training"]
    assert queue.ended(A, done(0, 2.5, loss=0.5))
    assert queue.table[0] == ItemTraining(
        item="i0", state=TrainingState.DONE, seconds=2.5, attempts=1, metrics={"loss": 0.5}
    )
    assert not queue.is_complete
    queue.ended(B, done(1))
    assert queue.is_complete
    assert queue.busy_s == 3.5
    assert queue.draw(A) == EndSlot()


def test_slots_are_busy_while_they_train_also_before_an_item_has_ended():
    now_s = [0.0]
    queue = queue_of(6, clock=lambda: now_s[0])
    queue.draw(A), queue.draw(B)
    now_s[0] = 10.0
    assert queue.busy_s == 20.0
    assert queue.draw(A, holding=[0], is_ahead=True) == Train(2, 1)
    now_s[0] = 12.0
    assert queue.busy_s == 24.0, "an item ahead has not begun"
    queue.ended(A, done(0, 11.0))
    now_s[0] = 15.0
    assert queue.busy_s == 11.0 + 15.0 + 3.0
    queue.slot_lost(1, "gone")
    assert queue.busy_s == 11.0 + 3.0, "nobody knows how long a lost attempt has trained"


def test_a_slot_whose_values_are_written_late_is_busy_with_one_item_at_a_time():
    """So are all brief items with results_dir: the next but one is drawn before each report."""
    now_s = [0.0]
    queue = queue_of(6, is_durable=True, clock=lambda: now_s[0])
    queue.draw(A)
    queue.draw(A, (0,), is_ahead=True)
    for ended in range(3):
        now_s[0] += 1.0
        queue.draw(A, (ended, ended + 1), is_ahead=True)
        assert queue.busy_s == now_s[0], "the value of one is written while the next is trained"
        queue.ended(A, done(ended))
        assert queue.busy_s == now_s[0]


@pytest.mark.parametrize("how", [Ending.NOT_BEGUN, Ending.RAISED])
def test_an_item_that_was_ahead_and_is_drawn_again_has_begun(how):
    """Else a process that it kills costs it no attempt, and it is trained for ever."""
    queue = queue_of(2, is_durable=True)
    queue.draw(A)
    queue.draw(A, (0,), is_ahead=True)
    queue.ended(A, failed(1, how))  # the value of the first is still being written
    assert queue.draw(A, (0,)) == Train(1, 2)
    attempts = queue.table[1].attempts
    queue.slot_lost(0, "killed")
    assert (queue.table[1].attempts, queue.table[1].error) == (attempts, "killed")


def test_a_slot_waits_while_another_ones_item_may_come_back():
    queue = queue_of(1)
    queue.draw(A)
    assert queue.draw(B) == WaitForItem()
    queue.ended(A, failed(0, Ending.DIED, 0.1, error="killed"))
    assert queue.draw(B) == Train(0, 2)
    queue.ended(B, done(0, attempt=2))
    assert queue.draw(A) == EndSlot()
    assert (queue.table[0].attempts, queue.table[0].error) == (2, "killed")


def test_what_was_under_way_at_the_end_of_the_run_waits():
    now_s = [0.0]
    queue = queue_of(3, clock=lambda: now_s[0])
    queue.draw(A)
    queue.ended(A, done(0, 4.0))
    queue.draw(A)
    queue.draw(A, [1], is_ahead=True)  # it has not begun
    now_s[0] = 3.0
    queue.give_up()
    assert queue.busy_s == 4.0 + 3.0, "the slot was busy until then"
    assert states(queue) == ["done", "waiting", "waiting"]
    assert [row.attempts for row in queue.table] == [1, 1, 0]
    assert not queue.ended(A, done(1)), "nobody listens any more"


def test_an_item_whose_value_cannot_travel_is_not_trained_again():
    queue = queue_of(1)
    queue.draw(A)
    queue.ended(A, failed(0, Ending.NOT_PICKLABLE, 0.1, error="a lock"))
    assert (states(queue), queue.table[0].attempts) == (["failed"], 1)
    assert queue.is_complete


def test_an_item_fails_after_its_retries_with_the_last_error():
    queue = queue_of(1)
    for attempt, error in ((1, "first"), (2, "second")):
        assert queue.draw(A) == Train(0, attempt)
        queue.ended(A, failed(0, Ending.RAISED, 0.1, error=error, attempt=attempt))
    assert states(queue) == ["failed"]
    assert queue.table[0].error == "second"
    assert queue.is_complete


def test_a_report_that_repeats_another_or_names_no_item_is_left_out():
    queue = queue_of(1)
    queue.draw(A)
    assert not queue.ended(B, done(0))
    assert queue.ended(A, done(0))
    assert not queue.ended(A, done(0))
    assert not queue.ended(A, done(7))
    assert queue.busy_s == 1.0


def test_a_lost_slot_gives_its_item_back_and_its_report_comes_too_late():
    queue = queue_of(1)
    queue.draw(A)
    queue.slot_lost(0, "silent")
    assert queue.draw(B) == Train(0, 2)
    assert not queue.ended(A, done(0))
    assert queue.ended(B, done(0, attempt=2))


def test_a_newer_attempt_replaces_the_older_one():
    queue = queue_of(2)
    assert queue.draw(A) == Train(0, 1)
    newer = SlotAttempt(0, 1)
    assert queue.draw(newer) == Train(1, 1)
    assert queue.draw(A) == EndSlot()
    assert not queue.ended(A, done(0))
    assert states(queue) == ["waiting", "training"]


def test_values_of_a_lost_slot_are_trained_again_unless_files_have_them():
    for is_durable, expected in ((False, ["waiting", "done"]), (True, ["done", "done"])):
        queue = queue_of(2, is_durable=is_durable)
        for item, slot in enumerate((A, B)):
            queue.draw(slot)
            queue.ended(slot, done(item))
        queue.slot_lost(0, "executor lost")
        assert states(queue) == expected, "the other slot has its own"
        assert queue.is_complete is is_durable
        assert queue.most_losses == (not is_durable)
        assert [queue.is_newest(slot) for slot in (A, B)] == [False, True]


def test_a_value_is_lost_once_however_often_its_slot_is():
    queue = queue_of(1)
    queue.draw(A)
    queue.ended(A, done(0))
    for reason in ("executor lost", "its next process was lost"):
        queue.slot_lost(0, reason)
    assert queue.most_losses == 1
    assert queue.table[0].error == "executor lost"
    assert queue.draw(B) == Train(0, 2)
    queue.slot_lost(0, "and the one after that")
    assert states(queue) == ["training"]
    assert queue.draw(A) == WaitForItem()


def test_values_that_have_arrived_stay():
    queue = queue_of(2)
    for item in range(2):
        queue.draw(A)
        queue.ended(A, done(item))
    queue.slot_ended(0, [0])
    assert states(queue) == ["done", "waiting"]
    assert queue.draw(B) == Train(1, 2)


def test_a_slot_that_ends_takes_nothing_from_the_others():
    queue = queue_of(2)
    queue.draw(A), queue.draw(B)
    queue.ended(A, done(0))
    queue.slot_ended(0, [0])
    assert states(queue) == ["done", "training"]
    assert queue.ended(B, done(1))
    assert queue.ended_items == [0, 1]


def test_an_item_whose_order_was_lost_on_the_way_is_given_again():
    queue = queue_of(2)
    assert queue.draw(A) == Train(0, 1)
    assert queue.draw(A, holding=()) == Train(1, 1)
    assert queue.table[0].attempts == 0
    assert queue.draw(B) == Train(0, 2)  # an order of its own
    assert queue.table[0].attempts == 1
    assert queue.draw(A, holding=(1,)) == WaitForItem()


def test_items_ahead_are_given_only_while_each_slot_could_have_one():
    queue = queue_of(4)
    queue.draw(A)
    queue.draw(B)
    assert queue.draw(A, (0,), is_ahead=True) == Train(2, 1)
    assert queue.draw(B, (1,), is_ahead=True) == WaitForItem()


def test_an_item_ahead_that_was_not_begun_loses_no_attempt_with_its_slot():
    queue = queue_of(3, retries=0)
    queue.draw(A)
    assert queue.draw(A, (0,), is_ahead=True) == Train(1, 1)
    queue.slot_lost(0, "lost")
    assert states(queue) == ["failed", "waiting", "waiting"]
    assert queue.table[1].attempts == 0


def test_an_item_ahead_has_begun_once_the_one_before_it_has_ended():
    queue = queue_of(4, retries=0)
    queue.draw(A), queue.draw(B)
    assert queue.draw(A, (0,), is_ahead=True) == Train(2, 1)
    queue.ended(A, done(0))
    queue.slot_lost(0, "lost")
    # The first one's value is lost; the other slot goes on.
    assert states(queue) == ["waiting", "training", "failed", "waiting"]


def test_an_item_ahead_of_another_one_has_not_begun_when_a_value_before_both_is_written():
    queue = queue_of(3, retries=0, is_durable=True)
    queue.draw(A)
    queue.draw(A, (0,), is_ahead=True)
    queue.draw(A, (0, 1), is_ahead=True)
    queue.ended(A, done(0))  # its value was written while the second one was trained
    queue.slot_lost(0, "lost")
    assert states(queue) == ["done", "failed", "waiting"]
    assert queue.table[2].attempts == 0


def test_groups_are_trained_where_their_rows_are():
    queue = queue_of(3, homes=[0, 1, 1])
    assert [queue.draw(A), queue.draw(A, (0,))] == [Train(0, 1), WaitForItem()]
    queue.ended(A, done(0))
    assert queue.draw(A) == EndSlot()
    assert queue.has_work(1)
    assert not queue.has_work(0)
    assert [queue.draw(B), queue.draw(B, (1,), is_ahead=True)] == [Train(1, 1), Train(2, 1)]


def test_items_of_an_earlier_run_are_done():
    queue = queue_of(2)
    queue.restore({0: ItemTraining(item="i0", seconds=3.0, metrics={"loss": 1.0})})
    assert states(queue) == ["done", "waiting"]
    assert queue.draw(A) == Train(1, 1)
    queue.ended(A, done(1))
    assert queue.is_complete


@pytest.mark.parametrize("homes", [None, [0] * 6])
def test_what_an_earlier_run_left_is_trained_in_its_order(homes):
    queue = queue_of(6, homes=homes)
    queue.restore({item: ItemTraining(item=f"i{item}") for item in (3, 0, 4)})
    assert queue.ended_items == [3, 0, 4]
    orders = [queue.draw(A, (1, 2, 5)[:number]) for number in range(3)]
    assert orders == [Train(1, 1), Train(2, 1), Train(5, 1)]
    assert not queue.has_work(0)


def test_a_report_that_repeats_another_ends_no_later_attempt():
    queue = queue_of(1)
    assert queue.draw(A) == Train(0, 1)
    raised = failed(0, Ending.RAISED, 0.1, error="bad luck", attempt=1)
    assert queue.ended(A, raised)
    assert queue.draw(A) == Train(0, 2)
    assert not queue.ended(A, raised)  # its answer was lost on the way
    assert states(queue) == ["training"]
    assert queue.ended(A, failed(0, Ending.RETURNED, 0.1, attempt=2))
    assert states(queue) == ["done"]


def test_an_order_that_was_lost_on_the_way_costs_no_attempt_with_a_slot_that_hands_over():
    queue = queue_of(3, retries=0)
    queue.draw(A)
    queue.draw(A, (0,), is_ahead=True)  # its answer is lost, and the slot is full
    queue.ended(A, done(0))
    queue.slot_ended(0, [0])
    assert states(queue) == ["done", "waiting", "waiting"]
    assert queue.table[1].attempts == 0


def test_a_report_of_an_order_that_had_not_begun_says_nothing_of_the_next_one():
    queue = queue_of(1)
    assert queue.draw(A) == Train(0, 1)
    not_begun = failed(0, Ending.NOT_BEGUN, error="no process")
    assert queue.ended(A, not_begun)
    assert queue.table[0].error == "no process"
    assert queue.draw(A) == Train(0, 2)
    assert not queue.ended(A, not_begun)  # its answer was lost on the way
    assert (states(queue), queue.table[0].attempts) == (["training"], 1)
    assert queue.ended(A, done(0, attempt=2))
