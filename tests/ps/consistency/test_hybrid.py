"""Events in, actions out: permits for batches of rows, alone and beside the barrier."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ps.consistency.hybrid import Hybrid, Permits
from ps.consistency.modes import make_policy
from ps.consistency.policy import Action, Break, Contribution, Grant, RecallLookups, Reduce, Release
from ps.errors import PSSettingsError, ServerPhaseError, WorkerLost
from ps.exactly_once import RequestId
from ps.manifest.manifest import GroupSpec, Manifest, ParamSpec, TableSpec, WorkerRank
from ps.manifest.rule_spec import SGD

W0, W1 = WorkerRank(0), WorkerRank(1)
GROUP = GroupSpec("trainable", "float32", SGD(), (ParamSpec("w", (4,)),))
TABLE = TableSpec(name="user", dim=2, rule=SGD())


def batch(number: int, worker: int = 0, generation: int = 0, session: int = 1) -> RequestId:
    return RequestId(WorkerRank(worker), generation, session, number)


def look_up(policy: Permits | Hybrid, *numbers: int, still_open: tuple[int, ...] = ()) -> list:
    actions: list[Action] = []
    for number in numbers:
        actions += policy.on_lookup(batch(number), still_open or range(1, number + 1))
    return actions


def test_the_first_batches_are_granted_and_the_next_waits_until_one_is_over():
    permits = Permits(2)
    assert look_up(permits, 1, 2, 3) == [Grant(batch(1)), Grant(batch(2))]
    assert permits.on_batch_over(batch(2)) == [Grant(batch(3))]
    assert permits.held(W0) == {batch(1), batch(3)}


def test_batches_in_line_are_served_in_their_order():
    permits = Permits(1)
    look_up(permits, 1, 2, 3)
    assert permits.on_batch_over(batch(1)) == [Grant(batch(2))]
    assert permits.on_batch_over(batch(2)) == [Grant(batch(3))]


def test_a_batch_that_follows_another_takes_its_permit_ahead_of_the_line():
    permits = Permits(1)
    look_up(permits, 1, 2)
    assert permits.on_batch_over(batch(1), batch(3)) == []
    assert permits.held(W0) == {batch(3)}
    for late in (1, 2):  # a copy of that push, and a batch that has no permit to hand on
        assert permits.on_batch_over(batch(late), batch(4)) == []
    assert permits.held(W0) == {batch(3)}
    assert look_up(permits, 3, still_open=(2, 3)) == [Grant(batch(3))]
    assert permits.on_batch_over(batch(3)) == [Grant(batch(2))]


def test_a_lookup_that_comes_late_ends_no_later_batch():
    """Lookups and pushes have connections of their own."""
    permits = Permits(2)
    look_up(permits, 2, still_open=(1, 2))
    assert look_up(permits, 1, still_open=(1,)) == [Grant(batch(1))]
    assert permits.held(W0) == {batch(1), batch(2)}
    assert look_up(permits, 3, still_open=(3,)) == [Grant(batch(3))]
    assert permits.held(W0) == {batch(3)}


def test_workers_do_not_take_each_others_permits():
    permits = Permits(1)
    look_up(permits, 1)
    assert permits.on_lookup(batch(1, worker=1), (1,)) == [Grant(batch(1, worker=1))]


@pytest.mark.fault("F24")
def test_a_repeated_lookup_takes_no_second_permit():
    permits = Permits(2)
    assert look_up(permits, 1, 1, 1) == [Grant(batch(1))] * 3
    assert look_up(permits, 2) == [Grant(batch(2))]
    assert look_up(permits, 3, 3) == []
    assert permits.on_batch_over(batch(1)) == [Grant(batch(3))], "one place in line"
    assert permits.on_batch_over(batch(2)) == []


@pytest.mark.fault("F24")
def test_a_repeated_end_gives_one_permit_back():
    permits = Permits(1)
    look_up(permits, 1, 2, 3)
    assert permits.on_batch_over(batch(1)) == [Grant(batch(2))]
    assert permits.on_batch_over(batch(1)) == []


def test_a_batch_that_its_worker_has_forgotten_gives_its_permit_back():
    """Its lookup was answered, but the answer was lost and the worker went on without it."""
    permits = Permits(1)
    look_up(permits, 1)
    assert look_up(permits, 2, still_open=(2,)) == [Grant(batch(2))]
    other = batch(1, session=2)
    assert permits.on_lookup(other, (1,)) == [], "what another client of the worker holds, stays"


def test_a_lookup_that_its_client_gave_up_gets_no_permit_while_its_connection_is_still_open():
    """Nobody would ever end that batch, and the next lookup would wait for it."""
    permits = Permits(1)
    look_up(permits, 1, 2)
    assert look_up(permits, 3, still_open=(1, 3)) == [RecallLookups((batch(2),))]
    permits.on_lookup_ended(batch(2))
    assert permits.on_batch_over(batch(1)) == [Grant(batch(3))]


def test_a_lookup_that_nobody_waits_for_loses_its_place():
    permits = Permits(1)
    look_up(permits, 1, 2, 3)
    permits.on_lookup_ended(batch(2))
    assert permits.on_batch_over(batch(1)) == [Grant(batch(3))]


@pytest.mark.fault("F20")
def test_a_newer_attempt_has_all_permits_and_the_older_one_stops_waiting():
    permits = Permits(1)
    look_up(permits, 1, 2)
    newer = batch(1, generation=1)
    assert permits.on_lookup(newer, (1,)) == [RecallLookups((batch(2),)), Grant(newer)]
    assert permits.on_batch_over(batch(1)) == [], "an end of the older one changes nothing"
    assert permits.held(W0) == {newer}


def test_no_permits_are_refused():
    with pytest.raises(PSSettingsError, match="at least 1 permit, got staleness_bound=0"):
        Permits(0)


@pytest.mark.fault("F34")
@pytest.mark.parametrize("event", ["on_leave", "on_finish"])
def test_a_worker_that_goes_gives_its_permits_back_and_completes_the_barrier(event: str):
    policy = Hybrid(2, 1)
    look_up(policy, 1, 2)
    policy.on_push(W1, 5, null=False)
    assert getattr(policy, event)(W0) == [
        RecallLookups((batch(2),)),
        Reduce((Contribution(W1, 5),)),
        Release((W1,), 1),
    ]
    assert policy.permits.held(W0) == frozenset()
    with pytest.raises(ServerPhaseError):
        look_up(policy, 3)


@pytest.mark.fault("F02")
def test_a_broken_barrier_ends_every_wait_for_a_permit():
    """The pushes that would give permits back are refused now."""
    policy = Hybrid(2, 1)
    look_up(policy, 1, 2)
    policy.on_push(W0, 5, null=False)
    assert policy.on_lost(W1) == [Break((W0,), W1), RecallLookups((batch(2),))]
    with pytest.raises(WorkerLost):
        look_up(policy, 3)


@pytest.mark.fault("F02")
def test_with_continue_only_the_lost_workers_permits_are_taken_back():
    policy = Hybrid(2, 1, on_lost="continue")
    look_up(policy, 1, 2)
    policy.on_lookup(batch(1, worker=1), (1,))
    policy.on_lookup(batch(2, worker=1), (1, 2))
    assert policy.on_lost(W1) == [RecallLookups((batch(2, worker=1),))]
    assert policy.permits.on_batch_over(batch(1)) == [Grant(batch(2))]


def test_the_manifest_chooses_hybrid_with_its_bound():
    manifest = Manifest(groups=(GROUP,), tables=(TABLE,), consistency="hybrid", staleness_bound=3)
    policy = make_policy(manifest, 2, clock=7)
    assert isinstance(policy, Hybrid)
    assert (policy.permits.bound, policy.clock) == (3, 7)
    assert manifest.has_barrier


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, r"needs staleness_bound=1\.\.1024.*got 0"),
        ({"staleness_bound": 1025}, "got 1025"),
        ({"staleness_bound": 2, "tables": ()}, "has no tables; use 'sync'"),
        ({"staleness_bound": 2, "staleness_aware": True}, "got 'hybrid': at a barrier no"),
    ],
)
def test_a_hybrid_without_sense_is_refused(options: dict, sentence: str):
    with pytest.raises(PSSettingsError, match=sentence):
        Manifest(**{"groups": (GROUP,), "tables": (TABLE,), "consistency": "hybrid", **options})


class PermitsModel(RuleBasedStateMachine):
    """Compares with the plainest model: per worker a list, whose first `bound` have a permit."""

    NUM_WORKERS = 3
    ranks = st.integers(0, NUM_WORKERS - 1)

    @initialize(bound=st.integers(1, 3))
    def start(self, bound: int) -> None:
        self.bound = bound
        self.permits = Permits(bound)
        self.held: dict[int, list[RequestId]] = {rank: [] for rank in range(self.NUM_WORKERS)}
        self.line: dict[int, list[RequestId]] = {rank: [] for rank in range(self.NUM_WORKERS)}
        self.generations = [0] * self.NUM_WORKERS
        self.numbers = [0] * self.NUM_WORKERS
        self.answered: set[RequestId] = set()

    def moved(self, rank: int) -> list[Action]:
        """What the model lets go on."""
        granted: list[Action] = []
        while self.line[rank] and len(self.held[rank]) < self.bound:
            self.held[rank].append(self.line[rank].pop(0))
            granted.append(Grant(self.held[rank][-1]))
        return granted

    def see(self, actions: list[Action], expected: Sequence[Action]) -> None:
        assert actions == list(expected)
        self.answered |= {action.batch for action in actions if isinstance(action, Grant)}

    def name(self, rank: int, number: int) -> RequestId:
        return batch(number, rank, self.generations[rank])

    def known(self, rank: int) -> tuple[int, ...]:
        return tuple(one.sequence for one in self.held[rank] + self.line[rank])

    @rule(rank=ranks)
    def begin(self, rank: int) -> None:
        self.numbers[rank] += 1
        name = self.name(rank, self.numbers[rank])
        actions = self.permits.on_lookup(name, (*self.known(rank), name.sequence))
        self.line[rank].append(name)
        self.see(actions, self.moved(rank))

    @rule(rank=ranks, place=st.integers(0, 5))
    def repeat(self, rank: int, place: int) -> None:
        known = self.held[rank] + self.line[rank]
        if place < len(known):
            expected = [Grant(known[place])] if known[place] in self.held[rank] else []
            self.see(self.permits.on_lookup(known[place], self.known(rank)), expected)

    @rule(rank=ranks)
    def forget(self, rank: int) -> None:
        """Begin a batch and know of no other: they lose their permits and their places in line."""
        recalled = [RecallLookups(tuple(self.line[rank]))] if self.line[rank] else []
        self.numbers[rank] += 1
        name = self.name(rank, self.numbers[rank])
        actions = self.permits.on_lookup(name, (name.sequence,))
        self.held[rank], self.line[rank] = [], [name]
        self.see(actions, [*recalled, *self.moved(rank)])

    @rule(rank=ranks, place=st.integers(0, 5), again=st.booleans())
    def end(self, rank: int, place: int, again: bool) -> None:
        if place < len(self.held[rank]):
            name = self.held[rank].pop(place)
            self.see(self.permits.on_batch_over(name), self.moved(rank))
            if again:
                self.see(self.permits.on_batch_over(name), [])

    @rule(rank=ranks, place=st.integers(0, 5))
    def give_up_waiting(self, rank: int, place: int) -> None:
        if place < len(self.line[rank]):
            self.permits.on_lookup_ended(self.line[rank].pop(place))

    @rule(rank=ranks)
    def go(self, rank: int) -> None:
        expected = [RecallLookups(tuple(self.line[rank]))] if self.line[rank] else []
        assert self.permits.on_gone(WorkerRank(rank)) == expected
        self.held[rank], self.line[rank] = [], []

    @rule(rank=ranks)
    def replace(self, rank: int) -> None:
        recalled = [RecallLookups(tuple(self.line[rank]))] if self.line[rank] else []
        self.generations[rank] += 1
        self.numbers[rank] = 1
        name = self.name(rank, 1)
        self.held[rank], self.line[rank] = [], [name]
        actions = self.permits.on_lookup(name, (1,))
        self.see(actions, [*recalled, *self.moved(rank)])

    @invariant()
    def agrees(self) -> None:
        for rank in range(self.NUM_WORKERS):
            held = self.permits.held(WorkerRank(rank))
            assert held == set(self.held[rank])
            assert len(held) <= self.bound
            assert not self.line[rank] or len(held) == self.bound, "waits though one is free"
            assert held <= self.answered, "a permit that nobody was told of"


TestPermitsModel = pytest.mark.slow(PermitsModel.TestCase)
TestPermitsModel.settings = settings(max_examples=60, stateful_step_count=30)
