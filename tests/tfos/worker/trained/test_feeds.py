"""The chief and micro-batches: what it answers to orders, what it notes, when it saves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ps.errors import ServerGone, ServerPhaseError
from tfos.config import Checkpoints
from tfos.control.messages import BatchReport, LeaveBatch, SaveBatches, TrainBatch
from tfos.errors import SettingsError
from tfos.fit_place import METADATA_NAME as FED_EPOCHS
from tfos.fit_place import FedEpochs, FitPlace, fed_epochs
from tfos.worker.trained import feeds
from tfos.worker.trained.feed import TrainedFeed
from tfos.worker.trained.feeds import METADATA_NAME, TrainedFeeds

PLACE = FitPlace(0, 1)
_numbers = itertools.count()


class Client:
    """Keeps metadata, as the servers do."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}

    def set_metadata(self, name: str, value: Any) -> None:
        self.metadata[name] = value


class Saver:
    """Writes down what is asked of it, and what the metadata was at a save."""

    def __init__(self, client: Client, restored: dict[str, Any] | None = None) -> None:
        self.client = client
        self.restored = restored or {}
        self.error = ""
        self.log: list[Any] = []
        self.holders: set[TrainBatch] = set()
        self.starts: tuple[int, ...] = (0, 0)
        self.restored_at: tuple[int, ...] = (-1, -1)
        self.saved_step = 0
        self.restarts_at_save = False
        self.restores_after_save: int | None = None
        self.num_away = 0
        self.asked = threading.Semaphore(0)
        self.num_begun = 0

    def watch(self, saved: Callable[[int, int, tuple[int, ...]], None]) -> None:
        self.saved = saved

    def restored_metadata(self) -> dict[str, Any]:
        return self.restored

    def hold(self, holder: TrainBatch) -> None:
        self.holders.add(holder)
        self.log.append("hold")

    def release(self, holder: TrainBatch) -> None:
        self.holders.discard(holder)
        if not self.holders:
            self.log.append("release")

    def save_now(self) -> str:
        self.log.append(dict(self.client.metadata.get(METADATA_NAME, {})))
        self.num_begun += 1
        if self.restarts_at_save:  # the first try fails, the next one finds the restored server
            self.restart(self.saved_step)
            self.restarts_at_save = False
        if self.error:
            return self.error
        self.saved_step += 1
        self.saved(self.num_begun, self.saved_step, self.starts)
        if self.restores_after_save is not None:  # 0: the step of this save
            self.restart(self.saved_step + self.restores_after_save)
            self.restores_after_save = None
        return ""

    def restart(self, step: int) -> None:
        self.starts, self.restored_at = (0, self.starts[1] + 1), (-1, step)

    def restored_steps(self) -> tuple[int, ...]:
        return self.restored_at

    def server_generations(self) -> tuple[int, ...]:
        self.asked.release()
        if self.num_away:
            self.num_away -= 1
            raise ServerGone("ps:1 is away")
        if self.starts == ():
            raise ServerGone("ps:1 is away")
        return self.starts


class Bed:
    def __init__(self, **restored: int) -> None:
        self.client = Client()
        self.saver = Saver(self.client, {METADATA_NAME: restored} if restored else None)
        self.said: list[BatchReport] = []
        self.stopped = threading.Event()
        self.batches = TrainedFeeds(self.said.append, self.stopped)
        saver: Any = self.saver
        client: Any = self.client
        self.batches.begin(saver, lambda: client)

    def order(self, number: int, epoch: int, batch_id: int, **changes: Any) -> TrainBatch:
        settings = {"feed": "input", "query": "q", "holds": True, "saves": True, **changes}
        return TrainBatch(number=number, epoch=epoch, batch_id=batch_id, **settings)

    def leave(self, order: LeaveBatch) -> bool:
        """Carry out an order; return whether a batch ceased to hold saves."""
        batch = self.batches.leave(order)
        if batch is not None:
            self.batches.release(batch)
        return batch is not None


def test_it_begins_with_the_restored_batch_ids():
    (begun,) = Bed(q=7, r=2).said
    assert (begun.feed, begun.number, begun.is_done) == ("", 0, True)
    assert begun.trained == {"q": 7, "r": 2}
    assert Bed().said[0].trained == {}


