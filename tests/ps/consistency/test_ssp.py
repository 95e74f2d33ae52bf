"""Events in, actions out: stale synchronous parallel with join, leave, finish and loss."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ps.consistency.policy import Drop, PushDecision, Release
from ps.consistency.ssp import SSP
from ps.errors import PSSettingsError, ServerPhaseError
from ps.manifest.manifest import WorkerRank

W0, W1, W2 = WorkerRank(0), WorkerRank(1), WorkerRank(2)


def push(policy: SSP, worker: WorkerRank, times: int = 1) -> list:
    actions = []
    for _ in range(times):
        actions += policy.on_push(worker, 1, null=False)
    return actions


def test_a_worker_within_the_bound_is_answered_at_once():
    policy = SSP(2, 2)
    assert policy.admit(W0) is PushDecision.APPLY
    assert push(policy, W0, 2) == [Release((W0,), 1), Release((W0,), 2)]
    assert policy.missing() == ()


def test_a_worker_beyond_the_bound_waits_for_the_slowest_and_gets_no_early_values():
    policy = SSP(3, 1)
    push(policy, W0)
    push(policy, W1)
    assert policy.admit(W0) is PushDecision.APPLY_AND_HOLD
    assert push(policy, W0) == []
    assert policy.missing() == (W2,)
    assert push(policy, W2) == [Release((W0, W2), 4)]


def test_bound_zero_goes_in_step():
    policy = SSP(2, 0)
    assert push(policy, W0) == []
    assert push(policy, W1) == [Release((W0, W1), 2)]


def test_a_null_push_advances_the_workers_clock_and_no_update():
    policy = SSP(2, 0)
    assert policy.on_push(W0, 0, null=True) == []
    assert policy.on_push(W1, 0, null=True) == [Release((W0, W1), 0)]


def test_one_worker_never_waits():
    policy = SSP(1, 0)
    assert push(policy, W0, 3) == [Release((W0,), n) for n in (1, 2, 3)]


@pytest.mark.fault("F34")
@pytest.mark.parametrize("event", ["on_leave", "on_finish", "on_lost"])
def test_nobody_waits_for_a_worker_that_is_gone(event: str):
    policy = SSP(2, 1)
    push(policy, W0, 2)
    assert policy.missing() == (W1,)
    assert getattr(policy, event)(W1) == [Release((W0,), 2)]
    assert push(policy, W0, 5)[-1] == Release((W0,), 7)


@pytest.mark.fault("F06")
def test_a_lost_worker_that_waits_is_dropped_and_the_others_go_on():
    policy = SSP(2, 0)
    push(policy, W1)
    assert policy.on_lost(W1) == [Drop(W1)]
    assert push(policy, W0) == [Release((W0,), 2)]


def test_a_joining_worker_starts_at_the_slowest_clock():
    policy = SSP(3, 1)
    policy.on_leave(W2)
    push(policy, W0, 3)
    push(policy, W1, 2)
    assert policy.on_join(W2) == []
    assert policy._clocks == {W0: 3, W1: 2, W2: 2}
    assert policy.on_join(W0) == [], "a member that joins stays where it is"
    assert policy._clocks[W0] == 3


def test_a_worker_that_is_further_at_another_server_begins_there():
    policy = SSP(2, 0)
    policy.on_leave(W1)
    push(policy, W0, 2)
    policy.on_join(W1)
    assert push(policy, W0) == []
    assert policy.on_join(W1, 3) == [Release((W0,), 3)], "nobody waits for clocks it never had"
    assert policy.on_join(W1, 1) == [], "a clock never goes back"
    assert policy.clock_of(W1) == 3


def all_go_on(*, agree: bool) -> bool:
    """Two servers, bound 0; whether three workers go on after two have joined at odd moments.

    Worker 1 joins while worker 0's push is known to server 1 only; worker 2 joins while the pushes
    of the others are known to server 0 only.
    """
    servers = [SSP(3, 0), SSP(3, 0)]

    def join(worker: WorkerRank) -> None:
        for server in servers:
            server.on_join(worker)
        newest = max(server.clock_of(worker) for server in servers)
        for server in servers:
            server.on_join(worker, newest if agree else 0)

    for server in servers:
        server.on_leave(W1)
        server.on_leave(W2)
    push(servers[1], W0)
    join(W1)
    push(servers[0], W0)
    for worker in (W0, W1):
        push(servers[0], worker)
    join(W2)
    for worker in (W0, W1):
        push(servers[1], worker)
    return go_round(servers)


def go_round(servers: list[SSP]) -> bool:
    """Whether each worker, which waits for the answers of both servers, does 20 more pushes."""
    counts = {W0: 0, W1: 0, W2: 0}
    for _ in range(20):
        for worker in counts:
            if all(worker not in server._waiting for server in servers):
                counts[worker] += 1
                for server in servers:
                    push(server, worker)
    return set(counts.values()) == {20}


def test_workers_that_join_with_one_clock_at_all_servers_never_wait_for_each_other():
    assert all_go_on(agree=True)
    assert not all_go_on(agree=False), "the moments are not odd enough to show what agreeing is for"


@pytest.mark.fault("F08")
@pytest.mark.parametrize("bound", [0, 1])
def test_a_worker_that_leaves_and_joins_about_a_restart_never_waits_for_who_waits_for_it(bound):
    """One server counts from 0 again, the other one is at 1000: nobody is 1000 pushes ahead."""
    servers = [SSP(3, bound), SSP(3, bound)]
    for _ in range(1000):
        for worker in (W0, W1, W2):
            push(servers[0], worker)
    for server in servers:
        server.on_leave(W2)
    newest = max(server.clock_of(W2) for server in servers)
    for server in servers:
        server.on_join(W2, newest)
    push(servers[0], W2)
    push(servers[1], W2)
    assert servers[1].missing() == (W0, W1), "they have not said yet where they stand"
    for worker in (W0, W1):
        servers[1].catch_up(worker, 1000)
        push(servers[0], worker)
        push(servers[1], worker)
    assert servers[1]._clocks == servers[0]._clocks == dict.fromkeys((W0, W1, W2), 1001)
    assert go_round(servers)


@pytest.mark.fault("F08")
def test_a_clock_that_was_told_raises_its_worker_alone_and_frees_who_waits():
    policy = SSP(2, 0)
    assert policy.catch_up(W0, 7) == []
    assert push(policy, W0) == []
    assert policy.catch_up(W1, 6) == []
    assert policy.catch_up(W1, 5) == [], "a clock never goes back"
    assert policy._clocks == {W0: 8, W1: 6}
    assert policy.catch_up(W1, 8) == [Release((W0,), 1)]
    policy.on_leave(W1)
    assert policy.catch_up(W1, 9) == []
    assert policy._clocks == {W0: 8}, "nobody is waited for who has left"


def test_after_all_have_left_they_start_again_from_the_slowest():
    policy = SSP(2, 4)
    push(policy, W0, 3)
    push(policy, W1, 1)
    for worker in (W1, W0):
        policy.on_leave(worker)
    for worker in (W0, W1):
        policy.on_join(worker)
    assert policy._clocks == {W0: 3, W1: 3}


def test_a_worker_that_left_says_join_and_one_that_finished_says_finish():
    policy = SSP(2, 1)
    policy.on_leave(W0)
    with pytest.raises(ServerPhaseError, match="join"):
        policy.admit(W0)
    policy.on_finish(W1)
    for call in (policy.admit, policy.on_join):
        with pytest.raises(ServerPhaseError, match="finish"):
            call(W1)


def test_a_push_whose_worker_left_on_the_way_is_answered():
    """Its gradient is applied already, so it must not hear a refusal."""
    policy = SSP(2, 0)
    policy.on_leave(W0)
    assert push(policy, W0) == [Release((W0,), 1)]


def test_two_pushes_of_one_worker_wait_together():
    policy = SSP(2, 0)
    assert push(policy, W0, 2) == []
    assert push(policy, W1) == [Release((W1,), 3)]
    assert push(policy, W1) == [Release((W0, W1), 4)]


def test_a_negative_bound_is_refused():
    with pytest.raises(PSSettingsError, match="at least 0, got -1"):
        SSP(2, -1)


class StaleSyncModel(RuleBasedStateMachine):
    """Compares with the plainest model: a number per member, and who was told to go on."""

    NUM_WORKERS = 4
    ranks = st.integers(0, NUM_WORKERS - 1).map(WorkerRank)

    @initialize(bound=st.integers(0, 3))
    def start(self, bound: int) -> None:
        self.bound = bound
        self.policy = SSP(self.NUM_WORKERS, bound)
        self.counts: dict[int, int] = dict.fromkeys(range(self.NUM_WORKERS), 0)
        self.waiting: set[int] = set()
        self.finished: set[int] = set()
        self.updates = 0
        self.slowest = 0

    def check(self, actions: list, dropped: int | None = None) -> None:
        floor = min(self.counts.values(), default=self.slowest)
        assert floor >= self.slowest, "the slowest clock went back"
        self.slowest = floor
        free = {
            rank
            for rank in self.waiting
            if rank not in self.counts or self.counts[rank] - floor <= self.bound
        }
        self.waiting -= free
        expected: list = [] if dropped is None else [Drop(WorkerRank(dropped))]
        if free:
            expected.append(Release(tuple(WorkerRank(rank) for rank in sorted(free)), self.updates))
        assert actions == expected

    @rule(worker=ranks, null=st.booleans())
    def push(self, worker: WorkerRank, null: bool) -> None:
        if worker not in self.counts:
            with pytest.raises(ServerPhaseError):
                self.policy.admit(worker)
            return
        held = self.counts[worker] + 1 - self.slowest > self.bound
        expected = PushDecision.APPLY_AND_HOLD if held else PushDecision.APPLY
        assert self.policy.admit(worker) is expected
        actions = self.policy.on_push(worker, 1, null=null)
        self.counts[worker] += 1
        self.updates += not null
        self.waiting.add(worker)
        self.check(actions)

    @rule(worker=ranks, ahead=st.integers(-1, 2) | st.just(50))
    def join(self, worker: WorkerRank, ahead: int) -> None:
        if worker in self.finished:
            with pytest.raises(ServerPhaseError):
                self.policy.on_join(worker)
            return
        wanted, stands_at = self.slowest + ahead, self.counts.get(worker, self.slowest)
        actions = self.policy.on_join(worker, wanted)
        self.counts[worker] = max(stands_at, wanted)
        self.check(actions)

    @rule(worker=ranks, ahead=st.integers(-1, 2) | st.just(50))
    def catch_up(self, worker: WorkerRank, ahead: int) -> None:
        actions = self.policy.catch_up(worker, self.slowest + ahead)
        if worker in self.counts:
            self.counts[worker] = max(self.counts[worker], self.slowest + ahead)
        self.check(actions)

    @rule(worker=ranks)
    def leave(self, worker: WorkerRank) -> None:
        actions = self.policy.on_leave(worker)
        self.counts.pop(worker, None)
        self.check(actions)

    @rule(worker=st.sampled_from((W0, W1)))
    def finish(self, worker: WorkerRank) -> None:
        actions = self.policy.on_finish(worker)
        self.finished.add(worker)
        self.counts.pop(worker, None)
        self.check(actions)

    @rule(worker=ranks)
    def lose(self, worker: WorkerRank) -> None:
        actions = self.policy.on_lost(worker)
        self.counts.pop(worker, None)
        dropped = worker if worker in self.waiting else None
        self.waiting.discard(worker)
        self.check(actions, dropped)

    @invariant()
    def agrees(self) -> None:
        assert self.policy.clock == self.updates
        assert self.policy._clocks == self.counts

    @invariant()
    def whoever_waits_waits_for_somebody_who_does_not(self) -> None:
        missing = set(self.policy.missing())
        assert bool(missing) == bool(self.waiting)
        assert not missing & self.waiting


TestStaleSyncModel = pytest.mark.slow(StaleSyncModel.TestCase)
TestStaleSyncModel.settings = settings(max_examples=60, stateful_step_count=30)
