"""A whole server in every mode, against a model of counts: whatever comes, in whatever order.

Pushes come whole, cut in the middle, again, late, empty or not finite; workers join, leave, finish,
freeze, are lost and replaced; rows are looked up and pushed; the shard is saved and restored.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ps.consistency.bsp import BSP
from ps.consistency.gate import Gate
from ps.consistency.hybrid import Hybrid, Permits
from ps.consistency.ssp import SSP
from ps.consistency.waiting import WaitingPushes
from ps.exactly_once import CompletionLog, RequestId, Ticket
from ps.manifest.manifest import WorkerRank
from ps.server import receive
from tests.support.sim.gate_model import (
    BUCKET_BYTES,
    NUM_BUCKETS,
    NUM_WORKERS,
    SIZE,
    Kind,
    Mode,
    Model,
    Name,
    Outcome,
)
from tests.support.sim.gate_server import WHOLE, GateBed
from tests.support.tables import table_kernels_loaded

__all__ = ["table_kernels_loaded"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("table_kernels_loaded")]

MODES: tuple[Mode, ...] = ("async", "ssp", "sync", "hybrid")
RANKS = st.integers(0, NUM_WORKERS - 1)
KINDS: st.SearchStrategy[Kind] = st.sampled_from(["full", "full", "full", "null", "nan"])
DELIVERED = st.one_of(st.just(WHOLE), st.just(WHOLE), st.integers(0, SIZE))


class Worker:
    """What a client knows: which push has no answer yet, and how far its numbers are."""

    def __init__(self) -> None:
        self.generation = 0
        self.pending: tuple[Name, Kind] | None = None
        self.past: list[tuple[Name, Kind]] = []
        self.numbers = itertools.count(1)
        self.batches: set[int] = set()
        self.refused_rows: tuple[int, int, Outcome] | None = None
        """The last push of rows that was refused for its worker's sake: number, batch, answer."""


def permits_of(gate: Gate, rank: int) -> frozenset[RequestId]:
    """Return a worker's batches that are under way; none where lookups need no permit."""
    with gate.changed:
        policy = gate._policy
        return policy.permits.held(WorkerRank(rank)) if isinstance(policy, Hybrid) else frozenset()