def test_a_batch_is_noted_then_saved_then_reported_and_no_save_begins_meanwhile():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 4))
    assert bed.saver.log == ["hold"]
    assert (bed.said[-1].number, bed.said[-1].is_done, bed.said[-1].trained) == (1, False, {})
    bed.batches.flushed("input", 0)
    assert bed.said[-1].is_done is False  # rows that were read are not trained yet
    bed.batches.trained("input", 0, PLACE)
    assert bed.saver.log == ["hold", {"q": 4}, "release"]
    last = bed.said[-1]
    assert (last.number, last.is_done, last.is_noted, last.error) == (1, True, True, "")
    assert last.trained == {"q": 4}


def test_an_epoch_that_ended_before_the_batch_does_not_count_for_it():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 3, 0))
    for epoch in (-1, 2):
        bed.batches.trained("input", epoch, PLACE)
    bed.batches.trained("other", 3, PLACE)
    assert bed.client.metadata == {}
    bed.batches.trained("input", 3, PLACE)
    bed.batches.trained("input", 4, PLACE)
    assert bed.client.metadata == {METADATA_NAME: {"q": 0}}
    assert len(bed.said) == 3


def test_a_batch_without_rows_gives_its_epoch_to_the_next_one():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 0))
    bed.leave(LeaveBatch("input", 1, in_part=False))
    bed.batches.expect(bed.order(2, 0, 1))
    bed.batches.trained("input", 0, PLACE)
    assert bed.client.metadata == {METADATA_NAME: {"q": 1}}
    assert [said.number for said in bed.said] == [0, 1, 2, 2]


def test_a_save_that_fails_is_reported_and_can_be_asked_for_again():
    bed = Bed()
    bed.batches.follow("input")
    bed.saver.error = "OSError: No space left"
    bed.batches.expect(bed.order(1, 0, 0))
    bed.batches.trained("input", 0, PLACE)
    last = bed.said[-1]
    assert (last.error, last.trained) == ("OSError: No space left", {"q": 0})
    bed.saver.error = ""
    bed.batches.save(SaveBatches("input", 2))
    last = bed.said[-1]
    assert (last.number, last.error, last.trained) == (2, "", {"q": 0})


LOST = "a parameter server was restarted while batch 5 was trained or saved"


@pytest.mark.fault("F08")
def test_a_batch_that_a_server_lost_during_its_save_is_not_reported_as_saved():
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.saver.restarts_at_save = True
    bed.batches.expect(bed.order(1, 0, 5))
    bed.batches.trained("input", 0, PLACE)
    last = bed.said[-1]
    assert LOST in last.error
    assert last.is_lost
    assert last.trained == {"q": 4}
    assert bed.client.metadata == {METADATA_NAME: {"q": 4}}
    assert bed.saver.log == ["hold", {"q": 5}, {"q": 4}], "a save with 5 may be there"
    bed.batches.expect(bed.order(2, 1, 5))
    bed.batches.trained("input", 1, PLACE)
    assert bed.saver.log[-2:] == [{"q": 5}, "release"]
    last = bed.said[-1]
    assert (last.error, last.trained) == ("", {"q": 5})


@pytest.mark.fault("F08")
def test_a_batch_whose_save_a_restarted_server_goes_on_from_is_saved():
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.saver.restores_after_save = 0
    bed.batches.expect(bed.order(1, 0, 5))
    bed.batches.trained("input", 0, PLACE)
    last = bed.said[-1]
    assert (last.error, last.is_lost, last.trained) == ("", False, {"q": 5})
    assert bed.saver.log == ["hold", {"q": 5}, "release"]


@pytest.mark.fault("F08")
def test_a_batch_whose_save_was_committed_too_late_for_a_restarted_server_is_lost():
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.saver.restores_after_save = -1
    bed.batches.expect(bed.order(1, 0, 5))
    bed.batches.trained("input", 0, PLACE)
    assert bed.said[-1].is_lost
    assert bed.client.metadata == {METADATA_NAME: {"q": 4}}


