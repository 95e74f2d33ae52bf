"""GPUs that nodes keep although Spark takes them for free: the next cluster goes elsewhere."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.control.members import NodeStatus
from tfos.errors import NotEnoughSlots
from tfos.phases import ClusterPhase
from tfos.slots import awaiting
from tfos.slots.claims import SlotClaims
from tfos.slots.offer import ExecutorSlots, Offer
from tfos.slots.placing import PlacedNode, SlotNeeds
from tfos.slots.wait import SlotWait
from tfos.spark.interruptible import CancelToken
from tfos.spark.shares import NodeShare

ONE_GPU = NodeShare(1, 1)
NEEDS = SlotNeeds("1 worker", (PlacedNode("worker:0", "workers", ONE_GPU),), ONE_GPU, num_fed=1)


def offer_of(*slots: int) -> Offer:
    """Return executors with a GPU per slot, on which nothing runs."""
    executors = (
        ExecutorSlots(str(number), "h", count, 0, NodeShare(4, count), NodeShare(4, count))
        for number, count in enumerate(slots)
    )
    return Offer(tuple(executors), expected=len(slots), task=ONE_GPU)


class Cluster:
    """A cluster whose worker has gone to an executor, perhaps not to the one it was promised."""

    def __init__(self) -> None:
        self.phase = ClusterPhase.RESERVED
        self.at: list[str] = []
        self.missing: list[str] = []
        self.registered: list[str] = []
        self.is_starting = self.is_ending = False
        self.info = SimpleNamespace(cluster_id="c")

    @property
    def coordinator(self) -> Any:
        return self

    def act(self, decide: Any) -> None:
        pass

    def read(self, question: Any) -> Any:
        workers = [SimpleNamespace(executor_id=each, is_live=True) for each in self.at]
        members = {
            each: SimpleNamespace(name=each, status=status)
            for status, names in (
                (NodeStatus.MISSING, self.missing),
                (NodeStatus.REGISTERED, self.registered),
            )
            for each in names
        }
        state = SimpleNamespace(
            phase=self.phase,
            is_ending=self.is_ending,
            is_starting=self.is_starting,
            members=members,
            workers=workers,
        )
        return question(state)


class Spark:
    """What keys the claims."""


@pytest.fixture
def reserve(monkeypatch):
    spark: Any = Spark()

    def reserving(cluster: Cluster, offer: Offer, needs: SlotNeeds = NEEDS) -> str | None:
        """Return the executor of a new cluster's worker; None: anywhere."""
        monkeypatch.setattr(awaiting, "read_offer", lambda *_: offer)
        monkeypatch.setattr(awaiting, "YarnContainers", lambda _: None)
        config = ClusterConfig(slot_settle_s=1e-6, slot_wait_s=1e-6)
        wait, console = SlotWait(needs, config, 0.0), Console(enabled=False)
        given: Any = (spark, None, cluster, wait, console, CancelToken())
        _, fit = awaiting.await_slots(*given)
        return fit.executors.get("worker:0")

    return reserving


def test_a_cluster_takes_no_gpu_on_which_a_node_of_another_one_computes(reserve):
    first, second, third = Cluster(), Cluster(), Cluster()
    assert reserve(first, offer_of(1, 1)) == "0"
    assert reserve(second, offer_of(1, 1)) == "1"  # before the first one's node is there, too
    text = "need 1 task slots .* nodes of other clusters compute on the GPUs of executors 0, 1"
    with pytest.raises(NotEnoughSlots, match=text):
        reserve(third, offer_of(1, 1))
    first.phase = ClusterPhase.CLOSED
    assert reserve(third, offer_of(1, 1)) == "0"


def test_a_worker_that_went_elsewhere_keeps_the_gpu_that_it_has(reserve):
    first, second = Cluster(), Cluster()
    assert reserve(first, offer_of(1, 1, 1)) == "0"
    first.at, first.phase = ["1"], ClusterPhase.RUNNING
    assert reserve(second, offer_of(1, 1, 1)) == "2"


@pytest.mark.parametrize(
    ("needs", "slots", "places"),
    [
        (NEEDS, (2, 2), ["0", "0"]),  # its task holds the GPU, and Spark knows
        (replace(NEEDS, num_fed=0), (1, 1), [None, None]),
    ],
)
def test_tasks_that_stay_hold_their_gpus_themselves(reserve, needs, slots, places):
    clusters = [Cluster(), Cluster()]
    assert [reserve(each, offer_of(*slots), needs) for each in clusters] == places


def test_a_server_has_a_place_beside_a_gpu_that_is_kept():
    server = SlotNeeds("1 ps", (PlacedNode("ps:0", "ps", NodeShare(1)),), ONE_GPU)
    fit = replace(offer_of(1), kept=frozenset("0")).fit(server)
    assert fit is not None
    assert fit.executors == {"ps:0": "0"}


def test_a_gpu_on_which_another_cluster_computes_may_become_free():
    offer = replace(offer_of(1), kept=frozenset("0"))
    assert not offer.fit(NEEDS)
    assert offer.fit(NEEDS, is_idle=True)


def test_of_the_claimed_slots_those_of_starting_nodes_are_told_apart():
    """Spark counts these as busy, too."""
    claims, clusters = SlotClaims(), [Cluster(), Cluster()]
    for place, cluster in enumerate(clusters):
        cluster.missing, cluster.is_starting = ["worker:0", "worker:1"], not place
        given: Any = cluster
        claims.add(given, "c", {"worker:0": 2, "worker:1": 1})
    assert claims.count() == (6, 3)
    clusters[1].phase = ClusterPhase.RUNNING
    assert claims.count() == (3, 3)


def test_slots_are_promised_to_nodes_that_have_not_registered_until_the_cluster_runs_or_ends():
    claims, cluster, other = SlotClaims(), Cluster(), Cluster()
    cluster.missing = ["worker:0", "worker:1", "ps:0"]  # the last one is beside the driver
    cluster.registered = ["worker:2"]
    claims.add(cluster.coordinator, "c", {"worker:0": 2, "worker:1": 2, "worker:2": 2})
    claims.add(other.coordinator, "other", {"worker:0": 1})
    assert claims.count() == (4, 0)
    cluster.is_starting = True
    assert claims.count() == (4, 4)
    other.missing = ["worker:0"]
    assert claims.count() == (5, 4)
    other.is_ending = True
    assert claims.count() == (4, 4)
    for phase in (ClusterPhase.RUNNING, ClusterPhase.FAILED, ClusterPhase.CLOSED):
        cluster.phase = phase
        assert claims.count() == (0, 0)
        assert claims.running() == (("c",) if phase is ClusterPhase.RUNNING else ())
