"""A run at the driver: slots are played by functions in this process, Spark by FakeSpark."""

from __future__ import annotations

import dataclasses
import io
import math
import threading

import pytest

from tests.support.fake_spark import FakeSpark
from tests.support.ps_cluster import run_all
from tfos.console.console import Console
from tfos.errors import MapTrainError, NotEnoughSlots
from tfos.many import run, slot_state
from tfos.many.messages import Draw, Ended, Ending, EndSlot, SlotBeat, Train, WaitForItem
from tfos.many.queue import TrainingQueue, TrainingState
from tfos.many.run import MapRun, SlotJobs
from tfos.many.trainings import ManyTrainings
from tfos.spark.jobs import SparkJob

WAIT_S = 30.0


class NoServer:
    def close(self):
        pass


class Bed:
    """One run, over three items if no others are named."""

    def __init__(
        self,
        slot,
        *,
        names="abc",
        num_slots=2,
        wait_s=WAIT_S,
        offer=lambda: "",
        are_slots_held=lambda: False,
        check=None,
        **options,
    ):
        self.spark = FakeSpark()
        self.queue = TrainingQueue(list(names), **{"retries": 1, **options})
        self.slot = slot
        self.text = io.StringIO()
        jobs = SlotJobs(
            sc=self.spark,
            run_id="r",
            num_slots=num_slots,
            action=self._act,
            wait_s=wait_s,
            offer=offer,
            are_slots_held=are_slots_held,
        )
        self.run = MapRun(self.queue, Console(stream=self.text), check)
        self.trainings = ManyTrainings(self.run, dict.fromkeys(names, ""), None, None)
        self.run.start(NoServer(), jobs)

    def _act(self, slot, attempt):
        return self.slot(self, slot, attempt)

    def draw(self, slot, attempt, ended=(), holding=()):
        return self.run.on_draw(Draw(slot, attempt, ended, holding, host=f"host-of-{slot}"))


def starts(bed):
    return [state.starts for state in bed.run._slots]


@pytest.fixture
def beds(monkeypatch):
    monkeypatch.setattr(slot_state, "PAUSE_S", 0.0)
    monkeypatch.setattr(slot_state, "AGAIN_S", 0.0)
    made = []

    def make(slot, **options):
        made.append(Bed(slot, **options))
        return made[-1]

    yield make
    for bed in made:
        bed.trainings.cancel()
        bed.spark.close()


def trains_all(bed, slot, attempt, order=None):
    values: list[tuple[int, bytes]] = []
    ended: tuple[Ended, ...] = ()
    while True:
        order = order or bed.draw(slot, attempt, ended, [each.item for each in ended])
        ended = ()
        if isinstance(order, Train):
            ended = (
                Ended(order.item, Ending.RETURNED, 0.5, {"loss": order.item}, "", order.attempt),
            )
            values.append((order.item, b"\x80\x04K" + bytes([order.item]) + b"."))
        elif not isinstance(order, WaitForItem):
            return values
        order = None


def ends_all(how, error):
    """A slot that reports this end of each item that it draws."""

    def slot_of(bed, slot, attempt):
        while isinstance(order := bed.draw(slot, attempt), Train):
            ended = Ended(order.item, how, 0.1, error=error, attempt=order.attempt)
            bed.run.on_beat(SlotBeat(slot, attempt, (ended,)))
        return []

    return slot_of


def test_a_run_ends_with_a_row_and_a_value_for_each_item(beds):
    bed = beds(trains_all)
    assert {row.item: row.metrics["loss"] for row in bed.trainings.as_ended()} == {
        "a": 0.0,
        "b": 1.0,
        "c": 2.0,
    }
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2}
    assert bed.trainings.failed == []
    bed.trainings.raise_failed()
    assert repr(bed.trainings) == "<3 trainings: 3 done>"
    assert bed.trainings.busy_share > 0


