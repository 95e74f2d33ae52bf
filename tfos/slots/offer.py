"""An offer: the executors that Spark has now, and whether the nodes of a cluster fit on them.

Covers: the arithmetic of slots.
Does not: ask Spark (tfos.slots.reading), choose executors (tfos.slots.placing), wait
(tfos.slots.wait). Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tfos.slots.placing import Capacity, Fit, SlotNeeds, assign
from tfos.spark.shares import ONE_CORE, NodeShare


@dataclass(frozen=True, slots=True)
class ExecutorSlots:
    """One executor as Spark's scheduler currently sees it."""

    executor_id: str
    host: str
    slots: int
    """Number of tasks that it runs at once: cores / spark.task.cpus; 0: Spark has excluded it."""
    busy: int = 0
    """Slots that tasks of this application hold on it now."""
    capacity: NodeShare | None = None
    """Everything that it has for tasks; None: its slots."""
    free: NodeShare | None = None
    """What Spark's scheduler can give to tasks now; None: the slots that are not busy."""
    is_launching: bool = False
    """Whether it has registered but takes no tasks yet: all its slots count as busy."""

    def free_capacity(self, task: NodeShare, *, is_idle: bool = False) -> Capacity:
        """Return what nodes can take.

        Args:
            task: share of a task without a profile.
            is_idle: whether to count it as if it ran nothing.
        """
        slots = self.slots if is_idle else max(0, self.slots - self.busy)
        counted = NodeShare(slots * task.cores, slots * task.gpus)
        known = self.capacity if is_idle else self.free
        return Capacity(self.executor_id, self.host, known or counted)


@dataclass(frozen=True, slots=True)
class Offer:
    """Spark's current offer; `expected` is the configured number of executors, if any."""

    executors: tuple[ExecutorSlots, ...]
    expected: int | None = None
    claimed: int = 0
    """Slots of nodes that other clusters of this SparkContext have reserved but not started yet."""
    running: tuple[str, ...] = ()
    """Ids of the other running clusters of this SparkContext."""
    starting: int = 0
    """Number of claimed slots whose nodes are starting; until they register, these also count as
    busy."""
    ending: int = 0
    """Number of busy slots whose tasks end: their jobs have ended, as those of a failed fit."""
    containers: int | None = None
    """Number of containers that YARN has given to executors; None: unknown."""
    task: NodeShare = ONE_CORE
    """Share of a task without a profile."""
    kept: frozenset[str] = frozenset()
    """Executors whose GPUs nodes of other clusters use even after their tasks return. Spark counts
    these GPUs as free."""
    allowed: int | None = None
    """Number of slots that a standalone master may give to this application; None: unknown."""
    is_open: bool = False
    """Whether a standalone master gives more executors while it has some, without a known end."""

    def fit(self, needs: SlotNeeds, *, is_idle: bool = False) -> Fit | None:
        """Return how the nodes fit next to running tasks and claims, or None.

        Args:
            needs: needs of the cluster.
            is_idle: whether to count as if nothing ran and nothing was claimed.
        """
        if needs.is_plain and not needs.shares_tasks:
            left = (self.total if is_idle else self.free) - needs.num_slots
            return Fit({}, left) if left >= 0 else None
        capacities = [each.free_capacity(self.task, is_idle=is_idle) for each in self.executors]
        if not is_idle:
            capacities = [
                replace(each, is_kept=each.executor_id in self.kept) for each in capacities
            ]
        found = assign(needs.nodes, capacities, needs.placement)
        if found is None:
            return None
        left = found.left_tasks(self.task) - (0 if is_idle else self.claimed)
        return Fit(found.executors, left) if left >= 0 else None

    @property
    def total(self) -> int:
        """Number of slots, busy or not."""
        return sum(executor.slots for executor in self.executors)

    @property
    def free(self) -> int:
        """Number of slots that no task of this application holds and no cluster has claimed."""
        return max(0, self.total - self.busy - self.claimed)

    @property
    def free_at_most(self) -> int:
        """Number of free slots if every starting node were counted twice and ending tasks ended."""
        passing = min(self.busy, self.starting + self.ending)
        return max(0, self.total - self.busy - self.claimed + passing)

    @property
    def busy(self) -> int:
        """Number of slots that this application's tasks hold, plus those of launching executors."""
        return sum(min(executor.slots, executor.busy) for executor in self.executors)

    @property
    def launching(self) -> int:
        """Number of slots of executors that have registered but take no tasks yet."""
        return sum(executor.slots for executor in self.executors if executor.is_launching)

    @property
    def complete(self) -> bool:
        """Whether every configured executor has registered."""
        return self.expected is not None and len(self.executors) >= self.expected

    def may_grow_to(self, num_slots: int) -> bool:
        """Return whether the master may still give more slots, up to this total."""
        return self.allowed is not None and self.total < self.allowed >= num_slots

    @property
    def outstanding(self) -> int:
        """Number of configured executors that have not registered yet."""
        return max(0, (self.expected or 0) - len(self.executors))

    @property
    def whereabouts(self) -> str:
        """What is known of the executors that have not registered; "" if nothing."""
        if self.containers is None or not self.outstanding:
            return ""
        preparing = min(self.outstanding, max(0, self.containers - len(self.executors)))
        asked = self.outstanding - preparing
        parts = []
        if preparing:
            has = "has a container" if preparing == 1 else "have containers"
            parts.append(f"{preparing} {has}: files are being localised, or Java starts")
        if asked:
            parts.append(
                f"for {asked} YARN has given no container yet: its queue or nodes may be full"
            )
        return "; ".join(parts)
