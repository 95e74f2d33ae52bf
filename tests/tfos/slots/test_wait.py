"""Slot arithmetic with an injected time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tfos.config import ClusterConfig, InputMode
from tfos.errors import NotEnoughSlots
from tfos.slots.offer import ExecutorSlots, Offer
from tfos.slots.placing import PlacedNode, SlotNeeds
from tfos.slots.profiles import RoleProfiles, needs_of
from tfos.slots.wait import SlotWait, kept_executors, shortage, workers_hold_slots
from tfos.spark.shares import ONE_CORE, NodeShare
from tfos.topology import plan


def _offer(*busy: int, slots: int = 1, expected: int | None = None) -> Offer:
    return Offer(
        tuple(ExecutorSlots(str(i), "h", slots, count) for i, count in enumerate(busy)), expected
    )


def _needs(cluster_size: int, mode: InputMode = InputMode.TENSORFLOW) -> SlotNeeds:
    return needs_of(plan(cluster_size, 1), RoleProfiles(ONE_CORE), None, mode)


def _holds(cluster_size: int, mode: InputMode, offer: Offer) -> bool:
    needs = _needs(cluster_size, mode)
    fit = offer.fit(needs)
    assert fit is not None
    return workers_hold_slots(needs, offer, fit)


def _wait(cluster_size: int = 4, **config: float) -> SlotWait:
    return SlotWait(_needs(cluster_size), ClusterConfig(**config), started_s=0.0)  # type: ignore[arg-type]


def _refused_at_s(wait: SlotWait, offer: Offer, *times_s: float) -> float | None:
    """Return the first of these times at which the wait ends without slots."""
    for now_s in times_s:
        try:
            assert not wait.ready(offer, now_s)
        except NotEnoughSlots:
            return now_s
    return None


@pytest.mark.fault("F18")
def test_a_cluster_that_fits_starts_at_once():
    assert _wait(3).ready(_offer(0, 0, 0), 0.0)


@pytest.mark.fault("F18")
def test_too_small_with_all_promised_executors_there_fails_at_once_with_the_arithmetic():
    with pytest.raises(NotEnoughSlots) as caught:
        _wait().ready(_offer(0, 0, 0, expected=3), 0.0)
    text = str(caught.value)
    assert "need 4 task slots at once (1 ps + 3 workers), Spark offers 3" in text
    assert "executors 0, 1, 2: 3 x 1 slot" in text
    assert "Use fewer nodes or raise --num-executors" in text


@pytest.mark.parametrize(
    ("master", "step"),
    [
        ("local[3]", "Use fewer nodes or start the driver with --master 'local[7]'."),
        ("local[*]", "Use fewer nodes or start the driver with --master 'local[7]'."),
        ("local-cluster[3,1,1024]", "raise the numbers in --master local-cluster[…]."),
        ("yarn", "raise --num-executors, spark.executor.cores or spark.cores.max."),
    ],
)
def test_the_next_step_gives_slots_on_this_master(master, step):
    wait = replace(_wait(7), master=master)
    with pytest.raises(NotEnoughSlots) as caught:
        wait.ready(_offer(0, slots=3, expected=1), 0.0)
    assert str(caught.value).endswith(step)


def test_executors_that_spark_makes_for_jobs_alone_are_asked_for_by_their_least_number():
    wait = replace(_wait(2, allow_dynamic=True), is_dynamic=True)
    wait.ready(_offer(), 0.0)
    with pytest.raises(NotEnoughSlots, match=r"raise spark\.dynamicAllocation\.minExecutors"):
        wait.ready(_offer(), 1e6)


def test_dynamic_allocation_that_is_allowed_and_off_is_no_way_to_more_slots():
    wait = _wait(2, allow_dynamic=True)
    wait.ready(_offer(0), 0.0)
    with pytest.raises(NotEnoughSlots, match=r"raise --num-executors") as refused:
        wait.ready(_offer(0), 1e6)
    assert "dynamicAllocation" not in str(refused.value)


def test_the_local_master_that_is_named_has_room_for_what_runs_and_cores_per_task():
    wait = replace(_wait(4), master="local[3]")
    offer = replace(_offer(2, slots=3), claimed=1, task=NodeShare(2, 0))
    wait.ready(offer, 0.0)
    with pytest.raises(NotEnoughSlots, match=r"local\[14\]"):  # (4 + 2 + 1) tasks of 2 cores
        wait.ready(offer, 1e6)


@pytest.mark.fault("F18")
def test_configured_executors_are_awaited_until_the_reservation_times_out_then_named():
    wait = _wait(reservation_timeout_s=600.0)
    offer = _offer(0, 0, expected=4)
    for now_s in (0.0, 30.0, 61.0, 599.9):
        assert not wait.ready(offer, now_s)
    assert wait.until(offer) == (
        " 2 of 4 executors have registered. Waiting for 2 more, 600 s at most"
    )
    with pytest.raises(NotEnoughSlots, match="4 executors are configured") as caught:
        wait.ready(offer, 600.0)
    text = str(caught.value)
    assert "2 executors have not registered within 600 s" in text
    assert "raise reservation_timeout, or use fewer nodes" in text
    assert "--num-executors" not in text
    assert _wait().until(_offer(0, 0, expected=2)) == ""


@pytest.mark.parametrize(
    ("containers", "known"),
    [
        (None, ""),
        (
            4,
            " (1 has a container: files are being localised, or Java starts; for 1 YARN",
        ),
        (5, " (2 have containers: files are being localised, or Java starts)."),
        (3, " (for 2 YARN has given no container yet: its queue or nodes may be full)."),
        (2, " (for 2 YARN has given no container yet: its queue or nodes may be full)."),
    ],
)
def test_what_yarn_says_of_executors_that_have_not_registered_is_told(containers, known):
    wait = _wait(5, reservation_timeout_s=600.0)
    offer = replace(_offer(0, 0, 0, expected=5), containers=containers)
    assert wait.until(offer).startswith(f" 3 of 5 executors have registered{known}")
    assert offer.whereabouts in wait.until(offer)
    with pytest.raises(NotEnoughSlots) as refused:
        wait.ready(offer, 600.0)
    assert f"have not registered within 600 s{known.rstrip('.')}" in str(refused.value)


@pytest.mark.fault("F18")
def test_slots_that_are_held_are_no_executors_that_may_still_come():
    wait = _wait(3, slot_settle_s=4.0)
    held = _offer(1, 1, 0, 0, expected=4)
    assert not wait.ready(held, 1.0)
    with pytest.raises(NotEnoughSlots, match="Use fewer nodes"):
        wait.ready(held, 6.0)


HELD = _offer(4, slots=4, expected=1)
SHARED = {"shares_slots": True}


@pytest.mark.parametrize("offer", [replace(HELD, expected=count) for count in (1, 2, None)])
@pytest.mark.fault("F18")
def test_slots_that_other_fits_hold_are_awaited_where_clusters_share_them(offer):
    wait, told = _wait(2, **SHARED), []
    for now_s in (0.0, 5.0, 61.0, 250_000.0, 260_000.0):
        try:
            told.append(str(wait.ready(offer, now_s)))
        except NotEnoughSlots as refused:
            told.append(str(refused))
    assert told[:4] == 4 * ["None"]
    assert "4 of them held by running tasks" in told[4]


@pytest.mark.fault("F18")
def test_what_never_fits_is_refused_although_clusters_share_slots():
    with pytest.raises(NotEnoughSlots, match="need 5 task slots"):
        _wait(5, **SHARED).ready(HELD, 0.0)
    wait = _wait(5, **SHARED)
    assert not wait.ready(replace(HELD, expected=None), 0.0)
    with pytest.raises(NotEnoughSlots, match="need 5 task slots"):
        wait.ready(replace(HELD, expected=None), 5.0)


def test_a_slot_between_two_tasks_of_another_fit_is_not_taken_for_a_free_one():
    wait, free = _wait(2, **SHARED), _offer(2, slots=4, expected=1)
    assert _wait(2, **SHARED).ready(free, 0.0)
    assert not wait.ready(HELD, 0.0)
    assert not wait.ready(free, 1.0)
    assert not wait.ready(HELD, 1.1)
    assert not wait.ready(free, 2.0)
    assert wait.ready(free, 2.1)


@pytest.mark.fault("F18")
def test_late_executors_start_the_cluster_when_they_are_there():
    wait = _wait()
    assert not wait.ready(_offer(expected=4), 0.0)
    assert not wait.ready(_offer(0, expected=4), 20.0)
    assert wait.ready(_offer(0, 0, 0, 0, expected=4), 41.0)


@pytest.mark.fault("F18")
def test_a_slot_that_is_held_when_the_last_executor_comes_late_is_awaited_from_then_on():
    wait = _wait(3, slot_wait_s=60.0, slot_settle_s=4.0)
    assert not wait.ready(_offer(1, 0, expected=3), 300.0)
    assert not wait.ready(_offer(1, 0, 0, expected=3), 300.5)
    assert wait.ready(_offer(0, 0, 0, expected=3), 302.0)


@pytest.mark.fault("F18")
def test_slots_that_the_master_may_still_give_are_awaited_longer():
    wait = _wait(3, slot_wait_s=60.0, slot_settle_s=4.0)
    late = replace(_offer(0, 0), allowed=3)
    assert wait.until(late) == " Waiting for more executors, 60 s at most"
    assert _refused_at_s(wait, late, 0.0, 59.0, 60.0) == 60.0


@pytest.mark.fault("F18")
def test_a_master_that_gives_all_it_has_is_awaited_for_longer_than_executors_are_apart():
    wait = replace(_wait(3, slot_wait_s=60.0, slot_settle_s=4.0), master="spark://h:7077")
    few = replace(_offer(0), is_open=True)
    assert wait.until(few) == " Waiting for more executors, 60 s at most"
    assert _refused_at_s(wait, few, 0.0, 4.1, 59.0, 60.0) == 60.0
    with pytest.raises(NotEnoughSlots, match=r"start more workers of the standalone master"):
        wait.ready(few, 60.0)
    assert wait.ready(replace(_offer(0, 0, 0), is_open=True), 60.0)


@pytest.mark.fault("F18")
def test_slots_that_another_cluster_holds_are_no_executors_that_a_master_may_still_give():
    wait = _wait(3, slot_wait_s=60.0, slot_settle_s=4.0)
    held = replace(_offer(1, 1, 1), is_open=True)
    assert wait.until(held) == ""
    assert _refused_at_s(wait, held, 0.0, 3.9, 4.0) == 4.0


@pytest.mark.fault("F18")
@pytest.mark.parametrize("offer", [replace(_offer(0, 0), allowed=2), replace(_offer(0), allowed=2)])
def test_more_than_the_master_may_give_is_not_awaited(offer):
    wait = _wait(3, slot_wait_s=60.0, slot_settle_s=4.0)
    assert not wait.ready(offer, 0.0)
    with pytest.raises(NotEnoughSlots):
        wait.ready(offer, 4.0)


@pytest.mark.fault("F18")
def test_without_a_promise_the_offer_must_stand_still_for_some_seconds():
    wait = _wait()
    assert not wait.ready(_offer(0), 0.0)
    assert not wait.ready(_offer(0, 0), 3.0)
    assert not wait.ready(_offer(0, 0), 6.9)
    with pytest.raises(NotEnoughSlots):
        wait.ready(_offer(0, 0), 7.1)


@pytest.mark.fault("F18")
def test_the_first_executor_is_awaited_until_the_reservation_times_out():
    """A standalone master may queue the application; it promises no number of executors."""
    wait = replace(_wait(slot_wait_s=60.0, reservation_timeout_s=600.0), master="spark://h:7077")
    none = replace(_offer(), is_open=True)
    assert wait.until(none) == " Waiting for the first executor, 600 s at most"
    assert _refused_at_s(wait, none, 60.0, 599.0, 600.0) == 600.0
    with pytest.raises(NotEnoughSlots, match="no executor has registered") as refused:
        wait.ready(none, 600.0)
    text = str(refused.value)
    assert "None came within 600 s: see the cluster manager's page or queue for why" in text
    assert "raise reservation_timeout" in text
    assert "fewer nodes" not in text


@pytest.mark.fault("F18")
def test_executors_that_register_after_a_late_first_one_are_awaited_from_then_on():
    wait = replace(_wait(3, slot_wait_s=60.0), master="spark://h:7077")
    none, one = replace(_offer(), is_open=True), replace(_offer(0), is_open=True)
    assert _refused_at_s(wait, none, 0.0, 300.0) is None
    assert _refused_at_s(wait, one, 300.1, 359.0, 360.0) == 360.0
    assert wait.ready(replace(_offer(0, 0, 0), is_open=True), 360.1)


def test_after_a_minute_without_an_executor_a_warning_says_where_to_look():
    wait = _wait(reservation_timeout_s=600.0)
    assert wait.held(_offer(), 59.0) == ""
    assert wait.held(_offer(), 60.0) == (
        "no executor has registered for 60 s: the cluster manager's page or queue shows why, such "
        "as other applications that hold its cores or an executor that is larger than any host. It "
        "is awaited for 600 s in all"
    )
    assert wait.held(_offer(0), 60.0) == ""
    none = replace(_offer(expected=2), containers=0)
    assert "for 60 s (for 2 YARN has given no container yet" in wait.held(none, 60.0)


@pytest.mark.fault("F18")
def test_a_first_executor_that_spark_makes_for_jobs_alone_is_not_awaited_as_long():
    wait = replace(_wait(slot_wait_s=60.0, reservation_timeout_s=600.0), is_dynamic=True)
    assert _refused_at_s(wait, _offer(), 59.0, 60.0) == 60.0


def test_no_warning_sends_to_the_queue_for_executors_that_spark_asks_for_with_a_job_alone():
    wait = replace(_wait(slot_wait_s=300.0, reservation_timeout_s=600.0), is_dynamic=True)
    assert _refused_at_s(wait, _offer(), 60.0, 299.0, 300.0) == 300.0
    assert wait.held(_offer(), 60.0) == ""
    assert "awaited for 600 s" in wait.held(_offer(expected=2), 60.0)


@pytest.mark.fault("F18")
def test_slots_that_other_jobs_hold_do_not_count_and_may_become_free():
    wait = _wait(3)
    assert not wait.ready(_offer(1, 0, 0, expected=3), 0.0)
    assert wait.ready(_offer(0, 0, 0, expected=3), 1.0)
    other = _wait(3)
    assert not other.ready(_offer(1, 0, 0, expected=3), 0.0)
    with pytest.raises(NotEnoughSlots, match=r"offers 2 .*1 of them held by running tasks"):
        other.ready(_offer(1, 0, 0, expected=3), 4.1)


def test_the_sentence_adds_up_executors_of_different_sizes():
    offer = Offer(
        (ExecutorSlots("1", "a", 1), ExecutorSlots("2", "a", 1), ExecutorSlots("3", "b", 2))
    )
    assert "2 x 1 slot + 1 x 2 slots" in shortage(_needs(5), offer)


@pytest.mark.parametrize(
    ("mode", "slots_each", "holds"),
    [
        (InputMode.TENSORFLOW, 1, True),
        (InputMode.SPARK, 1, False),
        (InputMode.SPARK, 2, True),
    ],
)
def test_a_worker_keeps_its_slot_only_where_feed_tasks_find_another(mode, slots_each, holds):
    offer = _offer(0, 0, 0, slots=slots_each)
    assert _holds(3, mode, offer) is holds


def test_slots_of_another_cluster_do_not_feed_this_one():
    assert _holds(2, InputMode.SPARK, _offer(0, slots=4))
    assert _holds(2, InputMode.SPARK, _offer(1, slots=4))  # one is left for the one worker
    assert not _holds(2, InputMode.SPARK, _offer(0, 0, 0))
    assert not _holds(2, InputMode.SPARK, _offer(2, slots=4))
    one_slot = Offer((ExecutorSlots("0", "h", 1), ExecutorSlots("1", "h", 8)))
    assert not _holds(2, InputMode.SPARK, one_slot)  # a worker there would leave no other


def test_workers_with_executors_of_their_own_keep_their_tasks():
    needs = SlotNeeds("1 ps + 2 workers", (PlacedNode("ps:0", "ps", ONE_CORE),), num_fed=2)
    offer = _offer(0)
    fit = offer.fit(needs)
    assert fit is not None
    assert workers_hold_slots(needs, offer, fit)


def test_a_placement_chooses_executors_although_slots_alone_would_do():
    fit = _offer(0, 0, 0).fit(replace(_needs(2), placement="spread"))
    assert fit is not None
    assert len(set(fit.executors.values())) == 2


def test_cores_that_tasks_of_a_local_master_hold_are_not_free():
    """It reports no free cores, only its tasks."""
    needs = SlotNeeds("1 worker", (PlacedNode("worker:0", "workers", NodeShare(3)),))
    assert _offer(1, slots=4).fit(needs)
    assert not _offer(2, slots=4).fit(needs)
    assert _offer(2, slots=4).fit(needs, is_idle=True)


@pytest.mark.fault("F18")
def test_nodes_that_start_may_be_counted_twice_and_are_awaited():
    wait = _wait(3, slot_settle_s=4.0, slot_wait_s=60.0)
    starts = replace(_offer(3, slots=6, expected=1), claimed=3, starting=3)
    for now_s in (0.0, 10.0, 59.0):
        assert not wait.ready(starts, now_s)
    assert wait.ready(_offer(3, slots=6, expected=1), 59.5)
    waits = replace(starts, starting=0)
    with pytest.raises(NotEnoughSlots):
        wait.ready(waits, 59.6)


@pytest.mark.fault("F18")
def test_nodes_that_start_are_not_awaited_where_even_then_too_few_slots_are_free():
    wait = _wait(4, slot_settle_s=4.0)
    starts = replace(_offer(3, slots=6, expected=1), claimed=3, starting=3)
    assert not wait.ready(starts, 0.0)
    with pytest.raises(NotEnoughSlots):
        wait.ready(starts, 4.0)


@pytest.mark.fault("F18")
def test_tasks_of_ended_jobs_are_awaited_and_those_of_running_jobs_are_not():
    wait = _wait(3, slot_settle_s=4.0, slot_wait_s=60.0)
    ends = replace(_offer(3, slots=4), ending=3)
    assert _refused_at_s(wait, ends, 0.0, 10.0, 59.0, 60.0) == 60.0
    wait = _wait(3, slot_settle_s=4.0, slot_wait_s=60.0)
    too_few = replace(ends, ending=1)
    assert _refused_at_s(wait, too_few, 0.0, 3.9, 4.0) == 4.0


WITH_RESOURCES = SlotNeeds(
    "1 ps + 2 workers",
    (
        PlacedNode("ps:0", "ps", NodeShare(1)),
        PlacedNode("worker:0", "workers", NodeShare(3, 1)),
        PlacedNode("worker:1", "workers", NodeShare(3, 1)),
    ),
)


def _gpus(*free: tuple[int, float], claimed: int = 0) -> Offer:
    has = NodeShare(4, 1)
    executors = (
        ExecutorSlots(str(i), "h", 4, 4 - cores, has, NodeShare(cores, gpus))
        for i, (cores, gpus) in enumerate(free)
    )
    return Offer(tuple(executors), expected=2, claimed=claimed)


@pytest.mark.fault("F18")
@pytest.mark.parametrize(
    ("passing", "refused_s"), [({}, 4.0), ({"starting": 1}, 60.0), ({"ending": 1}, 60.0)]
)
def test_nodes_with_resources_await_what_starts_or_ends_and_nothing_else(passing, refused_s):
    wait = replace(_wait(slot_settle_s=4.0, slot_wait_s=60.0), needs=WITH_RESOURCES)
    offer = replace(_gpus((4, 1), (0, 0)), **passing)
    assert _refused_at_s(wait, offer, 0.0, 3.9, 4.0, 59.0, 60.0) == refused_s


@pytest.mark.fault("F18")
def test_a_shortage_of_resources_names_what_executors_have_and_what_tasks_hold():
    text = shortage(WITH_RESOURCES, _gpus((4, 1), (0, 0)))
    assert text.endswith(
        "Spark offers too little on each executor (executors 0, 1: 2 x 4 cores and 1 GPU, "
        "running tasks hold 4 slots)."
    )


def test_workers_whose_tasks_return_keep_the_executors_of_their_gpus_and_no_others():
    needs = replace(WITH_RESOURCES, num_fed=2)
    offer = _gpus((4, 1), (4, 1), (4, 1), claimed=4)
    fit = offer.fit(needs)
    assert fit is not None
    kept = {fit.executors["worker:0"], fit.executors["worker:1"]}
    assert len({*kept, fit.executors["ps:0"]}) == 3
    assert kept_executors(needs, offer, fit) == kept
    stays = replace(fit, left_slots=2)  # for the tasks that feed: the workers' own stay
    assert kept_executors(needs, offer, stays) == frozenset()


def _resources_wait() -> SlotWait:
    return SlotWait(WITH_RESOURCES, ClusterConfig(slot_settle_s=4.0), started_s=0.0)


@pytest.mark.fault("F18")
def test_nodes_with_resources_start_where_each_fits_on_one_executor():
    assert _resources_wait().ready(_gpus((4, 1), (4, 1)), 0.0)


@pytest.mark.fault("F18")
@pytest.mark.parametrize("offer", [_gpus((4, 1), (2, 1)), _gpus((4, 1), (4, 0))])
def test_cores_and_gpus_that_tasks_hold_are_awaited(offer):
    wait = _resources_wait()
    assert not wait.ready(offer, 0.0)
    assert wait.ready(_gpus((4, 1), (4, 1)), 1.0)


@pytest.mark.fault("F18")
def test_what_other_clusters_have_reserved_is_left_to_them():
    wait = _resources_wait()
    assert wait.ready(_gpus((4, 1), (4, 1), claimed=1), 0.0)
    other = _resources_wait()
    assert not other.ready(_gpus((4, 1), (4, 1), claimed=2), 0.0)
    with pytest.raises(NotEnoughSlots, match="2 claimed by clusters"):
        other.ready(_gpus((4, 1), (4, 1), claimed=2), 4.1)


@pytest.mark.fault("F18")
def test_resources_that_no_executor_has_fail_at_once_with_both_sides():
    small = tuple(ExecutorSlots(str(i), "h", 2, 0, NodeShare(2, 1)) for i in range(4))
    with pytest.raises(NotEnoughSlots) as caught:
        _resources_wait().ready(Offer(small, expected=4), 0.0)
    assert "need 1 x 1 core + 2 x 3 cores and 1 GPU at once (1 ps + 2 workers)" in str(caught.value)
    assert "executors 0, 1, 2, 3: 4 x 2 cores and 1 GPU" in str(caught.value)


@pytest.mark.fault("F18")
def test_executors_that_set_themselves_up_are_awaited_beyond_the_settling_time():
    wait = _wait(3, slot_settle_s=4.0, slot_wait_s=60.0)
    launching = ExecutorSlots("1", "h", 2, busy=2, is_launching=True)
    offer = Offer((*_offer(1).executors, launching))
    for now_s in (0.0, 5.0, 59.0):
        assert wait.ready(offer, now_s) is None
    with pytest.raises(NotEnoughSlots, match=r", 1 of them held by .*, 2 on executors that"):
        wait.ready(offer, 60.0)


def test_a_fit_that_waits_says_who_holds_the_slots():
    wait = _wait(2, **SHARED)
    assert wait.held(HELD, 59.0) == ""
    assert "See the running jobs in Spark's UI" in wait.held(HELD, 60.0)
    told = wait.held(replace(HELD, running=("abc",)), 60.0)
    assert "4 of them held by running tasks" in told
    assert "waits up to 3 days" in told
    assert "end cluster abc by shutdown() (tfos stop --job abc)" in told
    assert _wait(2).held(HELD, 60.0) == ""
