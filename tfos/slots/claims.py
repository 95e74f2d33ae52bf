"""Slot claims: slots of reserved clusters whose nodes have not registered yet.

Spark reports only running tasks, so two reserve() calls in a row, or at once from two threads,
would count the same slots twice.

Covers: counting; the lock that admits one reserve() at a time.
Does not: count what Spark runs (tfos.slots.reading), decide whether a cluster fits
(tfos.slots.wait).
Runs in: the driver; one record for each SparkContext.
Threads: any; a reserve() holds `lock` between reading the offer and claiming slots.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.phases import ClusterPhase


@dataclass(frozen=True, slots=True)
class _Claim:
    """The slots promised to one cluster."""

    cluster_id: str
    slots_by_node: Mapping[str, int]
    kept: frozenset[str]


class SlotClaims:
    """The clusters of one SparkContext. A cluster without references claims nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._clusters: weakref.WeakKeyDictionary[Coordinator, _Claim]
        self._clusters = weakref.WeakKeyDictionary()

    def add(
        self,
        cluster: Coordinator,
        cluster_id: str,
        slots_by_node: Mapping[str, int],
        kept: frozenset[str] = frozenset(),
    ) -> None:
        """Promise slots to each node of a cluster until it registers or the cluster ends.

        Args:
            cluster: the cluster of the nodes.
            cluster_id: its id as shown to users.
            slots_by_node: slots by node, for nodes on the common executors.
            kept: executors whose GPUs its nodes keep until it ends.
        """
        self._clusters[cluster] = _Claim(cluster_id, slots_by_node, kept)

    def count(self) -> tuple[int, int]:
        """Return the number of slots claimed now, and how many of these are for starting nodes.

        Until a starting node registers, Spark also counts its slot as busy.
        """
        awaited = [
            cluster.read(functools.partial(_awaited, claim.slots_by_node))
            for cluster, claim in list(self._clusters.items())
        ]
        starting = sum(count for count, is_starting in awaited if is_starting)
        return sum(count for count, _ in awaited), starting

    def running(self) -> tuple[str, ...]:
        """Return the ids of the clusters whose nodes run."""
        return tuple(
            claim.cluster_id
            for cluster, claim in list(self._clusters.items())
            if cluster.phase is ClusterPhase.RUNNING
        )

    def kept(self) -> frozenset[str]:
        """Return the executors whose GPUs nodes keep even after their tasks return."""
        found: set[str] = set()
        for cluster, claim in list(self._clusters.items()):
            if claim.kept and cluster.phase not in (ClusterPhase.CLOSED, ClusterPhase.FAILED):
                found |= claim.kept | cluster.read(_worker_executors)
        return frozenset(found)


_claims: weakref.WeakKeyDictionary[Any, SlotClaims] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def claims_of(spark: Any) -> SlotClaims:
    """Return the promises of a SparkContext."""
    with _lock:
        return _claims.setdefault(spark, SlotClaims())


def _worker_executors(state: ClusterView) -> set[str]:
    return {worker.executor_id for worker in state.workers if worker.is_live}


def _awaited(slots_by_node: Mapping[str, int], state: ClusterView) -> tuple[int, bool]:
    if state.phase not in (ClusterPhase.NEW, ClusterPhase.RESERVED) or state.is_ending:
        return 0, False
    missing = (each for each in state.members.values() if each.status is NodeStatus.MISSING)
    return sum(slots_by_node.get(each.name, 0) for each in missing), state.is_starting
