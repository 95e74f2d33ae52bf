"""Placing of nodes on executors: what a cluster needs, what fits where, on many hosts or few.

Covers: the needs of a cluster's nodes, the choice of an executor for each, and the sentence about
hosts after the start.
Does not: ask Spark (tfos.slots.reading), wait (tfos.slots.wait) or start anything
(tfos.spark.node_rdd asks Spark for these executors). Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tfos.slots.resources import Placement
from tfos.spark.shares import ONE_CORE, NodeShare


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node to place."""

    name: str
    group: str
    """Group of the node; nodes of one group are spread or packed together."""
    share: NodeShare


@dataclass(frozen=True, slots=True)
class Capacity:
    """What is free on one executor."""

    executor_id: str
    host: str
    free: NodeShare
    is_kept: bool = False
    """Whether nodes of other clusters use GPUs that Spark counts as free."""

    def holds(self, share: NodeShare) -> bool:
        """Whether a node fits."""
        has_gpus = not share.gpus or (not self.is_kept and self.free.gpus >= share.gpus)
        return self.free.cores >= share.cores and has_gpus

    def without(self, share: NodeShare) -> Capacity:
        """Return what is left beside a node."""
        left = NodeShare(self.free.cores - share.cores, self.free.gpus - share.gpus)
        return replace(self, free=left)


@dataclass(frozen=True, slots=True)
class Assignment:
    """The executor of every node."""

    executors: Mapping[str, str]
    """Executor by node."""
    left: tuple[Capacity, ...]
    """What the nodes leave."""

    def left_tasks(self, task: NodeShare) -> int:
        """Return how many tasks fit into what is left."""
        return sum(executor.free.tasks(task) for executor in self.left)


@dataclass(frozen=True, slots=True)
class Fit:
    """How the nodes of a cluster currently fit."""

    executors: Mapping[str, str]
    """Executor by node; without an entry: any executor."""
    left_slots: int
    """Number of slots that the nodes and other clusters' claims leave free."""


@dataclass(frozen=True, slots=True)
class SlotNeeds:
    """What the nodes of a cluster take from the common executors."""

    what: str
    """The cluster in words: `1 ps + 3 workers`."""
    nodes: tuple[PlacedNode, ...]
    """Nodes, except those with their own executor or beside the driver."""
    task: NodeShare = ONE_CORE
    """Share of a task without a profile; slots are counted in it."""
    placement: Placement | None = None
    num_fed: int = 0
    """Number of fed workers, whose tasks may return; 0: workers read their own data."""

    @property
    def shares_tasks(self) -> bool:
        """Whether a worker's task may return and leave whole GPUs that Spark then counts as free.

        Such workers get chosen executors, not any.
        """
        return self.num_fed > 0 and any(node.share.gpus >= 1 for node in self.nodes)

    @property
    def is_plain(self) -> bool:
        """Whether counting slots decides whether the nodes fit."""
        return self.placement is None and all(node.share == self.task for node in self.nodes)

    @property
    def num_slots(self) -> int:
        """Number of slots that the nodes take."""
        return sum(self.slots_by_node().values())

    def slots_by_node(self) -> dict[str, int]:
        """Return the slots that each node takes."""
        return {node.name: node.share.in_slots(self.task) for node in self.nodes}

    def host_note(self, hosts: Mapping[str, str], num_hosts: int) -> str:
        """Return what the placement did not achieve, one sentence per role; "" if nothing.

        Args:
            hosts: host by node.
            num_hosts: number of hosts with executors.
        """
        notes = []
        groups = Counter(node.group for node in self.nodes) if self.placement else {}
        for group, count in groups.items():
            used = len({hosts[node.name] for node in self.nodes if node.group == group})
            # One host cannot spread two nodes, and no more hosts than exist can be wanted.
            most = min(count, max(2, num_hosts))
            wanted = most if self.placement == "spread" else 1
            if used != wanted:
                notes.append(
                    f"placement={self.placement!r}: {count} nodes of {group} are on {used} "
                    f"host{'s' if used > 1 else ''}, {wanted} wanted; Spark has executors on "
                    f"{num_hosts} host{'s' if num_hosts > 1 else ''}"
                )
        return "; ".join(notes)

    def __str__(self) -> str:
        if self.is_plain:
            return f"{self.num_slots} task slots"
        shares = Counter(str(node.share) for node in self.nodes)
        return " + ".join(f"{count} x {share}" for share, count in shares.items())


def assign(
    nodes: Sequence[PlacedNode], executors: Sequence[Capacity], placement: Placement | None
) -> Assignment | None:
    """Return an executor for each node, or None if they do not fit together.

    The nodes that are hardest to place go first. If the wanted placement leaves no room for one,
    all go to the tightest executors that hold them: running without it beats not running.

    Args:
        nodes: with their shares.
        executors: what is free.
        placement: of the nodes of each group; None: even over executors.
    """
    found = _assign(nodes, executors, _PREFERENCES[placement])
    return found if found is not None else _assign(nodes, executors, _tightest)


@dataclass(slots=True)
class _Counts:
    """Numbers of nodes placed so far."""

    group_hosts: Counter[tuple[str, str]]
    hosts: Counter[str]
    executors: Counter[str]

    def add(self, node: PlacedNode, executor: Capacity) -> None:
        self.group_hosts[node.group, executor.host] += 1
        self.hosts[executor.host] += 1
        self.executors[executor.executor_id] += 1


_Preference = Callable[[PlacedNode, Capacity, _Counts], tuple[float, ...]]


def _assign(
    nodes: Sequence[PlacedNode], executors: Sequence[Capacity], preference: _Preference
) -> Assignment | None:
    left = {executor.executor_id: executor for executor in executors}
    counts = _Counts(Counter(), Counter(), Counter())
    chosen: dict[str, str] = {}
    hardest_first = sorted(nodes, key=lambda node: (-node.share.gpus, -node.share.cores))
    for node in hardest_first:
        fitting = [executor for executor in left.values() if executor.holds(node.share)]
        if not fitting:
            return None
        best = min(fitting, key=lambda executor: preference(node, executor, counts))
        counts.add(node, best)
        chosen[node.name] = best.executor_id
        left[best.executor_id] = best.without(node.share)
    return Assignment(chosen, tuple(left.values()))


def _needless_gpus(node: PlacedNode, executor: Capacity) -> float:
    return executor.free.gpus if not node.share.gpus else 0.0


def _spread(node: PlacedNode, executor: Capacity, counts: _Counts) -> tuple[float, ...]:
    return (
        counts.group_hosts[node.group, executor.host],
        counts.hosts[executor.host],
        counts.executors[executor.executor_id],
        _needless_gpus(node, executor),
        -executor.free.cores,
    )


def _pack(node: PlacedNode, executor: Capacity, counts: _Counts) -> tuple[float, ...]:
    return (
        -counts.group_hosts[node.group, executor.host],
        -counts.hosts[executor.host],
        *_tightest(node, executor, counts),
    )


def _even(node: PlacedNode, executor: Capacity, counts: _Counts) -> tuple[float, ...]:
    return (
        counts.executors[executor.executor_id],
        _needless_gpus(node, executor),
        -executor.free.cores,
    )


def _tightest(node: PlacedNode, executor: Capacity, _counts: _Counts) -> tuple[float, ...]:
    return (_needless_gpus(node, executor), executor.free.cores)


_PREFERENCES: Mapping[Placement | None, _Preference] = {
    "spread": _spread,
    "pack": _pack,
    None: _even,
}