@pytest.mark.fault("F08")
def test_a_batch_that_a_save_by_time_has_is_not_lost_by_a_server_that_goes_on_from_that_save():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 41, holds=False, saves=False))
    bed.batches.trained("input", 0, PLACE)
    bed.saver.save_now()  # by time
    bed.saver.restart(bed.saver.saved_step)
    bed.batches.save(SaveBatches("input", 2))
    last = bed.said[-1]
    assert (last.error, last.is_lost, last.trained) == ("", False, {"q": 41})


@pytest.mark.fault("F08")
def test_a_save_that_had_begun_before_a_batch_was_trained_does_not_have_it():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 41, holds=False, saves=False))
    bed.saver.num_begun += 1  # by time, and it is under way
    bed.batches.trained("input", 0, PLACE)
    bed.saver.saved(bed.saver.num_begun, 1, bed.saver.starts)
    bed.saver.restart(1)
    bed.batches.save(SaveBatches("input", 2))
    assert bed.said[-1].is_lost


def test_a_batch_waits_for_the_end_of_the_one_before_it_whose_driver_waits_no_more():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 6))
    again = threading.Thread(target=bed.batches.expect, args=(bed.order(2, 1, 6),), daemon=True)
    again.start()
    for _ in range(3):  # of two that wait it has asked for the second time by now
        assert bed.saver.asked.acquire(timeout=20.0)
    assert [said.number for said in bed.said] == [0, 1]
    bed.batches.trained("input", 0, PLACE)
    again.join(20.0)
    answer = bed.said[-1]
    assert (answer.number, answer.is_done, answer.trained) == (2, False, {"q": 6})
    assert bed.saver.holders == {bed.order(2, 1, 6)}


def test_a_save_that_waits_for_a_batch_comes_before_the_next_one():
    """A stream without a pause: each batch is there by the time that the one before it is over."""
    bed, looks = Bed(), threading.Semaphore(0)
    bed.batches.follow("input")
    state = bed.batches._state("input")
    begin_save = state.begin_save

    def look() -> bool:
        begun = begin_save()
        looks.release()
        return begun

    state.begin_save = look  # type: ignore[method-assign]
    bed.batches.expect(bed.order(1, 0, 6, saves=False))
    saving = threading.Thread(target=bed.batches.save, args=(SaveBatches("input", 2),), daemon=True)
    saving.start()
    assert looks.acquire(timeout=20.0)
    bed.batches.trained("input", 0, PLACE)
    bed.batches.expect(bed.order(3, 1, 7, saves=False))
    assert [(said.number, said.is_done) for said in bed.said[2:]] == [
        (1, True),
        (2, True),
        (3, False),
    ]
    saving.join(20.0)
    bed.batches.trained("input", 1, PLACE)
    bed.batches.expect(bed.order(4, 2, 8))
    assert (bed.said[-1].number, bed.said[-1].is_done) == (4, False), "no save waits any more"


