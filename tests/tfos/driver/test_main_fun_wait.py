"""The wait for main_fun shows a training whose workers read files, without a feed at the driver."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.cluster_states import running
from tfos.control import messages
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.driver import shown_wait
from tfos.driver.main_fun_wait import MainFunWait
from tfos.failure import NodeFailure, NodeId
from tfos.topology import plan

WORKER = NodeId("worker", 0)


class Played:
    """A coordinator of one worker, and a live console; something happens with each wait."""

    def __init__(self, happens: Iterator[Callable[[], object]]) -> None:
        self.state = running(plan(1, 0))
        self.is_live = True
        self.shown: list[str] = []
        self.final: list[str] = []
        self._happens = happens
        self._now_s = 0.0
        self._seq = 0

    def now_s(self) -> float:
        return self._now_s

    def read(self, question: Callable[[ClusterView], Any]) -> Any:
        return question(self.state)

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        self._now_s += 1.0
        next(self._happens)()
        return done(self.state)

    def progress(self, text: str, *, final: bool = False) -> None:
        (self.final if final else self.shown).append(text)

    def end_progress(self) -> None:
        self.shown.append("ended")

    def beat(self, **numbers: float) -> None:
        self._seq += 1
        beat = messages.Heartbeat(WORKER, self._seq, "main_fun", progress=numbers)
        self.state.on_heartbeat(beat, self._now_s)

    def tell(self, event: messages.Event) -> None:
        self.state.on_event(WORKER, event, self._now_s)


def wait(is_fed: bool, *happens: Callable[[Played], object]) -> Played:
    played: Any = Played(iter([]))
    played._happens = iter([lambda each=each: each(played) for each in happens])
    assert MainFunWait(played, played, is_fed=is_fed).wait(60.0)
    return played


def numbers(at_s: float, epoch: float, steps: float, **more: float) -> dict[str, float]:
    return {
        "at_s": at_s,
        "epoch": epoch,
        "epochs": 3.0,
        "epochs_begun": epoch,
        "steps": steps,
        "rows": steps * 10,
        **more,
    }


def test_a_training_that_reads_files_has_epochs_rates_and_a_time_left():
    first = numbers(10.0, 1, 21, epoch_steps=20, epoch_s=2.0, epoch_rows=210, loss=0.5)
    again = numbers(
        20.0, 2, 121, epoch_steps=20, epoch_s=2.0, epoch_rows=210, rows_per_epoch=1000, loss=0.4
    )
    played = wait(
        False,
        lambda it: it.tell(messages.PhaseChanged("main_fun: import tensorflow")),
        lambda it: None,
        lambda it: it.beat(**first),
        lambda it: it.beat(**again),
        lambda it: it.tell(messages.Done(progress={**again, "at_s": 21.0, "loss": 0.3})),
    )
    assert played.shown == [
        "workers are starting: import tensorflow 0 s",
        "workers are starting: import tensorflow 1 s",
        "epoch 1/3  210 rows  105 rows/s  10.0 steps/s  loss 0.5",
        "epoch 2/3  210 of 1000 rows  105 rows/s  10.0 steps/s  loss 0.4  ETA 17 s",
        "ended",
    ]
    assert played.final == [
        "main_fun has returned on every worker: epoch 2/3  210 of 1000 rows  10.0 steps/s  loss 0.3"
    ]


@pytest.mark.parametrize(
    ("steps", "from_last_step", "ends_well"),
    [([5, 9, 12], True, True), ([5, 9, 12], False, False), ([5, 5, 5], True, False)],
)
def test_a_limit_that_counts_from_the_last_step_ends_no_training_that_makes_steps(
    monkeypatch, steps, from_last_step, ends_well
):
    played: Any = Played(iter([]))
    beats = [lambda n=n: played.beat(**numbers(1.0, 1, n)) for n in steps]
    played._happens = iter([*beats, lambda: played.tell(messages.Done())])
    monkeypatch.setattr(shown_wait, "time", SimpleNamespace(monotonic=played.now_s))
    waiting = MainFunWait(played, played, is_fed=False)
    assert waiting.wait(1.0, from_last_step=from_last_step) is ends_well


def test_a_cluster_that_fails_is_not_told_as_a_main_fun_that_has_returned():
    failed = messages.Failed(NodeFailure(WORKER, "h", 7, message="no rows"))
    played = wait(
        False,
        lambda it: it.beat(**numbers(10.0, 1, 21, epoch_steps=20, epoch_s=2.0, epoch_rows=210)),
        lambda it: it.tell(failed),
    )
    assert played.final == ["trained so far: epoch 1/3  210 rows  10.0 steps/s"]


def test_a_second_fit_has_its_own_epochs():
    """Its first report, before its first step, has no epoch yet."""
    last = numbers(10.0, 3, 60, epoch_steps=9, epoch_s=1.0, epoch_rows=100, rows_per_epoch=200)
    again = {**last, "epoch": 1.0, "epochs": 2.0, "epochs_begun": 4.0}
    played = wait(
        False,
        lambda it: it.beat(**last),
        lambda it: it.beat(**{**last, "at_s": 11.0, "epoch": 0.0}),
        lambda it: it.beat(**{**again, "at_s": 20.0, "steps": 70.0, "rows": 700.0}),
        lambda it: it.tell(messages.Done()),
    )
    assert played.shown[-2].startswith("epoch 1/2  100 of 200 rows")
    assert played.final == [
        "main_fun has returned on every worker: epoch 1/2  100 of 200 rows  9.0 steps/s"
    ]


def test_fits_of_one_epoch_are_epochs_of_their_own():
    beats = [
        numbers(at_s, 1, 10 * at_s, epoch_steps=9, epoch_s=1.0, epoch_rows=100)
        | {"epochs": 1.0, "epochs_begun": at_s}
        for at_s in (1.0, 2.0, 3.0)
    ]
    played = wait(
        False,
        *[lambda it, beat=beat: it.beat(**beat) for beat in beats],
        lambda it: it.tell(messages.Done()),
    )
    assert {each[:19] for each in played.shown[:-1]} == {"epoch 1/1  100 rows"}


def test_a_worker_that_is_started_again_begins_no_epoch_of_the_line():
    """It counts its epochs anew, and knows no rows of the one before."""
    known = numbers(10.0, 3, 60, epoch_steps=9, epoch_s=1.0, epoch_rows=100, rows_per_epoch=200)
    again = {**known, "at_s": 1.0, "epochs_begun": 1.0, "rows_per_epoch": 0.0}
    state, played = running(plan(2, 0)), Played(iter(()))
    followed = MainFunWait(played, played, is_fed=False)  # type: ignore[arg-type]
    beats = ((0, known, False), (1, known, True), (1, again, True))
    for seq, (worker, beat, is_read) in enumerate(beats, 1):
        node = NodeId("worker", worker)
        state.on_heartbeat(messages.Heartbeat(node, seq, "main_fun", progress=beat), 1.0)
        if is_read:
            followed.follow(state, 1.0)
    assert str(followed._progress).startswith("epoch 3/3  200 of 400 rows")


def test_the_line_goes_on_without_a_lost_worker():
    """The others go on; it would stay in its epoch, and its rows would count in each."""
    state, played = running(plan(2, 0)), Played(iter(()))
    followed = MainFunWait(played, played, is_fed=False)  # type: ignore[arg-type]
    sizes = {"epoch_steps": 9, "epoch_s": 1.0, "epoch_rows": 60, "rows_per_epoch": 100}
    for worker, epoch in ((0, 1), (1, 1), (0, 2), (0, 3)):
        beat = numbers(10.0 * epoch, epoch, 10 * epoch, **sizes)
        node = NodeId("worker", worker)
        state.on_heartbeat(messages.Heartbeat(node, epoch, "main_fun", progress=beat), epoch)
        followed.follow(state, epoch)
        if worker:
            killed = NodeFailure(node, "h", 7, message="was killed", signal=9)
            state.on_event(node, messages.Failed(killed), epoch)
            assert state.workers[1].status is NodeStatus.LOST
    assert str(followed._progress).startswith("epoch 3/3  60 of 100 rows")


def test_rows_of_further_epochs_do_not_count_for_the_slowest_workers_epoch():
    state, played = running(plan(2, 0)), Played(iter(()))
    followed = MainFunWait(played, played, is_fed=False)  # type: ignore[arg-type]

    def line(seq: int, *rows: int) -> str:
        """Return the line once the workers have trained these rows, 100 an epoch."""
        for worker, own in enumerate(rows):
            before, in_epoch = divmod(own - 1, 100)
            sizes = {"epoch_rows": in_epoch + 1, "rows_per_epoch": 100 * bool(before)}
            beat = numbers(float(seq), before + 1, own / 10, **sizes)
            node = NodeId("worker", worker)
            state.on_heartbeat(messages.Heartbeat(node, seq, "main_fun", progress=beat), seq)
        followed.follow(state, float(seq))
        return str(followed._progress)

    assert line(1, 80, 40).startswith("epoch 1/3  120 rows")
    assert line(2, 160, 80).startswith("epoch 1/3  180 rows")
    assert line(3, 220, 110).startswith("epoch 2/3  110 of 200 rows")
    late = line(4, 350, 150)
    assert late.startswith("epoch 2/3  150 of 200 rows")
    assert "the epoch ends" not in late


def test_a_loop_without_epochs_behind_a_fit_counts_all_its_rows():
    """It stood at the rows of the fit's epoch until main_fun returned."""
    last = numbers(10.0, 1, 10, epoch_steps=9, epoch_s=1.0, epoch_rows=100)
    own = {"at_s": 20.0, "epochs_begun": 2.0, "steps": 90.0, "rows": 900.0, "rows_per_epoch": 100.0}
    played = wait(
        False,
        lambda it: it.beat(**last),
        lambda it: it.beat(**own),
        lambda it: it.tell(messages.Done()),
    )
    assert "  900 rows" in played.shown[-2]