class GateMachine(RuleBasedStateMachine):
    """Runs the server and the model side by side."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.mode = mode

    @initialize(bound=st.integers(0, 2), continues=st.sampled_from([True, True, False]))
    def start(self, bound: int, continues: bool) -> None:
        mode = self.mode
        bound = {"ssp": bound, "hybrid": bound + 1}.get(mode, 0)
        self.bed = GateBed(mode, bound, "continue" if continues else "fail")
        self.model = Model(mode, bound, continues)
        self.workers = [Worker() for _ in range(NUM_WORKERS)]
        self.num_saves = 0

    # -- pushes to the groups

    @rule(turns=st.lists(st.tuples(RANKS, KINDS, DELIVERED), min_size=1, max_size=12))
    def push_in_turns(self, turns: list[tuple[int, Kind, int]]) -> None:
        for turn in turns:
            self.push(*turn)
            self.the_same_wait_for_the_same()

    def push(self, rank: int, kind: Kind, delivered: int) -> None:
        """A new push, or the retry of the one that has no answer yet."""
        worker = self.workers[rank]
        if worker.pending is None:
            name = Name(rank, worker.generation, next(worker.numbers))
            worker.pending = (name, kind)
            worker.past.append(worker.pending)
        name, kind = worker.pending
        was_waiting = name in self.model.waiting
        expected = self.model.push(name, kind, delivered)
        got = self.bed.push(name, kind, delivered)
        waits_on = expected == "gone" and name in self.model.waiting and not was_waiting
        if kind == "nan" and waits_on:
            expected = "nan"  # told at once to a sender that is gone
            assert got == expected
            return
        assert got == expected, f"{name} {kind}"
        if got != "gone":
            worker.pending = None

    @rule(rank=RANKS, place=st.integers(0, 2), delivered=DELIVERED)
    def come_late(self, rank: int, place: int, delivered: int) -> None:
        """A copy of a push whose sender has gone on: only the last may still do something."""
        worker = self.workers[rank]
        late = [push for push in worker.past if push != worker.pending]
        if place < len(late):
            name, kind = late[-1 - place]
            self.model.push(name, kind, delivered)
            self.bed.push(name, kind, delivered)

    # -- membership

    @rule(rank=RANKS, event=st.sampled_from(["join"] * 6 + ["leave"] * 3 + ["finish"]))
    def change(self, rank: int, event: str) -> None:
        worker = self.workers[rank]
        if event == "finish" and len(self.model.finished) == NUM_WORKERS - 1:
            return
        generation, number = worker.generation, next(worker.numbers)
        if generation < self.model.least[rank]:
            assert self.bed.change(rank, generation, event, number) == "stale"
            return
        self.model.fence(rank, generation)
        expected = getattr(self.model, event)(rank)
        assert self.bed.change(rank, generation, event, number) == expected
        if expected == "ack":
            before = self.bed.shard.gate.missing()
            assert self.bed.change(rank, generation, event, number) == "ack"
            assert self.bed.shard.gate.missing() == before, "a repeated event was executed again"

    @precondition(lambda self: sum(self.model.least) < 3)
    @rule(rank=RANKS, is_declared=st.booleans())
    def lose(self, rank: int, is_declared: bool) -> None:
        """The worker is gone; what is left of it may still be at work."""
        generation = self.workers[rank].generation
        self.model.lose(rank, generation)
        self.bed.service.worker_lost(rank, generation)  # type: ignore[arg-type]
        if is_declared:
            self._succeed(rank)

    @rule(rank=RANKS, is_fenced=st.booleans())
    def replace(self, rank: int, is_fenced: bool) -> None:
        """A newer attempt begins; the server hears of it by a fence, or by its first request."""
        self._succeed(rank)
        if is_fenced:
            least = self.workers[rank].generation
            self.model.fence(rank, least)
            self.bed.service.life.fence(rank, least)  # type: ignore[arg-type]

    def _succeed(self, rank: int) -> None:
        older = self.workers[rank]
        self.workers[rank] = Worker()
        self.workers[rank].generation = older.generation + 1
        self.workers[rank].past = older.past

    # -- rows

    @rule(rank=RANKS, has_batch=st.booleans(), is_cut=st.booleans())
    def push_rows(self, rank: int, has_batch: bool, is_cut: bool) -> None:
        """Once in the middle, perhaps, then whole, then once more."""
        worker, number = self.workers[rank], next(self.workers[rank].numbers)
        batch = min(worker.batches) if has_batch and worker.batches else 0
        if worker.refused_rows is not None and worker.generation >= self.model.least[rank]:
            late_number, late_batch, answer = worker.refused_rows
            self.model.fence(rank, worker.generation)
            assert self.bed.push_rows(rank, worker.generation, late_number, late_batch) == answer
        got: Outcome = "gone"
        for is_whole in (False, True)[not is_cut :]:
            expected = self.model.push_rows(rank, worker.generation, batch, is_whole=is_whole)
            got = self.bed.push_rows(rank, worker.generation, number, batch, is_whole=is_whole)
            assert got == expected
        worker.refused_rows = (number, batch, got) if got in ("phase", "lost") else None
        if got == "ack":
            worker.batches.discard(batch)
            assert self.bed.push_rows(rank, worker.generation, number, batch) == "ack"

    @rule(rank=RANKS, is_heard=st.booleans())
    def look_up(self, rank: int, is_heard: bool) -> None:
        """Twice, as after a cut; a batch whose lookup was never heard of is not known later."""
        worker, batch = self.workers[rank], next(self.workers[rank].numbers)
        known = worker.batches | {batch}
        expected = self.model.look_up(rank, worker.generation, batch, known)
        assert self.bed.look_up(rank, worker.generation, batch, known) == expected
        if expected == "ack":
            assert self.bed.look_up(rank, worker.generation, batch, known) == "ack"
            worker.batches |= {batch} if is_heard else set()

    @rule(rank=RANKS)
    def give_up(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.batches:
            worker.refused_rows = None  # its session goes on, so a late copy is of no account
            batch = worker.batches.pop()
            expected = self.model.give_up(rank, worker.generation, batch)
            number = next(worker.numbers)
            assert self.bed.give_up(rank, worker.generation, number, batch) == expected

    # -- checkpoints

    @precondition(lambda self: self.model.counts and not self.num_saves)
    @rule()
    def save(self) -> None:
        """What is restored has the counts of the cut, and half pushes go on where they were."""
        self.num_saves += 1
        with TemporaryDirectory(prefix="tfos-gate-") as directory:
            self.bed.save(Path(directory))
            restored = self.bed.restored(Path(directory))
        assert np.array_equal(restored.counts(), self.bed.counts())
        assert restored.rows() == self.bed.rows()
        if self.model.has_barrier:
            assert restored.shard.gate.clock == self.model.clock
            return
        expected = self.bed.counts()
        for rank, worker in enumerate(self.workers):
            is_alive = worker.generation >= self.model.least[rank]  # fences end with their server
            if is_alive and worker.pending is not None and worker.pending[1] == "full":
                name = worker.pending[0]
                restored.push(name, "full")
                touched = self.model.touched.get(name, set())
                if name not in self.model.done and name not in self.model.waiting:
                    for bucket in set(range(NUM_BUCKETS)) - touched:
                        expected[bucket, name.rank] += 1
        assert np.array_equal(restored.counts(), expected)

    # -- what always holds

    @invariant()
    def every_push_counts_once(self) -> None:
        counts, model = self.bed.counts(), self.model
        for bucket, rank in np.ndindex(counts.shape):
            assert counts[bucket, rank] == model.counts[bucket, rank]
        assert self.bed.rows() == [model.rows[rank] for rank in range(NUM_WORKERS)]
        told = {each.worker: each for each in self.bed.service.stats().workers}
        for rank, each in told.items():
            assert each.pushes == model.pushes[rank]
            assert each.table_pushes >= model.rows[rank]

    @invariant()
    def the_same_wait_for_the_same(self) -> None:
        gate, model = self.bed.shard.gate, self.model
        assert gate.clock == model.clock
        assert gate.missing() == model.missing()
        waiting = {Name(one.worker, one.generation, one.sequence) for one in gate.waiting}
        assert waiting == set(model.waiting)
        assert not waiting or gate.missing(), "it waits for nobody"
        assert not {name.rank for name in waiting} & set(gate.missing())

    @invariant()
    def nobody_is_beyond_the_bound(self) -> None:
        gate, model = self.bed.shard.gate, self.model
        if model.mode == "ssp":
            clocks = {rank: gate.clock_of(rank) for rank in model.members}
            assert clocks == model.clocks
            ahead = clocks.keys() - {name.rank for name in model.waiting}
            for rank in ahead - model.excused:
                assert clocks[rank] - min(clocks.values()) <= model.bound
        for rank in range(NUM_WORKERS) if model.mode == "hybrid" else ():
            held = {(one.generation, one.sequence) for one in permits_of(gate, rank)}
            assert held == model.held[rank]
            assert len(held) <= model.bound

    def teardown(self) -> None:
        """Everything that waits ends, once those have pushed that it waits for."""
        for _ in range(50):
            for rank in self.bed.shard.gate.missing() if self.model.waiting else ():
                self.push(rank, "null", WHOLE)
        self.the_same_wait_for_the_same()
        assert not self.model.waiting
        self.every_push_counts_once()
        self.bed.service.stop("done")


@pytest.fixture(autouse=True)
def one_read_per_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receive, "READ_BYTES", 1)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # milliseconds each, and no power is cut here


def run_machine(
    mode: Mode,
    num_examples: int,
    num_steps: int,
    *,
    derandomize: bool = True,
    phases: Collection[Phase] = tuple(Phase),
) -> None:
    limits = settings(
        max_examples=num_examples,
        stateful_step_count=num_steps,
        derandomize=derandomize,
        phases=phases,
        deadline=None,
    )
    machine: Any = partial(GateMachine, mode)  # any callable will do, its types say otherwise
    run_state_machine_as_test(machine, settings=limits)


@pytest.mark.fault("F06")
def test_what_a_worker_pushed_before_it_left_and_was_lost_is_not_applied():
    bed = GateBed("sync", 0, "continue")
    assert bed.push(Name(2, 0, 1), "full") == "gone"  # it waits for the others
    assert bed.change(2, 0, "leave", 2) == "ack"
    bed.service.worker_lost(2, 0)  # type: ignore[arg-type]
    assert not bed.shard.gate.waiting
    assert bed.push(Name(0, 0, 1), "full") == "gone"
    assert bed.push(Name(1, 0, 1), "full") == "ack"
    assert bed.counts()[0].tolist() == [1, 1, 0]
    bed.service.stop("done")


@pytest.mark.fault("F01")
@pytest.mark.parametrize("mode", ["async", "ssp"])
@pytest.mark.parametrize("kind", ["full", "nan"])
def test_a_worker_that_is_dead_in_the_middle_of_a_push_makes_nobody_stale(mode: Mode, kind: Kind):
    """Else everybody's rate is halved until its loss is known."""
    bed = GateBed(mode, 9 if mode == "ssp" else 0, "continue")
    gate, other = bed.shard.gate, WorkerRank(0)
    for _ in range(2):
        assert bed.push(Name(2, 0, 1), kind, delivered=BUCKET_BYTES + 1) == "gone"
        assert gate.staleness_of(other) == 0
    assert bed.push(Name(2, 0, 1), "full") == "ack"
    assert gate.staleness_of(other) == 1
    assert bed.push(Name(2, 0, 2), "nan") == "nan"
    assert gate.staleness_of(other) == 1
    bed.service.stop("done")


