"""When a shard is cut: at once, or at a clock still to come; and how servers agree on it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ps.checkpoint import snapshot
from ps.checkpoint.snapshot import CopyOnWrite
from ps.client.saving.saver import _snapshot
from ps.consistency import waits
from ps.consistency.bsp import BSP
from ps.consistency.gate import Gate
from ps.consistency.waiting import PendingPush
from ps.dense.shard import DenseShard
from ps.errors import CheckpointError, RequestTimeout
from ps.exactly_once import CompletionLog, RequestId
from ps.manifest.manifest import Hyper, Manifest, WorkerRank
from ps.protocol import messages
from ps.server.snapshot_trigger import SnapshotRequest, SnapshotTrigger
from tests.support.ps_cluster import ADD, make_manifest
from tests.support.waiting import wait_until

MANIFEST = make_manifest(100, rule=ADD)
NOW = messages.TakeSnapshot("save")


class Bench:
    """One worker's barrier: each `step` completes a clock, which adds 1 everywhere."""

    def __init__(self) -> None:
        self.dense = DenseShard(MANIFEST, rank=0, num_servers=1, num_workers=1)
        self.record = CompletionLog(len(self.dense.buckets))
        self.guard = CopyOnWrite(self.dense, (), self.record)
        self.gate: Gate[Any] = Gate(BSP(1), self.record, self)
        self.is_settled = True
        self.snapshots = SnapshotTrigger(self.guard, self.gate, lambda: self.is_settled)
        self.sequence = 0

    def step(self) -> None:
        self.sequence += 1
        request = RequestId(WorkerRank(0), 0, 1, self.sequence)
        push: PendingPush[Any] = PendingPush(request, 1, Hyper(0.1), object())
        assert self.gate.begin_push(push, self.sequence - 1) is None
        self.gate.arrive(push)

    def applied(self, push: PendingPush[Any]) -> None:
        """Counted by nobody."""

    def moved(self) -> None:
        if self.snapshots.wanted is not None:
            self.snapshots.check()

    def failed(self, reason: str) -> None:
        raise AssertionError(reason)

    def reduce(self, _: object, clock: int) -> None:
        for unit, bucket in enumerate(self.dense.buckets):
            with self.guard.dense.owned[unit].lock:
                self.guard.before(unit)
                ones = np.ones(bucket.num_elements, np.float32)
                self.dense.apply(bucket.id, ones, Hyper(0.1))

    def make(self, order: SnapshotRequest, wait_s: float = 0.0) -> tuple[int, bool]:
        made = self.snapshots.make(order, wait_s, lambda: False)
        return made.clock, made.is_made

    def saved(self, save_id: str) -> set[float]:
        """The different values in a cut."""
        found: set[float] = set()
        with self.snapshots.written(save_id) as cut:
            for bucket in cut.buckets:
                out = [np.empty(bucket.num_elements, np.float32)]
                cut.dump(bucket.id, out)
                found.update(out[0].tolist())
        return found


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_now_is_at_once_and_asking_again_finds_the_same_cut(bench: Bench):
    bench.step()
    assert bench.make(SnapshotRequest("save", {})) == (1, True)
    bench.step()
    assert bench.make(SnapshotRequest("save", {})) == (1, True)
    assert bench.make(SnapshotRequest("save", {}, 1)) == (1, True)
    assert bench.saved("save") == {1.0}


def test_a_clock_to_come_is_cut_by_the_push_that_completes_it(bench: Bench):
    made: list[tuple[int, bool]] = []
    order = SnapshotRequest("save", {}, 3)
    waiter = threading.Thread(target=lambda: made.append(bench.make(order, 10.0)))
    waiter.start()
    wait_until(lambda: bench.snapshots.wanted is not None, "the order")
    for _ in range(6):
        bench.step()
    waiter.join(10)
    assert made == [(3, True)]
    assert bench.saved("save") == {3.0}


def test_a_clock_that_is_past_or_does_not_come_is_said(bench: Bench):
    bench.step()
    bench.step()
    assert bench.make(SnapshotRequest("save", {}, 1)) == (2, False)
    assert bench.make(SnapshotRequest("save", {}, 3)) == (2, False)
    bench.step()
    assert bench.guard.snapshot is None, "nobody waits for it any more"
    with pytest.raises(CheckpointError, match="save save has no snapshot here"):
        bench.saved("save")


