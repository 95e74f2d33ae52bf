"""Events in, actions out: async, the sync barrier, and the choice between modes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ps.consistency.asp import ASP
from ps.consistency.bsp import BSP
from ps.consistency.modes import make_policy
from ps.consistency.policy import Break, Contribution, Drop, PushDecision, Reduce, Release
from ps.consistency.ssp import SSP
from ps.consistency.staleness import slowed
from ps.errors import PSSettingsError, ServerPhaseError, WorkerLost
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec, WorkerRank

W0, W1, W2 = WorkerRank(0), WorkerRank(1), WorkerRank(2)
GROUP = GroupSpec("trainable", "float32", SGD(), (ParamSpec("w", (4,)),))


def test_async_applies_and_answers_every_push_at_once():
    policy = ASP()
    assert policy.admit(W0) is PushDecision.APPLY
    assert policy.on_push(W0, 32, null=False) == [Release((W0,), 1)]
    assert policy.on_push(W1, 32, null=False) == [Release((W1,), 2)]


def test_async_null_push_is_answered_and_changes_no_clock():
    policy = ASP(clock=7)
    assert policy.on_push(W0, 0, null=True) == [Release((W0,), 7)]


def test_async_goes_on_when_a_worker_is_lost():
    policy = ASP()
    assert policy.on_lost(W0) == []
    assert policy.admit(W1) is PushDecision.APPLY


def test_async_refuses_a_finished_worker():
    policy = ASP()
    policy.on_finish(W0)
    with pytest.raises(ServerPhaseError, match="finish"):
        policy.admit(W0)


def test_sync_waits_for_every_worker_from_the_start():
    policy = BSP(2)
    assert policy.admit(W1) is PushDecision.STAGE
    assert policy.on_push(W1, 10, null=False) == []
    assert policy.missing() == (W0,)


def test_sync_reduces_in_rank_order_whoever_came_first():
    policy = BSP(3)
    policy.on_push(W2, 30, null=False)
    policy.on_push(W0, 10, null=False)
    actions = policy.on_push(W1, 20, null=False)
    parts = (Contribution(W0, 10), Contribution(W1, 20), Contribution(W2, 30))
    assert actions == [Reduce(parts), Release((W0, W1, W2), 1)]
    assert policy.missing() == (W0, W1, W2)


def test_sync_null_push_is_present_without_a_gradient():
    policy = BSP(2)
    policy.on_push(W0, 0, null=True)
    actions = policy.on_push(W1, 20, null=False)
    assert actions == [Reduce((Contribution(W1, 20),)), Release((W0, W1), 1)]


def test_sync_clock_of_null_pushes_only_applies_nothing():
    policy = BSP(2)
    policy.on_push(W0, 0, null=True)
    assert policy.on_push(W1, 0, null=True) == [Release((W0, W1), 1)]
    assert policy.clock == 1


@pytest.mark.fault("F34")
def test_sync_leaving_worker_completes_the_barrier_of_the_others():
    policy = BSP(2)
    policy.on_push(W0, 10, null=False)
    assert policy.on_leave(W1) == [Reduce((Contribution(W0, 10),)), Release((W0,), 1)]
    assert policy.on_push(W0, 10, null=False) == [
        Reduce((Contribution(W0, 10),)),
        Release((W0,), 2),
    ]


def test_sync_push_after_leave_is_refused_until_join():
    policy = BSP(2)
    policy.on_leave(W1)
    with pytest.raises(ServerPhaseError, match="join"):
        policy.admit(W1)
    policy.on_join(W1)
    assert policy.admit(W1) is PushDecision.STAGE


def test_sync_joining_worker_is_waited_for_at_once():
    policy = BSP(2)
    policy.on_leave(W1)
    policy.on_join(W1)
    assert policy.on_push(W0, 10, null=False) == []
    assert policy.missing() == (W1,)


def test_sync_last_worker_leaving_completes_nothing():
    policy = BSP(1)
    assert policy.on_leave(W0) == []
    assert policy.clock == 0


def test_sync_finish_is_final():
    policy = BSP(2)
    policy.on_finish(W1)
    with pytest.raises(ServerPhaseError, match="finish"):
        policy.on_join(W1)


def test_sync_second_push_in_one_clock_is_refused_and_names_the_missing():
    policy = BSP(2)
    policy.on_push(W0, 10, null=False)
    with pytest.raises(ServerPhaseError, match=r"twice in clock 0.*worker 1"):
        policy.on_push(W0, 10, null=False)


@pytest.mark.fault("F02")
def test_sync_lost_member_breaks_the_barrier_for_all_later_pushes():
    policy = BSP(3)
    policy.on_push(W0, 10, null=False)
    policy.on_push(W1, 10, null=False)
    assert policy.on_lost(W2) == [Break((W0, W1), W2)]
    assert policy.on_lost(W2) == []
    with pytest.raises(WorkerLost, match="worker 2 was lost"):
        policy.admit(W0)


def test_sync_lost_worker_that_had_left_breaks_nothing():
    policy = BSP(2)
    policy.on_leave(W1)
    assert policy.on_lost(W1) == []
    assert policy.admit(W0) is PushDecision.STAGE


@pytest.mark.fault("F02")
def test_sync_continuing_goes_on_without_the_lost_worker():
    policy = BSP(2, on_lost="continue")
    policy.on_push(W0, 10, null=False)
    assert policy.on_lost(W1) == [Reduce((Contribution(W0, 10),)), Release((W0,), 1)]


def test_sync_continuing_drops_what_the_lost_worker_had_staged():
    policy = BSP(2, on_lost="continue")
    policy.on_push(W1, 10, null=False)
    assert policy.on_lost(W1) == [Drop(W1)]
    assert policy.on_push(W0, 5, null=False) == [
        Reduce((Contribution(W0, 5),)),
        Release((W0,), 1),
    ]


def test_make_policy_follows_the_manifest():
    assert isinstance(make_policy(Manifest(groups=(GROUP,)), 2), ASP)
    assert isinstance(make_policy(Manifest(groups=(GROUP,), consistency="sync"), 2), BSP)
    bounded = make_policy(Manifest(groups=(GROUP,), consistency="ssp", staleness_bound=3), 2)
    assert isinstance(bounded, SSP)
    with pytest.raises(PSSettingsError, match="num_workers"):
        make_policy(Manifest(groups=(GROUP,)), 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"staleness_bound": 2}, "needs consistency='ssp' or 'hybrid', got 'async'"),
        ({"staleness_aware": True, "consistency": "sync"}, "needs consistency='async' or 'ssp'"),
    ],
)
def test_options_that_a_mode_would_leave_aside_are_refused(options: dict, text: str):
    with pytest.raises(PSSettingsError, match=text):
        Manifest(groups=(GROUP,), **options)


def test_a_stale_gradient_is_slowed_by_its_age():
    assert slowed(Hyper(0.6), 0) == Hyper(0.6)
    assert slowed(Hyper(0.6), 2) == Hyper(0.6 / 3)


class SyncModel(RuleBasedStateMachine):
    """Compares `BSP` with the plainest model: sets of ranks and a list of finished barriers."""

    NUM_WORKERS = 4
    ranks = st.integers(0, NUM_WORKERS - 1).map(WorkerRank)

    def __init__(self) -> None:
        super().__init__()
        self.policy = BSP(self.NUM_WORKERS, on_lost="continue")
        self.members = set(range(self.NUM_WORKERS))
        self.finished: set[int] = set()
        self.staged: dict[int, int | None] = {}
        self.clock = 0

    def check(self, actions: list, dropped: int | None = None) -> None:
        expected: list = [] if dropped is None else [Drop(WorkerRank(dropped))]
        if self.staged and self.members <= self.staged.keys():
            ranks = sorted(self.staged)
            rows = [(rank, self.staged[rank]) for rank in ranks]
            parts = tuple(Contribution(WorkerRank(r), n) for r, n in rows if n is not None)
            if parts:
                expected.append(Reduce(parts))
            self.clock += 1
            expected.append(Release(tuple(WorkerRank(rank) for rank in ranks), self.clock))
            self.staged.clear()
        assert actions == expected

    @rule(worker=ranks, rows=st.integers(1, 100), null=st.booleans())
    def push(self, worker: WorkerRank, rows: int, null: bool) -> None:
        if worker not in self.members or worker in self.staged:
            with pytest.raises(ServerPhaseError):
                self.policy.on_push(worker, rows, null=null)
            return
        actions = self.policy.on_push(worker, rows, null=null)
        self.staged[worker] = None if null else rows
        self.check(actions)

    @rule(worker=ranks)
    def join(self, worker: WorkerRank) -> None:
        if worker in self.finished:
            with pytest.raises(ServerPhaseError):
                self.policy.on_join(worker)
            return
        assert self.policy.on_join(worker) == []
        self.members.add(worker)

    @rule(worker=ranks)
    def leave(self, worker: WorkerRank) -> None:
        actions = self.policy.on_leave(worker)
        self.members.discard(worker)
        self.check(actions)

    @precondition(lambda self: len(self.finished) < 2)
    @rule(worker=ranks)
    def finish(self, worker: WorkerRank) -> None:
        actions = self.policy.on_finish(worker)
        self.finished.add(worker)
        self.members.discard(worker)
        self.check(actions)

    @rule(worker=ranks)
    def lose(self, worker: WorkerRank) -> None:
        actions = self.policy.on_lost(worker)
        was_member = worker in self.members
        self.members.discard(worker)
        dropped = worker if was_member and self.staged.pop(worker, self) is not self else None
        self.check(actions, dropped)

    @invariant()
    def agrees(self) -> None:
        assert self.policy.clock == self.clock
        assert self.policy._members == self.members
        assert set(self.policy.missing()) == self.members - self.staged.keys()

    @invariant()
    def nobody_waits_for_nobody(self) -> None:
        assert not self.staged or self.policy.missing()


TestSyncModel = pytest.mark.slow(SyncModel.TestCase)
TestSyncModel.settings = settings(max_examples=60, stateful_step_count=30)