def test_a_job_that_fails_is_started_again_and_its_items_too(beds):
    failed = threading.Event()

    def dies_once(bed, slot, attempt):
        if not failed.is_set():
            failed.set()
            bed.draw(slot, attempt)
            raise RuntimeError("executor lost")
        return trains_all(bed, slot, attempt)

    bed = beds(dies_once, num_slots=1)
    assert bed.trainings.wait(WAIT_S)
    first = bed.trainings.table()[0]
    assert (first.attempts, first.error) == (2, "slot 0: executor lost")


@pytest.mark.parametrize("timeout_s", [math.inf, 1e30])
def test_a_wait_without_a_limit_may_be_written_as_a_number(beds, timeout_s):
    asked = threading.Event()

    def trains_once_asked(bed, slot, attempt):
        assert asked.wait(WAIT_S)
        return trains_all(bed, slot, attempt)

    def is_enough() -> bool:
        asked.set()
        return False

    bed = beds(trains_once_asked, num_slots=1)
    assert not bed.run.wait(None, math.nan)
    assert bed.run.wait(is_enough, timeout_s)
    assert bed.run.is_over


def test_jobs_that_always_fail_end_the_run(beds):
    def dies(bed, slot, attempt):
        raise RuntimeError("no python here")

    bed = beds(dies)
    text = (
        r"failed 4 times one after .*: its job failed: no python here; no other slot trains the 3"
    )
    with pytest.raises(MapTrainError, match=text):
        bed.trainings.wait(WAIT_S)
    assert starts(bed) == [4, 4]


def test_no_slot_is_a_bounded_wait_with_a_sentence(beds):
    asked = threading.Event()

    def offer():
        asked.set()
        return "0 executors"

    def waits_for_spark(bed, slot, attempt):
        asked.wait(WAIT_S)
        return []

    bed = beds(waits_for_spark, wait_s=0.1, offer=offer)
    with pytest.raises(NotEnoughSlots, match=r"no slot has trained for 0 s: 0 executors"):
        bed.trainings.wait(WAIT_S)


def count_tasks(monkeypatch, active):
    """Let Spark say how many tasks of each job run."""
    monkeypatch.setattr(SparkJob, "has_active_task", lambda job: active)


def leaves_for_ever(bed, slot, attempt):
    """Train all, and lose the executor before the values are there."""
    values = trains_all(bed, slot, attempt)
    bed.run.on_beat(SlotBeat(slot, attempt, is_leaving=True))
    cancelled: list[str] = []
    bed.spark.cancelJobsWithTag = cancelled.append
    while not cancelled:
        bed.run.wait(None, 0.01)
    return values


def test_values_whose_task_runs_nowhere_are_not_awaited_for_ever(beds, monkeypatch):
    count_tasks(monkeypatch, False)
    monkeypatch.setattr(slot_state, "SILENT_S", 0.2)
    bed = beds(leaves_for_ever, num_slots=1, wait_s=0.2, offer=lambda: "0 executors")
    with pytest.raises(NotEnoughSlots, match="no slot has trained for 0 s: 0 executors"):
        bed.trainings.wait(WAIT_S)
    assert all("its task has run nowhere for 0 s" in row.error for row in bed.trainings.table())


def test_a_run_ends_without_slots_that_leave_where_files_have_all_values(beds, monkeypatch):
    monkeypatch.setattr(run, "_LEAVE_S", 0.1)
    bed = beds(leaves_for_ever, num_slots=1, is_durable=True)
    assert bed.trainings.wait(WAIT_S)
    assert bed.trainings.failed == []


