"""Slot claims: slots of reserved clusters whose nodes have not registered yet.

Spark reports running tasks only, so two reserve() in a row, or at once from two threads, would
count the same slots twice.

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
from typing import Any

from tfos.control.coordinator import Coordinator
from tfos.control.members import NodeStatus
from tfos.control.state.cluster_view import ClusterView
from tfos.phases import ClusterPhase


class SlotClaims:
    """The clusters of one SparkContext. A cluster without references claims nothing."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._clusters: weakref.WeakKeyDictionary[Coordinator, tuple[str, Mapping[str, int]]]
        self._clusters = weakref.WeakKeyDictionary()

    def add(self, cluster: Coordinator, cluster_id: str, slots_by_node: Mapping[str, int]) -> None:
        """Promise slots to each node of this cluster until it registers or the cluster ends.

        Args:
            cluster: whose nodes they are.
            cluster_id: as users know it.
            slots_by_node: those that take slots of the executors that all share.
        """
        self._clusters[cluster] = cluster_id, slots_by_node

    def count(self) -> tuple[int, int]:
        """Return the slots claimed now, and how many of them are for starting nodes.

        Until a starting node registers, Spark also counts its slot as busy.
        """
        awaited = [
            cluster.read(functools.partial(_awaited, slots_by_node))
            for cluster, (_, slots_by_node) in list(self._clusters.items())
        ]
        starting = sum(count for count, is_starting in awaited if is_starting)
        return sum(count for count, _ in awaited), starting

    def running(self) -> tuple[str, ...]:
        """Return the ids of the clusters whose nodes run."""
        return tuple(
            cluster_id
            for cluster, (cluster_id, _) in list(self._clusters.items())
            if cluster.phase is ClusterPhase.RUNNING
        )


_claims: weakref.WeakKeyDictionary[Any, SlotClaims] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def claims_of(spark: Any) -> SlotClaims:
    """Return the promises of a SparkContext."""
    with _lock:
        return _claims.setdefault(spark, SlotClaims())


def _awaited(slots_by_node: Mapping[str, int], state: ClusterView) -> tuple[int, bool]:
    if state.phase not in (ClusterPhase.NEW, ClusterPhase.RESERVED) or state.is_ending:
        return 0, False
    missing = (each for each in state.members.values() if each.status is NodeStatus.MISSING)
    return sum(slots_by_node.get(each.name, 0) for each in missing), state.is_starting