@pytest.mark.fault("F24")
@pytest.mark.parametrize("kind", ["full", "null"])
@pytest.mark.parametrize("mode", ["ssp", "sync", "hybrid"])
def test_a_late_copy_of_a_refused_push_stays_refused_after_a_join(mode: Mode, kind: Kind):
    """Else it would stand at the barrier in the place of the push that its worker sends next."""
    bed = GateBed(mode, 0 if mode == "sync" else 1, "continue")

    def refused_all() -> bool:
        refused = [bed.push(Name(0, 0, 1), kind), bed.push_rows(0, 0, 1, 0)]
        if mode == "hybrid":
            refused.append(bed.look_up(0, 0, 1, {1}))
        return set(refused) == {"phase"}

    assert bed.change(0, 0, "leave", 1) == "ack"
    assert refused_all()
    assert bed.change(0, 0, "join", 2) == "ack"
    assert refused_all()
    assert not permits_of(bed.shard.gate, 0)
    assert not bed.shard.gate.waiting
    assert not bed.counts().any()
    assert bed.rows()[0] == 0
    for rank in (1, 2, 0):
        bed.push(Name(rank, 0, 2), "full")
    assert bed.counts()[0].tolist() == [1, 1, 1]
    bed.service.stop("done")


@pytest.mark.fault("F06")
@pytest.mark.fault("F24")
@pytest.mark.fault("F28")
@pytest.mark.fault("F34")
@pytest.mark.parametrize("mode", MODES)
def test_a_server_does_in_every_mode_what_the_model_does(mode: Mode):
    run_machine(mode, 15, 40)