def beside_one_that_has_returned(after_epochs: int, rows: float) -> tuple[str, str]:
    """Return the line in the chief's third epoch, and once the chief has returned as well."""
    state, played = running(plan(2, 0)), Played(iter(()))
    followed = MainFunWait(played, played, is_fed=False)  # type: ignore[arg-type]
    sizes = {"epoch_steps": 9, "epoch_s": 1.0, "epoch_rows": rows, "rows_per_epoch": 100}
    beats = [numbers(10.0 * epoch, epoch, 10 * epoch, **sizes) for epoch in (1, 2, 3)]
    chief, other = (NodeId("worker", worker) for worker in (0, 1))
    state.on_event(other, messages.Done(progress=beats[after_epochs - 1]), 1.0)
    for seq, beat in enumerate(beats):
        state.on_heartbeat(messages.Heartbeat(chief, seq, "main_fun", progress=beat), 1.0)
        followed.follow(state, 1.0)
    line = str(followed._progress)
    state.on_event(chief, messages.Done(progress=beats[-1]), 9.0)
    followed.follow(state, 9.0)
    return line, followed._progress.whole_epoch()


def test_the_line_goes_on_without_a_worker_that_has_returned_after_fewer_epochs():
    line, last = beside_one_that_has_returned(1, rows=60)
    assert line.startswith("epoch 3/3  60 of 100 rows")
    assert last == "epoch 3/3  60 of 100 rows  9.0 steps/s", "without the rate of the other's"