@pytest.mark.parametrize("has_task", [True, False])
def test_rows_that_spark_computes_again_are_awaited(beds, monkeypatch, has_task):
    """The first slot is lost, and its next job has nothing to say for longer than wait_s."""
    count_tasks(monkeypatch, has_task)
    looked = threading.Event()
    before = MapRun._computes

    def computes(this):
        found = before(this)
        if sum(starts(this_bed[0])) > 1:
            looked.set()
        return found

    this_bed: list[Bed] = []
    monkeypatch.setattr(MapRun, "_computes", computes)

    def is_lost_once(bed, slot, attempt):
        if not this_bed:
            this_bed.append(bed)
            bed.draw(slot, attempt)
            raise RuntimeError("executor lost")
        looked.wait(WAIT_S)
        return trains_all(bed, slot, attempt)

    bed = beds(is_lost_once, num_slots=1, wait_s=0.3)
    if has_task:
        assert bed.trainings.wait(WAIT_S)
        assert bed.trainings.failed == []
    else:
        with pytest.raises(NotEnoughSlots):
            bed.trainings.wait(WAIT_S)


def test_slots_are_told_to_stop_when_the_run_is_cancelled(beds):
    told = threading.Event()

    def beats(bed, slot, attempt):
        bed.draw(slot, attempt)
        while not bed.run.on_beat(SlotBeat(slot, attempt)).stop:
            told.wait(0.01)
        told.set()
        return []

    bed = beds(beats, num_slots=1)
    while bed.run.read(lambda queue: not queue.count(TrainingState.TRAINING)):
        bed.run.wait(None, 0.01)
    bed.trainings.cancel()
    assert told.wait(WAIT_S)
    assert bed.trainings.is_over
    assert bed.draw(0, 1) == EndSlot()


def test_nothing_is_in_training_once_a_run_was_cancelled_whose_job_was_killed(beds):
    def is_killed(bed, slot, attempt):
        bed.draw(slot, attempt)
        while not bed.run.on_beat(SlotBeat(slot, attempt)).stop:
            bed.run.wait(None, 0.01)
        raise RuntimeError("Job 1 cancelled")

    bed = beds(is_killed, num_slots=1)
    while bed.run.read(lambda queue: not queue.count(TrainingState.TRAINING)):
        bed.run.wait(None, 0.01)
    bed.trainings.cancel()
    assert {row.state for row in bed.trainings.table()} == {TrainingState.WAITING}
    assert "map_train: 0 of 3 done, 0 in training" in bed.text.getvalue()


@pytest.mark.attack("A24")
def test_an_items_error_cannot_steer_the_terminal(beds):
    fails = ends_all(Ending.RAISED, "\x1b]0;title\x07\n\tboom")
    bed = beds(fails, names="a", num_slots=1, retries=0)
    assert bed.trainings.wait(WAIT_S)
    assert bed.trainings.table()[0].error == "\\x1b]0;title\\x07\n\tboom"


def test_failed_items_raise_with_their_names_only_when_asked(beds):
    def fails(bed, slot, attempt):
        while isinstance(order := bed.draw(slot, attempt), Train):
            ended = Ended(
                order.item,
                Ending.RAISED,
                0.1,
                error=f"no data for {order.item}",
                attempt=order.attempt,
            )
            bed.run.on_beat(SlotBeat(slot, attempt, (ended,)))
        return []

    bed = beds(fails, num_slots=1, retries=0)
    assert bed.trainings.wait(WAIT_S)
    with pytest.raises(MapTrainError, match=r"3 of 3 items .*: 'a', 'b', 'c'.*no data for 0"):
        bed.trainings.raise_failed()
    with pytest.raises(MapTrainError, match="item 'b' is failed after 1 attempts: no data for 1"):
        bed.trainings.value("b")
    assert "3 failed" in repr(bed.trainings)


def test_a_slot_that_hands_its_values_over_is_not_silent(beds, monkeypatch):
    handed_over = threading.Event()

    def slow_values(bed, slot, attempt):
        values = trains_all(bed, slot, attempt)
        bed.run.on_beat(SlotBeat(slot, attempt, is_leaving=True))
        monkeypatch.setattr(slot_state, "SILENT_S", 0.0)
        handed_over.wait(WAIT_S)
        return values

    bed = beds(slow_values, num_slots=1)
    while slot_state.SILENT_S:
        bed.run.wait(None, 0.01)
    assert not bed.trainings.wait(2 * run._LOOK_S)
    assert repr(bed.trainings) == "<3 trainings: 3 done>"
    handed_over.set()
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2}