def test_a_cut_waits_for_the_second_round_of_a_clipped_push(bench: Bench):
    bench.is_settled = False
    with pytest.raises(RequestTimeout, match=r"clock 0 was not settled within 0 s"):
        bench.make(SnapshotRequest("save", {}))
    assert bench.make(SnapshotRequest("last", {}, as_it_is=True)) == (0, True), (
        "nobody brings it any more"
    )
    bench.is_settled = True
    assert bench.make(SnapshotRequest("save", {})) == (0, True)


@pytest.mark.fault("F10")
def test_a_cut_that_was_released_while_another_server_was_away_is_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(snapshot, "UNWRITTEN_S", 0.0)
    assert bench.make(SnapshotRequest("save", {})) == (0, True)
    bench.step()
    assert bench.make(SnapshotRequest("save", {}, 0)) == (1, False), "that clock is past"
    assert bench.make(SnapshotRequest("save", {})) == (1, True)
    assert bench.saved("save") == {1.0}


def test_a_later_save_takes_the_cut_of_an_earlier_one_away(bench: Bench):
    bench.make(SnapshotRequest("first", {}))
    bench.step()
    bench.make(SnapshotRequest("second", {}))
    with pytest.raises(CheckpointError, match="another save"):
        bench.saved("first")
    assert bench.saved("second") == {1.0}


# ---- how servers agree ----


class Scripted:
    """Two servers whose answers are given."""

    def __init__(self, *answers: Sequence[tuple[int, bool]]) -> None:
        self.answers = list(answers)
        self.asked: list[int | None] = []

    def ask(self, request: Any, answer: Any, *, timeout_s: float) -> list[Any]:
        self.asked.append(request.clock)
        return [answer(*each) for each in self.answers.pop(0)]

    def fetch_manifest(self, *, timeout_s: float) -> Manifest:
        raise AssertionError(f"asked for within {timeout_s} s, which no snapshot needs")

    @property
    def generations(self) -> tuple[int, ...]:
        return (0, 0)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([[(4, True), (4, True)]], [None]),
        ([[(4, True), (5, True)], [(5, True), (5, True)]], [None, 5]),
        ([[(4, True), (5, True)], [(6, False), (6, False)], [(7, True), (7, True)]], [None, 5, 7]),
        (
            [
                *([(4, True), (5, True)], [(9, False), (5, True)], [(13, False), (14, False)]),
                *([(14, False), (14, False)], [(14, True), (14, True)]),
            ],
            [None, 5, 10, 17, 14],
        ),
    ],
    ids=["at once", "one is behind", "missed", "missed twice, then it stands still"],
)
def test_servers_cut_at_one_clock_whatever_they_do_meanwhile(answers, asked):
    servers = Scripted(*answers)
    newest = answers[-1][0][0]
    assert _snapshot(servers, NOW, float("inf"), is_agreed=True) == newest
    assert servers.asked == asked


def test_without_barriers_each_server_has_a_moment_of_its_own():
    servers = Scripted([(4, True), (9, True)])
    assert _snapshot(servers, NOW, float("inf"), is_agreed=False) == 9
    with pytest.raises(RequestTimeout, match="the save was not done in time"):
        _snapshot(servers, NOW, 0.0, is_agreed=True)


def test_a_save_whose_servers_stay_a_clock_apart_says_so():
    """The text of what ended it is kept: it may be a server that does not answer."""

    class Apart(Scripted):
        def ask(self, request: Any, answer: Any, *, timeout_s: float) -> list[Any]:
            if not self.answers:
                raise RequestTimeout("ps:1 is silent", {"server": "1"})
            return super().ask(request, answer, timeout_s=timeout_s)

    servers = Apart([(4, True), (5, True)], [(4, False), (5, True)])
    said = r"ps:1 is silent\. .* the last clocks were ps:0 at 4, ps:1 at 5\. .*nobody_trains=True"
    with pytest.raises(RequestTimeout, match=said) as raised:
        _snapshot(servers, NOW, float("inf"), is_agreed=True)
    assert raised.value.details == {"server": "1"}


def test_a_save_that_waits_for_a_settled_clock_goes_on_when_it_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
):
    """What settles a clock ends no push's wait: nobody else would wake the save."""
    monkeypatch.setattr(waits, "CHECK_PEER_S", 60.0)
    bench.step()
    bench.is_settled = False
    made: list[tuple[int, bool]] = []
    order = SnapshotRequest("save", {})
    waiter = threading.Thread(target=lambda: made.append(bench.make(order, 60.0)))
    waiter.start()
    wait_until(lambda: len(bench.gate.changed._waiters) == 1, "the save to wait")  # type: ignore[attr-defined]
    with bench.gate.between_clocks():
        bench.is_settled = True
    waiter.join(10.0)
    assert made == [(1, True)]