def test_the_line_counts_a_worker_that_has_returned_before_the_others_came_as_far():
    """In async mode a fast one trains its last epoch while the others are in their first."""
    _, last = beside_one_that_has_returned(3, rows=100)
    assert last == "epoch 3/3  200 of 200 rows  18.0 steps/s"


def test_a_loop_that_reports_nothing_is_told_apart_from_a_start():
    played = wait(
        False,
        lambda it: it.tell(messages.PhaseChanged("main_fun: import tensorflow")),
        lambda it: it.tell(messages.PhaseChanged("main_fun")),
        *[lambda it: None] * 31,
        lambda it: it.tell(messages.Done()),
    )
    assert played.shown[1] == "workers: main_fun runs 0 s"
    assert played.shown[29] == "workers: main_fun runs 28 s"
    assert played.shown[-2] == (
        "main_fun runs 31 s and reports no steps: if it trains already, pass "
        "callbacks=ctx.callbacks() to fit, or call "
        "ctx.report_progress() in a loop of your own"
    )


def test_numbers_of_a_worker_that_make_no_sense_stop_nothing():
    played = wait(
        False,
        lambda it: it.beat(
            **numbers(1.0, math.inf, math.nan, epochs=math.inf, rows_per_epoch=-math.inf)
        ),
        lambda it: it.tell(messages.Done()),
    )
    assert played.shown[0] == "workers: main_fun runs 0 s"


def test_after_a_feed_the_workers_that_have_not_returned_are_named():
    played = wait(
        True,
        lambda it: it.tell(messages.PhaseChanged("finishing")),
        lambda it: None,
        lambda it: it.tell(messages.Done()),
    )
    assert played.shown == [
        "waiting for main_fun of worker:0 (finishing) 0 s",
        "waiting for main_fun of worker:0 (finishing) 1 s",
        "ended",
    ]
    assert played.final == []


def test_fits_of_data_that_nobody_feeds_end_with_the_last_worker_that_reads_its_feed():
    """Its main_fun goes on: it has the model."""
    played: Any = Played(iter([]))
    played.state = running(plan(2, 0))
    workers = [NodeId("worker", index) for index in range(2)]

    def ended(worker: NodeId) -> None:
        feeds = (messages.FeedSnapshot("input", is_drained=True, is_terminated=True),)
        played.state.on_heartbeat(messages.Heartbeat(worker, 1, "main_fun", feeds=feeds), 1.0)

    played._happens = iter([lambda: None, *(functools.partial(ended, each) for each in workers)])
    MainFunWait(played, played, is_fed=False).wait_unread("input")
    assert len(played.shown) == 3
    assert (played.final, len(played.state.training())) == ([], 2)


@pytest.mark.parametrize("end", ["interrupt", "failure"])
def test_the_wait_for_a_feed_ends_with_the_user_and_with_the_cluster(end):
    played: Any = Played(iter([]))
    abandoned: list[str] = []
    failed = messages.Failed(NodeFailure(WORKER, "h", 7, message="no rows"))
    happens = {"interrupt": lambda: abandoned.append(end), "failure": lambda: played.tell(failed)}
    played._happens = iter([happens[end]])
    wait = MainFunWait(played, played, is_fed=False)
    wait.wait_unread("input", lambda: bool(abandoned))
    assert played.shown == ["ended"]