def test_the_job_of_a_silent_slot_is_started_again(beds, monkeypatch):
    monkeypatch.setattr(slot_state, "SILENT_S", 0.1)
    cancelled = threading.Event()

    def freezes_once(bed, slot, attempt):
        bed.spark.cancelJobsWithTag = lambda tag: cancelled.set()
        if not cancelled.is_set():
            bed.draw(slot, attempt)
            assert cancelled.wait(WAIT_S)
            raise RuntimeError("Job 1 cancelled")
        monkeypatch.setattr(slot_state, "SILENT_S", WAIT_S)
        return trains_all(bed, slot, attempt)

    bed = beds(freezes_once, num_slots=1)
    bed.run.wait(None, 2 * WAIT_S)
    assert bed.run.error is None
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2}
    assert bed.trainings.table()[0].error == "slot 0 was silent for 0 s"


def test_slots_that_fall_silent_at_once_end_no_others(beds, monkeypatch):
    monkeypatch.setattr(slot_state, "SILENT_S", 0.1)
    cancelled: list[str] = []

    def freezes(bed, slot, attempt):
        bed.spark.cancelJobsWithTag = cancelled.append
        order = bed.draw(slot, attempt)
        if slot < 4 and not attempt:
            while f"tfos-many-r-{slot}-0" not in cancelled:
                bed.run.wait(None, 0.01)
            raise RuntimeError("Job 1 cancelled")
        while sum(starts(bed)) < 12 and not bed.run.on_beat(SlotBeat(slot, attempt)).stop:
            bed.run.wait(None, 0.01)
        monkeypatch.setattr(slot_state, "SILENT_S", WAIT_S)
        return trains_all(bed, slot, attempt, order)

    bed = beds(freezes, num_slots=8, names="abcdefgh")
    bed.run.wait(None, WAIT_S)
    assert bed.run.error is None
    assert bed.trainings.values() == {name: at for at, name in enumerate("abcdefgh")}


def freezes_always(bed, slot, attempt):
    cancelled: list[str] = []
    bed.spark.cancelJobsWithTag = cancelled.append
    bed.draw(slot, attempt)
    while not cancelled:
        bed.run.wait(None, 0.01)
    raise RuntimeError("Job 1 cancelled")


def is_stopped(bed, slot, attempt):
    return bed.run.on_beat(SlotBeat(slot, attempt)).stop


def test_a_slot_that_always_falls_silent_ends_the_run_with_its_host(beds, monkeypatch):
    monkeypatch.setattr(slot_state, "SILENT_S", 0.05)
    bed = beds(freezes_always, num_slots=1, names="abcdef", retries=9)
    text = (
        r"slot 0 of map_train has failed 4 times .*, the last time on host-of-0.* Look there for"
        ".*; no other slot trains the 6 items that wait"
    )
    with pytest.raises(MapTrainError, match=text):
        bed.trainings.wait(WAIT_S)
    assert starts(bed) == [4]


def test_the_others_go_on_without_a_slot_that_always_falls_silent(beds, monkeypatch):
    monkeypatch.setattr(slot_state, "SILENT_S", 0.1)

    def freezes(bed, slot, attempt):
        if slot == 0:
            return freezes_always(bed, slot, attempt)
        order = bed.draw(slot, attempt)
        while "slot 0" not in bed.text.getvalue() and not is_stopped(bed, slot, attempt):
            bed.run.wait(None, 0.01)
        return trains_all(bed, slot, attempt, order)

    bed = beds(freezes, names="abcdefgh", retries=9)
    assert bed.trainings.values() == {name: at for at, name in enumerate("abcdefgh")}
    assert starts(bed) == [4, 1]
    assert bed.text.getvalue().count("WARNING: slot 0 of map_train has failed 4 times") == 1


