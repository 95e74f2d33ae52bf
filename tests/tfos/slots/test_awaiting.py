"""What the wait for slots tells: each change, and that it goes on. No Spark."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tfos.slots.test_reading import of
from tests.tfos.slots.test_wait import _needs, _offer
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.errors import PhaseError
from tfos.slots import awaiting
from tfos.slots.wait import SlotWait
from tfos.spark.interruptible import CancelToken


class Played:
    """A clock, a console, and Spark, which has as many executors as `num_executors`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_live: bool) -> None:
        self.now_s = 0.0
        self.is_live = is_live
        self.num_executors = 0
        self.told: list[tuple[float, str]] = []
        self.drawn: list[str] = []
        self.waits_for: list[str] = []
        self.cancel = CancelToken()
        self.until_s = 0.0
        monkeypatch.setattr(
            awaiting, "time", SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        )
        monkeypatch.setattr(awaiting, "read_offer", lambda *_: self.offer())
        monkeypatch.setattr(
            awaiting, "YarnContainers", lambda _: SimpleNamespace(count=lambda: None)
        )

    def offer(self) -> Any:
        return _offer(*[0] * self.num_executors, expected=3)

    def sleep(self, seconds: float) -> None:
        self.now_s = round(self.now_s + seconds, 1)
        if self.now_s == 30.0:
            self.num_executors = 1
        if self.now_s >= self.until_s:
            self.cancel.set()

    def line(self, text: str) -> None:
        self.told.append((round(self.now_s), text))

    def progress(self, text: str) -> None:
        (self.drawn.append if self.is_live else self.line)(text)

    def end_progress(self) -> None:
        self.drawn.append("ended")

    def act(self, decide: Any) -> None:
        decide(SimpleNamespace())


def awaited(monkeypatch: pytest.MonkeyPatch, *, is_live: bool = False) -> Played:
    played: Any = Played(monkeypatch, is_live=is_live)
    played.until_s = 60.0
    wait = SlotWait(_needs(4), ClusterConfig(), 0.0)
    job: Any = SimpleNamespace(coordinator=played)
    with pytest.raises(PhaseError, match="interrupted while it waited"):
        awaiting.await_slots(played, played, job, wait, played, played.cancel)
    return played


def test_a_wait_tells_each_change_and_now_and_then_that_it_goes_on(monkeypatch):
    told = awaited(monkeypatch).told
    assert [at_s for at_s, _ in told] == [0, 5, 15, 25, 30, 35, 45, 55]
    assert told[0][1].startswith("waiting for slots: need 4 task slots at once")
    assert told[1][1] == "waiting for slots, 5 s so far; executors that have registered: 0 of 3"
    assert "1 of 3 executors have registered. Waiting for 2 more" in told[4][1]
    assert told[5][1] == "waiting for slots, 35 s so far; executors that have registered: 1 of 3"


@pytest.mark.parametrize("is_fair", [False, True])
def test_a_wait_knows_how_many_tasks_of_ended_jobs_hold_slots(monkeypatch, is_fair):
    waits: Any = Played(monkeypatch, is_live=False)
    waits.until_s = 1.0
    waits.offer = lambda: _offer(3, slots=4)
    task_sets = [
        SimpleNamespace(
            schedulableQueue=lambda: None,
            isZombie=lambda each=each: each,
            runningTasks=lambda each=each: 1 + each,
        )
        for each in (True, False)
    ]
    pool: Any = SimpleNamespace(schedulableQueue=lambda: of(*task_sets))
    if is_fair:
        fair, pool = pool, SimpleNamespace(schedulableQueue=lambda: of(fair))
    scheduler = SimpleNamespace(rootPool=lambda: pool)
    waits._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(taskScheduler=lambda: scheduler))
    seen: list[int] = []
    wait: Any = SimpleNamespace(
        config=ClusterConfig(),
        started_s=0.0,
        needs=_needs(3),
        ready=lambda offer, now_s: seen.append(offer.ending),
        held=lambda offer, now_s: "",
        until=lambda offer: "",
    )
    job: Any = SimpleNamespace(coordinator=waits)
    with pytest.raises(PhaseError):
        awaiting.await_slots(waits, waits, job, wait, waits, waits.cancel)
    assert set(seen) == {2}


def test_a_terminal_sees_the_seconds_of_a_wait_and_none_is_left_there(monkeypatch):
    played = awaited(monkeypatch, is_live=True)
    assert [at_s for at_s, _ in played.told] == [0, 30]
    assert "waiting for slots, 17 s so far" in " ".join(played.drawn)
    assert played.drawn[-1] == "ended"


def test_a_fit_that_shows_nothing_warns_once_who_holds_its_slots():
    out = io.StringIO()
    coordinator: Any = SimpleNamespace(act=lambda decide: None)
    wait = SlotWait(_needs(2), ClusterConfig(shares_slots=True), 0.0)
    shown = awaiting._Shown(coordinator, wait, Console(stream=out, enabled=False))
    held = replace(_offer(4, slots=4, expected=1), running=("abc",))
    for now_s in (1.0, 59.0, 61.0, 62.0, 1e4):
        shown.tell(held, now_s)
    assert out.getvalue().count("end cluster abc by shutdown() (tfos stop --job abc)") == 1


def test_a_wait_that_shows_nothing_warns_of_no_executor_once_and_later_of_held_slots():
    out = io.StringIO()
    coordinator: Any = SimpleNamespace(act=lambda decide: None)
    wait = SlotWait(_needs(2), ClusterConfig(shares_slots=True), 0.0)
    shown = awaiting._Shown(coordinator, wait, Console(stream=out, enabled=False))
    for now_s in (1.0, 61.0, 62.0):
        shown.tell(_offer(), now_s)
    assert out.getvalue().count("no executor has registered for 61 s") == 1
    assert "slots that tasks" not in out.getvalue()
    for now_s in (63.0, 64.0):
        shown.tell(_offer(4, slots=4), now_s)
    assert out.getvalue().count("slots that tasks of this program hold") == 1