@pytest.mark.fault("F24")
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_a_server_does_what_the_model_does_for_longer(mode: Mode):
    run_machine(mode, 1000, 60, derandomize=False)


BROKEN: dict[str, tuple[Mode, type, str, Any]] = {
    "a refused push is taken after a join": ("sync", Ticket, "refusal", property(lambda _: None)),
    "buckets forget what was applied": ("async", Ticket, "needs", lambda *_: True),
    "a fenced attempt may push": ("async", CompletionLog, "fence", lambda *_: None),
    "a lost worker is waited for": ("sync", BSP, "on_lost", lambda *_: []),
    "a replaced attempt stays at the barrier": (
        "sync",
        WaitingPushes,
        "has_fenced",
        lambda *_: False,
    ),
    "a refused push is taken for a null one": ("sync", Ticket, "refuse", lambda *_: None),
    "ssp lets a replaced attempt wait": ("ssp", SSP, "on_replaced", lambda *_: []),
    "a batch keeps its permit": ("hybrid", Permits, "on_batch_over", lambda *_: []),
    "a worker that leaves keeps its permits": ("hybrid", Permits, "on_gone", lambda *_: []),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_server_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    """The machine is no use if it cannot fail."""
    mode, owner, method, mutant = BROKEN[name]
    monkeypatch.setattr(owner, method, mutant)
    with pytest.raises(AssertionError):
        run_machine(mode, 400, 40, phases=[Phase.generate])  # to shrink what it finds takes minutes