def test_the_others_go_on_without_a_slot_whose_jobs_fail_at_once(beds):
    def fails(bed, slot, attempt):
        if slot == 1:
            raise RuntimeError("No space left on device")
        order = bed.draw(slot, attempt)
        while "slot 1" not in bed.text.getvalue() and not is_stopped(bed, slot, attempt):
            bed.run.wait(None, 0.01)
        for _ in range(2):  # the run has looked at a slot that is given up
            looked_s = bed.run._looked_s
            while bed.run._looked_s == looked_s and not is_stopped(bed, slot, attempt):
                bed.run.wait(None, 0.01)
        return trains_all(bed, slot, attempt, order)

    bed = beds(fails, names="abcd")
    bed.run.wait(None, WAIT_S)
    assert bed.run.error is None
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2, "d": 3}
    assert starts(bed) == [1, 4]
    told = "WARNING: slot 1 of map_train has failed 4 times one after the other"
    assert bed.text.getvalue().count(told) == 1
    assert "its job failed: No space left on device" in bed.text.getvalue()


def test_a_slot_whose_jobs_fail_is_given_up_although_items_of_others_end(beds):
    def fails(bed, slot, attempt):
        if slot == 1:
            raise RuntimeError("No space left on device")
        held, values = bed.draw(slot, attempt), []
        while isinstance(held, Train):
            failures = bed.run._slots[1].setbacks  # one item of this slot for each failure of that
            while not (bed.run._slots[1].is_given_up or is_stopped(bed, slot, attempt)):
                if bed.run._slots[1].setbacks > failures:
                    break
                bed.run.wait(None, 0.01)
            ended = Ended(held.item, Ending.RETURNED, 0.1, attempt=held.attempt)
            values.append((held.item, b"N."))
            held = bed.draw(slot, attempt, (ended,), [held.item])
        return values

    bed = beds(fails, names="abcdefghij")
    bed.run.wait(None, WAIT_S)
    assert bed.run.error is None
    assert starts(bed)[1] == 4


def not_begun(bed, slot, attempt):
    """Play a slot whose function cannot be loaded."""
    order = bed.draw(slot, attempt)
    while isinstance(order, Train):
        ended = Ended(order.item, Ending.NOT_BEGUN, 0.0, error="No mylib", attempt=order.attempt)
        order = bed.draw(slot, attempt, (ended,))
    return []


def test_a_function_that_executors_cannot_load_costs_no_attempt_and_ends_the_run(beds):
    bed = beds(not_begun, num_slots=1, names="abcdef", retries=0)
    text = r"failed 4 times .* on host-of-0, .* the function has not begun: No mylib; no other slot"
    with pytest.raises(MapTrainError, match=text):
        bed.trainings.wait(WAIT_S)
    rows = bed.trainings.table()
    assert {(row.state, row.attempts) for row in rows} == {(TrainingState.WAITING, 0)}
    assert [row.error for row in rows] == 4 * ["No mylib"] + ["", ""]


def test_a_slot_that_cannot_load_the_function_leaves_the_items_to_others(beds):
    def one_cannot(bed, slot, attempt):
        if slot == 1:
            return not_begun(bed, slot, attempt)
        while not (bed.run._slots[1].is_given_up or is_stopped(bed, slot, attempt)):
            bed.run.wait(None, 0.01)
        return trains_all(bed, slot, attempt)

    bed = beds(one_cannot, retries=0)
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2}
    assert starts(bed) == [1, 1]
    assert {row.attempts for row in bed.trainings.table()} == {1}


def test_a_slot_that_ends_items_between_its_silences_is_started_again(beds, monkeypatch):
    monkeypatch.setattr(slot_state, "SILENT_S", 0.1)

    def trains_one(bed, slot, attempt):
        order = bed.draw(slot, attempt)
        ended = (Ended(order.item, Ending.RETURNED, 0.1, attempt=order.attempt),)
        bed.run.on_beat(SlotBeat(slot, attempt, ended))
        if order.item < 5:
            return freezes_always(bed, slot, attempt)
        return []

    bed = beds(trains_one, num_slots=1, names="abcdef", retries=9, is_durable=True)
    bed.run.wait(None, WAIT_S)
    assert bed.run.error is None
    assert bed.queue.count(TrainingState.DONE) == 6


