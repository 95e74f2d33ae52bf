"""Offers read from Spark's scheduler: executors that have just registered."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tfos.config import ClusterConfig
from tfos.errors import NotEnoughSlots
from tfos.slots.offer import Offer
from tfos.slots.placing import PlacedNode, SlotNeeds
from tfos.slots.reading import read_offer
from tfos.slots.wait import SlotWait
from tfos.spark.facts import SparkFacts
from tfos.spark.shares import ONE_CORE

FACTS = SparkFacts("spark://h:7077", "app", {}, "file://")


class Iterator:
    """Of Java."""

    def __init__(self, items: list[Any]) -> None:
        self.items = list(items)

    def hasNext(self) -> bool:
        return bool(self.items)

    def next(self) -> Any:
        return self.items.pop(0)

    def mkString(self) -> str:
        return "".join(map(str, self.items))


def of(*items: Any) -> Any:
    return SimpleNamespace(iterator=lambda: Iterator(list(items)))


def offer_of(
    executors: dict[str, tuple[int, int]],
    facts: SparkFacts = FACTS,
    excluded: str = "",
    leaving: str = "",
) -> Offer:
    """Return the offer of executors of 2 cores, by name: free cores and running tasks."""
    summaries = [
        SimpleNamespace(
            id=lambda name=name: name,
            hostPort=lambda: "h:1",
            maxTasks=lambda: 2,
            isExcluded=lambda name=name: name == excluded,
            totalCores=lambda: 2,
            resourceProfileId=lambda: 0,
            resources=lambda: SimpleNamespace(contains=lambda name: False),
        )
        for name in executors
    ]
    running = [
        SimpleNamespace(_1=lambda name=name: name, _2=lambda count=count: count)
        for name, (_, count) in executors.items()
    ]
    backend = SimpleNamespace(
        isExecutorActive=lambda name: name != leaving,
        getExecutorAvailableCpus=lambda name: of(executors[name][0]),
        getExecutorAvailableResources=lambda name: SimpleNamespace(contains=lambda name: False),
    )
    spark = SimpleNamespace(
        statusStore=lambda: SimpleNamespace(executorList=lambda active: of(*summaries)),
        taskScheduler=lambda: SimpleNamespace(
            runningTasksByExecutors=lambda: of(*running), backend=lambda: backend
        ),
    )
    return read_offer(SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: spark)), facts)


@pytest.mark.fault("F18")
def test_an_executor_that_sets_itself_up_is_awaited_and_not_busy():
    offer = offer_of({"0": (0, 0), "1": (2, 0)})
    assert [each.is_launching for each in offer.executors] == [True, False]
    assert (offer.total, offer.free, offer.launching) == (4, 2, 2)


@pytest.mark.fault("F18")
def test_an_executor_that_spark_has_excluded_has_no_slot_and_is_named():
    offer = offer_of({"0": (2, 0), "1": (2, 0)}, excluded="0")
    assert (offer.total, offer.free, offer.launching) == (2, 2, 0)
    needs = SlotNeeds("3 workers", tuple(PlacedNode(n, "workers", ONE_CORE) for n in "abc"))
    wait = SlotWait(needs, ClusterConfig(), started_s=0.0)
    with pytest.raises(NotEnoughSlots, match=r"offers 2 .*Spark excludes 0 after failed tasks"):
        wait.ready(replace(offer, expected=2), 0.0)


@pytest.mark.fault("F18")
def test_an_executor_that_spark_decommissions_is_no_part_of_the_offer():
    """It still runs a task and has a free core, for which Spark starts none."""
    offer = offer_of({"0": (1, 1), "1": (2, 0)}, leaving="0")
    assert [each.executor_id for each in offer.executors] == ["1"]
    assert offer.free == 2


def test_executors_with_running_tasks_are_busy_as_far_as_they_are():
    offer = offer_of({"0": (0, 2), "1": (1, 1)})
    assert [(each.executor_id, each.busy) for each in offer.executors] == [("0", 2), ("1", 1)]
    assert (offer.free, offer.launching) == (1, 0)


@pytest.mark.fault("F18")
@pytest.mark.parametrize(
    ("conf", "allowed"),
    [
        ({}, None),
        ({"spark.cores.max": "6"}, 6),
        ({"spark.cores.max": "7", "spark.executor.cores": "2"}, 6),
        ({"spark.cores.max": "7", "spark.executor.cores": "3", "spark.task.cpus": "2"}, 2),
    ],
)
def test_a_standalone_master_gives_whole_executors(conf, allowed):
    assert SparkFacts("spark://h:7077", "app", conf, "file://").allowed_slots == allowed


@pytest.mark.fault("F18")
@pytest.mark.parametrize(
    ("master", "conf", "is_open"),
    [
        ("spark://h:7077", {}, True),
        ("spark://h:7077", {"spark.cores.max": "6"}, False),
        ("spark://h:7077", {"spark.dynamicAllocation.enabled": "true"}, False),
        ("yarn", {}, False),
        ("local-cluster[2,1,1024]", {}, False),
    ],
)
def test_a_standalone_master_without_a_limit_gives_all_it_has(
    master: str, conf: dict[str, str], is_open: bool
):
    assert offer_of({"0": (2, 0)}, SparkFacts(master, "app", conf, "file://")).is_open is is_open


@pytest.mark.parametrize(
    ("num_executors", "most", "expected"),
    [(1, "20", 2), (2, "20", None), (3, "20", None), (2, "2", 2)],
)
def test_the_least_of_dynamic_allocation_is_awaited_and_not_taken_for_all(
    num_executors: int, most: str, expected: int | None
):
    numbers = {"enabled": "true", "minExecutors": "2", "maxExecutors": most}
    conf = {f"spark.dynamicAllocation.{name}": value for name, value in numbers.items()}
    free = {str(number): (2, 0) for number in range(num_executors)}
    offer = offer_of(free, SparkFacts("spark://h:7077", "app", conf, "file://"))
    assert offer.expected == expected