class Looks(threading.Event):
    """Says when somebody who waits for more than this event has looked at it."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = threading.Semaphore(0)

    def is_set(self) -> bool:
        self.looks.release()
        return super().is_set()


@pytest.mark.fault("F01")
@pytest.mark.parametrize("end", ["whole", "revoked", "stopped"])
def test_a_batch_that_may_lack_rows_of_a_lost_worker_waits_for_the_driver(end: str):
    bed, stopped = Bed(), Looks()
    bed.batches._stopped = stopped
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 3, 6))
    while stopped.looks.acquire(blocking=False):
        pass
    bed.batches.come_to("input", 3)  # the batch is not over by that
    trained = threading.Thread(
        target=lambda: bed.batches.trained("input", 3, PLACE, lacks_worker=True), daemon=True
    )
    trained.start()
    for _ in range(2):
        assert stopped.looks.acquire(timeout=20.0)
    assert bed.client.metadata == {}
    if end == "whole":
        bed.batches.come_to("input", 4)
    elif end == "revoked":
        assert not bed.leave(LeaveBatch("input", 1, in_part=True))
    else:
        stopped.set()
    trained.join(20.0)
    assert not trained.is_alive()
    assert bed.client.metadata.get(METADATA_NAME) == ({"q": 6} if end == "whole" else None)
    assert bed.saver.log == (["hold", {"q": 6}, "release"] if end == "whole" else ["hold"])


@pytest.mark.fault("F01")
@pytest.mark.parametrize("is_whole", [True, False])
def test_an_epoch_that_may_lack_rows_of_a_lost_worker_waits_for_the_driver(is_whole: bool):
    run, stopped = Run({}), Looks()
    run.batches._stopped = stopped
    run.batches.count("input", 0, 1)
    args = ("input", 0, FitPlace(0, 1))
    trained = threading.Thread(
        target=lambda: run.batches.trained(*args, lacks_worker=True), daemon=True
    )
    trained.start()
    assert stopped.looks.acquire(timeout=20.0)
    assert run.noted == {}
    if is_whole:
        run.batches.come_to("input", 1)
    else:
        run.batches.count("input", 0, 0)  # its rows could not be fed again
    trained.join(20.0)
    assert not trained.is_alive()
    assert (run.noted != {}) == is_whole


def test_where_nothing_is_recorded_a_worker_that_is_missing_holds_up_nobody():
    bed = Bed()
    bed.batches.trained("input", 0, PLACE, lacks_worker=True)
    bed.batches.expect(bed.order(1, 2, 6))
    bed.batches.trained("input", 1, PLACE, lacks_worker=True)
    assert bed.client.metadata == {}


def test_who_gives_up_a_batch_that_waits_revokes_that_one_alone():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 6))
    again = threading.Thread(target=bed.batches.expect, args=(bed.order(2, 1, 6),), daemon=True)
    again.start()
    for _ in range(3):  # of two that wait it has asked for the second time by now
        assert bed.saver.asked.acquire(timeout=20.0)
    assert not bed.leave(LeaveBatch("input", 2, in_part=False))
    again.join(20.0)
    assert bed.saver.holders == {bed.order(1, 0, 6)}
    bed.batches.trained("input", 0, PLACE)
    assert bed.client.metadata[METADATA_NAME] == {"q": 6}


def test_the_last_save_says_which_batch_it_lacks():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 6, saves=False))
    bed.batches.trained("input", 0, PLACE)
    bed.batches.end()
    bed.batches.save(SaveBatches("input", 2))
    bed.batches.closed("")  # its servers had gone back: the save is not one of the batch
    assert (bed.said[-1].number, bed.said[-1].is_lost) == (2, True)


def test_the_driver_waits_for_a_save_the_one_before_it_and_a_server_that_returns():
    plan = Checkpoints(directory="/runs/7", timeout_s=7200.0)
    assert plan.limit_s > 2 * plan.timeout_s + feeds._RETURN_S


def test_orders_to_save_around_the_end_of_main_fun_are_answered_by_the_last_save():
    bed = Bed()

    def closed_meanwhile() -> str:
        bed.batches.end()
        return "the client is closed"

    bed.saver.save_now = closed_meanwhile  # type: ignore[method-assign]
    for number in (2, 3):
        bed.batches.save(SaveBatches("input", number))
    assert [said.number for said in bed.said] == [0]
    bed.batches.closed("no disk")
    assert [(said.number, said.error) for said in bed.said[1:]] == [(2, "no disk"), (3, "no disk")]


@pytest.mark.fault("F08")
def test_a_save_of_a_server_that_had_lost_the_batch_does_not_bring_it_back():
    """A first restart before the commit loses the batch; a second one restores that save."""
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.saver.restarts_at_save, bed.saver.restores_after_save = True, 0
    bed.batches.expect(bed.order(1, 0, 5))
    bed.batches.trained("input", 0, PLACE)
    assert bed.said[-1].is_lost


@pytest.mark.fault("F08")
@pytest.mark.parametrize("restored", [0, 1])
def test_a_server_that_does_not_return_after_a_save_leaves_open_whether_the_batch_is_there(
    monkeypatch: pytest.MonkeyPatch, restored: int
):
    monkeypatch.setattr("tfos.worker.trained.feeds._RETURN_S", 0.0)
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 5))
    save_now = bed.saver.save_now

    def save_and_die() -> str:
        error = save_now()
        bed.saver.starts = ()
        return error

    bed.saver.save_now = save_and_die  # type: ignore[method-assign]
    bed.batches.trained("input", 0, PLACE)
    last = bed.said[-1]
    assert "step 1 has batch 5, but a parameter server has been away since then" in last.error
    assert (last.is_lost, last.trained) == (False, {"q": 5})
    bed.saver.save_now = save_now  # type: ignore[method-assign]
    bed.saver.starts, bed.saver.restored_at = (0, 1), (-1, restored)
    bed.batches.save(SaveBatches("input", 2))
    last = bed.said[-1]
    assert last.is_lost == (restored < 1)
    assert last.trained == {"q": 5 if restored else 4}
    assert bed.client.metadata == {METADATA_NAME: {"q": 5 if restored else 4}}


@pytest.mark.fault("F08")
def test_a_lost_batch_whose_id_stays_in_the_newest_save_is_said():
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.saver.restarts_at_save = True
    bed.batches.expect(bed.order(1, 0, 5))
    save_now = bed.saver.save_now

    def save_once() -> str:
        error = save_now()
        bed.saver.error = "OSError: No space left"
        return error

    bed.saver.save_now = save_once  # type: ignore[method-assign]
    bed.batches.trained("input", 0, PLACE)
    last = bed.said[-1]
    assert LOST in last.error
    assert (
        "the save without its id failed (OSError: No space left). A run that resumes from step 1 "
        "skips the batch"
    ) in last.error
    assert last.is_lost


@pytest.mark.fault("F08")
def test_rows_wait_for_a_server_that_is_away_as_the_batch_begins():
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.saver.num_away = 1
    bed.batches.expect(bed.order(1, 0, 5))
    assert (bed.said[-1].number, bed.said[-1].is_done) == (1, False)
    bed.batches.trained("input", 0, PLACE)
    last = bed.said[-1]
    assert (last.error, last.is_lost, last.trained) == ("", False, {"q": 5})


@pytest.mark.fault("F08")
@pytest.mark.parametrize("end", ["revoked", "stopped", "ended"])
def test_a_batch_that_waits_for_a_server_ends_with_its_order_or_its_worker(end: str):
    bed = Bed(q=4)
    bed.saver.starts = ()
    waiting = threading.Thread(target=bed.batches.expect, args=(bed.order(1, 0, 5),), daemon=True)
    waiting.start()
    for _ in range(2):
        assert bed.saver.asked.acquire(timeout=20.0)
    assert waiting.is_alive()
    if end == "revoked":
        bed.batches.leave(LeaveBatch("input", 1, in_part=False))
    elif end == "stopped":
        bed.stopped.set()
    else:
        bed.batches.end()
    waiting.join(20.0)
    assert not waiting.is_alive()
    assert [said.number for said in bed.said] == [0], "its rows were let in"
    assert bed.saver.log == ["hold", "release"]


@pytest.mark.fault("F08")
@pytest.mark.parametrize("starts", [(0, 1), ()])
def test_a_batch_that_a_server_lost_before_its_save_is_neither_noted_nor_saved(starts):
    bed = Bed(q=4)
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 5))
    bed.saver.starts = starts
    bed.batches.trained("input", 0, PLACE)
    assert LOST in bed.said[-1].error
    assert bed.said[-1].trained == {"q": 4}
    assert bed.client.metadata == {}
    assert bed.saver.log == ["hold"]


@pytest.mark.fault("F08")
def test_a_batch_that_a_server_lost_after_a_save_that_failed_is_not_reported_as_saved():
    bed = Bed()
    bed.batches.follow("input")
    bed.saver.error = "OSError: No space left"
    bed.batches.expect(bed.order(1, 0, 5))
    bed.batches.trained("input", 0, PLACE)
    bed.saver.error, bed.saver.starts = "", (0, 1)
    bed.batches.save(SaveBatches("input", 2))
    last = bed.said[-1]
    assert LOST in last.error
    assert last.trained == {}
    assert bed.client.metadata == {METADATA_NAME: {}}


def test_a_batch_that_failed_is_never_noted_and_saves_wait_for_a_later_epoch():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 4))
    assert not bed.leave(LeaveBatch("input", 1, in_part=True))
    bed.batches.trained("input", 0, PLACE)  # the end of what was fed of it
    assert bed.client.metadata == {}
    assert bed.saver.log == ["hold"]
    bed.batches.trained("input", 1, PLACE)  # the user has gone on with other data
    assert bed.saver.log == ["hold", "release"]
    bed.batches.expect(bed.order(2, 2, 4))
    bed.batches.trained("input", 2, PLACE)
    assert bed.client.metadata == {METADATA_NAME: {"q": 4}}


def test_saves_by_time_go_on_behind_a_batch_without_rows():
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.expect(bed.order(1, 0, 4))
    assert bed.leave(LeaveBatch("input", 1, in_part=False))
    bed.batches.trained("input", 0, PLACE)
    assert bed.client.metadata == {}
    assert not bed.leave(LeaveBatch("input", 2, in_part=False))  # overtakes its order
    bed.batches.expect(bed.order(2, 1, 5))
    bed.batches.trained("input", 1, PLACE)
    assert bed.client.metadata == {}
    assert bed.saver.log == ["hold", "release"] * 2


@pytest.mark.parametrize("end", ["trained", "without rows", "failed before"])
def test_a_batch_of_one_feed_that_ends_lets_no_save_begin_in_a_batch_of_another(end):
    bed = Bed()
    bed.batches.follow("input")
    bed.batches.follow("more")
    other = bed.order(1, 0, 9, feed="more", query="r")
    if end == "failed before":
        bed.batches.expect(bed.order(1, 0, 4))
        bed.leave(LeaveBatch("input", 1, in_part=True))
    else:
        bed.batches.expect(bed.order(2, 1, 4))
    bed.batches.expect(other)
    if end == "without rows":
        bed.leave(LeaveBatch("input", 2, in_part=False))
    else:
        bed.batches.trained("input", 1, PLACE)
    assert bed.saver.holders == {other}
    bed.batches.trained("more", 0, PLACE)
    assert bed.saver.holders == set()


def test_a_batch_that_fails_twice_holds_saves_until_it_is_trained():
    bed = Bed()
    bed.batches.follow("input")
    for number in (1, 2):
        bed.batches.expect(bed.order(number, number, 4))
        bed.leave(LeaveBatch("input", number, in_part=True))
    assert bed.saver.holders == {bed.order(2, 2, 4)}
    bed.batches.expect(bed.order(3, 3, 4))
    bed.batches.trained("input", 3, PLACE)
    assert bed.saver.holders == set()


def test_code_that_never_says_trained_is_reported_as_such_once_the_rows_are_read():
    bed = Bed()
    bed.batches.expect(bed.order(1, 0, 0))
    bed.batches.flushed("input", 0)
    last = bed.said[-1]
    assert (last.number, last.is_done, last.is_noted, last.trained) == (1, True, False, {})
    assert bed.saver.log == ["hold", "release"]
    assert bed.client.metadata == {}


def test_only_the_queries_trained_last_are_noted():
    bed = Bed()
    bed.batches.follow("input")
    for number in range(20):
        query = f"q{number % 18}"
        bed.batches.expect(bed.order(number, number, number, query=query, saves=False))
        bed.batches.trained("input", number, PLACE)
    kept = bed.client.metadata[METADATA_NAME]
    assert list(kept)[-2:] == ["q0", "q1"]
    assert len(kept) == 16
    assert kept["q1"] == 19


class Run:
    """A chief whose run resumes from metadata, or joins the run that has written them."""

    def __init__(
        self,
        metadata: dict[str, Any],
        *,
        run: str = "",
        resumes: bool = True,
        set_metadata: Callable[[str, Any], None] | None = None,
    ) -> None:
        self.run = run or f"run {next(_numbers)}"
        self.client = Client()
        self.client.metadata = dict(metadata)
        if set_metadata is not None:
            self.client.set_metadata = set_metadata  # type: ignore[assignment, method-assign]
        self.said: list[BatchReport] = []
        self.batches = TrainedFeeds(self.said.append)
        self.batches.begin(
            Saver(self.client, dict(metadata)),  # type: ignore[arg-type]
            lambda: self.client,  # type: ignore[arg-type,return-value]
            run=self.run,
            resumes=resumes,
        )

    def train(self, epoch: int, place: FitPlace) -> None:
        self.batches.count("input", epoch, epoch + 1)
        self.batches.trained("input", epoch, place)

    @property
    def noted(self) -> dict[str, FedEpochs]:
        return fed_epochs(self.client.metadata)


def test_an_interrupted_run_leaves_its_trained_epochs_and_the_next_one_goes_on_from_them():
    first = Run({})
    assert first.said[0].epochs == {}
    first.train(0, FitPlace(0, 1))
    first.train(1, FitPlace(0, 2))
    second = Run(first.client.metadata)
    assert second.said[0].epochs == {"input": 2}
    second.train(0, FitPlace(0, 3))
    assert second.noted == {"input": FedEpochs(3, 2, FitPlace(0, 3), second.run)}
    assert Run(second.client.metadata).said[0].epochs == {"input": 3}


def test_a_run_that_is_to_feed_all_epochs_forgets_those_of_the_interrupted_one():
    run = Run(
        {FED_EPOCHS: {"input": {"count": 2, "before": 0, "fit": {"number": 0, "epoch": 2}}}},
        resumes=False,
    )
    assert run.said[0].epochs == {}
    assert run.client.metadata[FED_EPOCHS] is None
    run.train(0, PLACE)
    assert run.noted == {"input": FedEpochs(1, 0, PLACE, run.run)}


def test_a_chief_that_joins_counts_from_where_its_run_began():
    lost = Run({FED_EPOCHS: {"input": {"count": 2, "before": 0, "fit": {"number": 0, "epoch": 2}}}})
    lost.train(0, FitPlace(0, 3))
    joined = Run(lost.client.metadata, run=lost.run)
    assert joined.said[0].epochs == {"input": 2}
    joined.train(1, FitPlace(0, 4))
    assert joined.noted["input"].count == 4


def test_a_chief_that_was_lost_in_the_first_epoch_counts_from_where_its_run_began():
    lost = Run({FED_EPOCHS: {"input": {"count": 2, "before": 1, "fit": {"number": 0, "epoch": 2}}}})
    joined = Run(lost.client.metadata, run=lost.run)
    assert joined.said[0].epochs == {"input": 2}
    joined.train(0, FitPlace(0, 3))
    assert joined.noted == {"input": FedEpochs(3, 2, FitPlace(0, 3), lost.run)}


@pytest.mark.fault("F01")
@pytest.mark.parametrize("resumes", [True, False])
def test_a_chief_that_is_lost_before_it_has_recorded_where_its_run_begins_trains_no_epoch_twice(
    resumes: bool,
):
    """The servers are restored by then: they hold the record of the interrupted run."""
    interrupted = Run({})
    interrupted.train(0, FitPlace(0, 1))
    interrupted.train(1, FitPlace(0, 2))
    restored = dict(interrupted.client.metadata)

    class Lost(Exception):
        pass

    def lose(name: str, value: Any) -> None:
        raise Lost

    with pytest.raises(Lost):
        Run(restored, run="second", resumes=resumes, set_metadata=lose)
    joined = Run(restored, run="second", resumes=resumes)
    assert joined.said[0].epochs == ({"input": 2} if resumes else {})
    joined.train(0, FitPlace(0, 3))
    assert joined.noted["input"].count == (3 if resumes else 1)
    third = Run(joined.client.metadata, run="third")
    assert third.said[0].epochs == {"input": 3 if resumes else 1}


def test_a_run_whose_fit_has_stopped_itself_goes_on_with_the_next_fit():
    run = Run({})
    run.train(0, FitPlace(0, 1))
    run.batches.fit_stopped("other", 0)
    run.batches.fit_stopped("input", 1)  # of another model's fit: the record is of fit 0
    assert run.noted == {"input": FedEpochs(1, 0, FitPlace(0, 1), run.run)}
    run.batches.fit_stopped("input", 0)
    assert run.noted == {"input": FedEpochs(1, 0, FitPlace(1, -1), run.run)}
    assert Run(run.client.metadata).said[0].epochs == {"input": 1}


def test_what_a_stream_has_trained_of_a_feed_is_no_epoch_of_train():
    run = Run({})
    for epoch in range(3):
        run.batches.expect(TrainBatch("input", epoch, epoch, "q", epoch, holds=True, saves=False))
        run.batches.count("input", epoch, 0)
        run.batches.trained("input", epoch, PLACE)
    assert run.noted == {}
    run.batches.count("input", 3, 1)
    run.batches.count("input", 4, 2)  # it is fed while the chief validates the one before
    run.batches.trained("input", 3, FitPlace(0, 4))
    assert run.noted["input"].count == 1
    run.batches.count("input", 4, 0)  # it failed
    run.batches.trained("input", 4, FitPlace(0, 5))
    assert run.noted["input"].count == 1


def test_a_run_that_ends_as_it_should_leaves_no_record():
    run = Run({})
    run.train(0, PLACE)
    assert run.noted
    run.batches.end()
    assert run.client.metadata[FED_EPOCHS] is None


def test_a_run_whose_end_is_noted_elsewhere_keeps_its_record():
    run = Run({})
    run.train(0, PLACE)
    run.batches.keeps_epochs = True
    run.batches.end()
    assert run.client.metadata[FED_EPOCHS] is not None
    assert run.noted["input"].count == 1


def test_an_epoch_of_a_stream_is_no_epoch_of_a_run_that_resumes():
    run = Run({})
    run.batches.trained("input", -1, PLACE)
    assert run.client.metadata == {}
    bed = Bed()
    bed.batches.expect(bed.order(1, 0, 4))
    bed.batches.trained("input", 0, PLACE)
    bed.batches.end()
    assert set(bed.client.metadata) == {METADATA_NAME}


def test_an_epoch_without_rows_before_the_servers_have_a_model_is_recorded_with_the_next():
    run = Run({})

    def refuse(name: str, value: Any) -> None:
        raise ServerPhaseError("ps:0 is EMPTY")

    keep = run.client.set_metadata
    run.client.set_metadata = refuse  # type: ignore[method-assign]
    run.train(0, FitPlace(0, 1))
    run.client.set_metadata = keep  # type: ignore[method-assign]
    run.train(1, FitPlace(0, 2))
    assert run.noted == {"input": FedEpochs(2, 0, FitPlace(0, 2), run.run)}


def test_a_batch_that_two_threads_find_over_ends_once():
    """The second would end the next batch, which was admitted meanwhile."""
    order = Bed().order(1, 4, 7)
    state = TrainedFeed()
    assert state.admit(order, None, ())
    assert state.end_of(4, 0) is order
    assert state.end_of(4, 0) is None
    state.done()
    assert state.is_free


def test_no_batch_begins_while_an_ordered_save_runs():
    state, order = TrainedFeed(), Bed().order(1, 0, 6)
    assert state.begin_save()
    assert not state.admit(order, None, ())
    state.is_saving = False
    assert state.admit(order, None, ())


@pytest.mark.parametrize("stream", ["", "runs", "was revoked", "is trained", "was resumed"])
def test_a_stream_is_refused_by_servers_that_begin_behind_its_first_batch(stream: str):
    """They do not hold its id, so a run that resumes from a save would train the batch again."""
    client: Any = Client()
    saver: Any = Saver(client, {METADATA_NAME: {"q": 5}} if stream == "was resumed" else None)
    batches = TrainedFeeds(lambda _: None)
    batches.begin(None, lambda: client)
    batches.follow("input")
    if stream == "was revoked":
        batches.leave(LeaveBatch("input", 1, in_part=False))
    elif stream in ("runs", "is trained"):
        batches.expect(Bed().order(1, 0, 6))
    if stream == "is trained":
        batches.trained("input", 0, PLACE)
    if stream:
        with pytest.raises(SettingsError, match=r"a stream with num_ps=0: .*; use num_ps >= 1"):
            batches.begin_late(saver, lambda: client)
        return
    batches.begin_late(saver, lambda: client)
    batches.expect(Bed().order(1, 0, 6))
    batches.trained("input", 0, PLACE)
    assert saver.log == ["hold", {"q": 6}, "release"], "it saves from now on"