def test_slots_that_are_lost_with_their_executor_end_no_others(beds):
    lost = threading.Barrier(4)

    def is_lost_once(bed, slot, attempt):
        if not attempt:
            bed.draw(slot, attempt)
            lost.wait(WAIT_S)
            raise RuntimeError("executor lost")
        return trains_all(bed, slot, attempt)

    bed = beds(is_lost_once, num_slots=4, names="abcd")
    bed.run.wait(None, WAIT_S)
    assert bed.run.error is None
    assert bed.trainings.values() == {name: at for at, name in enumerate("abcd")}


def test_a_pause_of_the_driver_is_no_silence_of_its_slots(beds):
    paused = threading.Event()

    def trains_on(bed, slot, attempt):
        order = bed.draw(slot, attempt)
        paused.wait(WAIT_S)
        return trains_all(bed, slot, attempt, order)

    bed = beds(trains_on, num_slots=1)
    while bed.run._slots[0].seen_s is None:
        bed.run.wait(None, 0.01)
    with bed.run._changed:  # all that it has seen is as long ago as after a pause
        bed.run._looked_s -= 2 * WAIT_S
        bed.run._any_seen_s -= 2 * WAIT_S
        bed.run._slots[0].seen_s -= 2 * WAIT_S
        before_s = bed.run._looked_s
    while bed.run._looked_s == before_s:
        bed.run.wait(None, 0.01)
    paused.set()
    bed.run.wait(None, WAIT_S)
    assert bed.run.error is None
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2}
    assert [row.error for row in bed.trainings.table()] == ["", "", ""]


def test_a_slot_that_freezes_after_its_last_item_is_started_again(beds, monkeypatch):
    cancelled = threading.Event()

    def freezes_once(bed, slot, attempt):
        bed.spark.cancelJobsWithTag = lambda tag: cancelled.set()
        values = trains_all(bed, slot, attempt)
        if not attempt:
            monkeypatch.setattr(slot_state, "SILENT_S", 0.1)
            cancelled.wait(2 * WAIT_S)
            monkeypatch.setattr(slot_state, "SILENT_S", WAIT_S)
            raise RuntimeError("Job 1 cancelled")
        return values

    bed = beds(freezes_once, num_slots=1)
    assert bed.trainings.wait(WAIT_S)
    assert [row.attempts for row in bed.trainings.table()] == [2, 2, 2]
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2}


def test_a_run_whose_values_cannot_be_stored_ends_after_a_few(beds):
    trains_in_vain = ends_all(Ending.NOT_KEPT, "was not kept: OSError: no space")
    bed = beds(trains_in_vain, num_slots=1, retries=9)
    with pytest.raises(
        MapTrainError, match=r"4 values one after the other .*no space. Make room there"
    ):
        bed.trainings.wait(WAIT_S)
    assert sum(row.attempts for row in bed.trainings.table()) == 4


def test_an_item_that_is_trained_again_after_its_value_was_lost_is_yielded_once(beds):
    lost = threading.Event()

    def loses_its_values_once(bed, slot, attempt):
        values = trains_all(bed, slot, attempt)
        if not lost.is_set():
            lost.set()
            raise RuntimeError("executor lost")
        return values

    bed = beds(loses_its_values_once, num_slots=1)
    assert sorted(row.item for row in bed.trainings.as_ended()) == ["a", "b", "c"]
    assert [row.attempts for row in bed.trainings.table()] == [2, 2, 2]
    assert bed.trainings.values() == {"a": 0, "b": 1, "c": 2}


def test_an_item_whose_value_was_lost_before_it_was_read_is_yielded_once_it_is_done(
    beds, monkeypatch
):
    read = threading.Event()

    def loses_its_values_once(bed, slot, attempt):
        if attempt:
            read.wait(WAIT_S)
            return trains_all(bed, slot, attempt)
        trains_all(bed, slot, attempt)
        raise RuntimeError("executor lost")

    bed = beds(loses_its_values_once, num_slots=1)
    while not bed.queue.most_losses:
        bed.run.wait(None, 0.01)
    wait = bed.trainings._wait

    def waits_for_more(*args):
        read.set()
        return wait(*args)

    monkeypatch.setattr(bed.trainings, "_wait", waits_for_more)
    rows = list(bed.trainings.as_ended())
    assert [(row.item, row.state) for row in rows] == [(name, "done") for name in "abc"]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_item_that_fails_with_its_slot_is_yielded_too(beds, is_replaced):
    """Its job fails, or Spark starts its task again and another process draws."""

    def is_lost_once(bed, slot, attempt):
        if attempt:
            return trains_all(bed, slot, attempt)
        bed.draw(slot, attempt)
        if is_replaced:
            return trains_all(bed, slot, attempt + 1)
        raise RuntimeError("executor lost")

    bed = beds(is_lost_once, num_slots=1, retries=0)
    rows = list(bed.trainings.as_ended())
    assert sorted((row.item, row.state.value) for row in rows) == [
        ("a", "failed"),
        ("b", "done"),
        ("c", "done"),
    ]


@pytest.mark.parametrize(
    ("reason", "text", "attempts"),
    [
        (
            "results (2 GiB) is bigger than spark.driver.maxResultSize (1 GiB)",
            "too large.*Raise",
            1,
        ),
        ("executor lost", "lost 4 times with their slots.*executor lost. Pass results_dir", 4),
    ],
)
def test_values_that_never_arrive_end_the_run(beds, reason, text, attempts):
    def trains_in_vain(bed, slot, attempt):
        trains_all(bed, slot, attempt)
        raise RuntimeError(reason)

    bed = beds(trains_in_vain, num_slots=1)
    with pytest.raises(MapTrainError, match=text):
        bed.trainings.wait(WAIT_S)
    assert {row.attempts for row in bed.trainings.table()} == {attempts}


def test_a_package_that_executors_lack_has_a_next_step(beds):
    def bare(bed, slot, attempt):
        raise RuntimeError("ModuleNotFoundError: No module named 'msgspec'")

    bed = beds(bare)
    with pytest.raises(
        MapTrainError, match=r"msgspec'\. The executors' Python lacks it: set PYSPARK"
    ):
        bed.trainings.wait(WAIT_S)


def test_a_value_that_the_driver_cannot_read_is_named(beds):
    def trains(bed, slot, attempt):
        trains_all(bed, slot, attempt)
        return [(0, b"cno_such_package\nThing\n."), (1, b"N."), (2, b"N.")]

    bed = beds(trains, num_slots=1)
    assert bed.trainings.wait(WAIT_S)
    assert bed.trainings.value("b") is None
    with pytest.raises(MapTrainError, match=r"value of item 'a' cannot be read here: ModuleNotF"):
        bed.trainings.value("a")


def test_the_last_line_says_how_many_items_are_done_and_have_failed(beds):
    bed = beds(ends_all(Ending.RAISED, "ValueError: bad"), retries=0)
    assert bed.trainings.wait(WAIT_S)
    assert "map_train: 0 of 3 done, 3 failed, 0 in training" in bed.text.getvalue()


def test_the_line_of_progress_reads_no_rows(beds):
    bed = beds(trains_all)
    assert bed.trainings.wait(WAIT_S)

    class Unread(list):
        def __iter__(self):
            raise AssertionError("all rows are read under the run's lock")

    bed.queue.table = Unread(bed.queue.table)
    assert bed.run._line().startswith("map_train: 3 of 3 done, 0 in training")


def test_the_first_result_of_each_process_is_looked_for_before_it_counts(beds):
    begun = threading.Barrier(2)
    looked: list[int] = []

    def check(item):
        looked.append(item)
        if item:
            raise OSError(f"no file of {item}")

    def trains_one(bed, slot, attempt):
        order = bed.draw(slot, attempt)
        if order not in (Train(0, 1), Train(1, 1)):
            while not bed.run.on_beat(SlotBeat(slot, attempt)).stop:
                bed.run.wait(None, 0.01)
            return []
        begun.wait(WAIT_S)
        if order.item:  # the other host's is first
            while not bed.queue.count(TrainingState.DONE):
                bed.run.wait(None, 0.01)
        ended = Ended(order.item, Ending.RETURNED, 0.5, attempt=order.attempt)
        for _ in range(2):
            bed.run.on_beat(SlotBeat(slot, attempt, (ended,)))
        return []

    bed = beds(trains_one, check=check, is_durable=True)
    with pytest.raises(OSError, match="no file of 1"):
        bed.trainings.wait(WAIT_S)
    assert set(looked) == {0, 1}
    assert [row.item for row in bed.queue.table if row.state is TrainingState.DONE] == ["a"]


def test_a_slot_that_alone_has_rows_is_tried_as_long_as_others_train(beds):
    """Its executor is on a host without room, and the others hold all other Spark slots."""
    first_done = threading.Event()

    def act(bed, slot, attempt):
        if slot == 1 and not first_done.is_set():
            raise OSError("No space left on device")
        if slot == 0:
            while starts(bed)[1] < 6:
                bed.run.wait(None, 0.01)
            first_done.set()
        return trains_all(bed, slot, attempt)

    bed = beds(act, homes=[0, 0, 1])
    assert run_all(bed.trainings.values) == [{"a": 0, "b": 1, "c": 2}]
    assert bed.run._console.flush(WAIT_S)
    told = bed.text.getvalue()
    assert told.count("is started again every 0 s while others train: its job failed: No sp") == 1
    assert "the last time on a host that only Spark's UI names" in told


def test_a_slot_that_alone_has_rows_has_a_last_round_before_the_run_ends(beds):
    def act(bed, slot, attempt):
        raise OSError("No space left on device")

    bed = beds(act, homes=[0, 0, 1])
    with pytest.raises(MapTrainError, match="no other slot trains the 3 items that wait"):
        bed.trainings.wait(WAIT_S)
    assert min(starts(bed)) >= 8


@pytest.mark.parametrize("is_held", [True, False])
def test_a_slot_that_has_handed_its_values_over_waits_for_jobs_that_took_its_place(
    beds, monkeypatch, is_held
):
    count_tasks(monkeypatch, False)
    looks: list[bool] = []
    looked = threading.Event()

    def are_slots_held():
        looks.append(is_held)
        if len(looks) == 3 or not is_held:
            looked.set()
        return is_held

    def wait_at_most(bed, wait_s):
        bed.run._jobs = dataclasses.replace(bed.run._jobs, wait_s=wait_s)

    def hands_over_once(bed, slot, attempt):
        if attempt:
            wait_at_most(bed, 0.0)  # only now: what comes before and after takes its time
            looked.wait(WAIT_S)
            wait_at_most(bed, WAIT_S)
            return trains_all(bed, slot, attempt)
        order = bed.draw(slot, attempt)
        ended = Ended(order.item, Ending.RETURNED, 0.5, {}, "", order.attempt)
        bed.run.on_beat(SlotBeat(slot, attempt, (ended,), is_leaving=True))
        return [(order.item, b"\x80\x04K\x00.")]

    bed = beds(hands_over_once, num_slots=1, are_slots_held=are_slots_held)
    if is_held:
        assert run_all(bed.trainings.values) == [{"a": 0, "b": 1, "c": 2}]
        assert bed.run._console.flush(WAIT_S)
        assert (
            bed.text.getvalue().count("other jobs of this program hold all of Spark's slots") == 1
        )
    else:
        with pytest.raises(NotEnoughSlots):
            bed.trainings.wait(WAIT_S)
