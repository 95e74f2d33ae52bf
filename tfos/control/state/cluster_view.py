"""View of a cluster: what the driver knows of it, and the questions that other code asks of that.

Covers: members by role and by what they do, the roster, failures so far, what was asked of workers.
Does not: change anything (control.state.cluster_orders and cluster_state do), lock
(control.coordinator). Pure.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field

from tfos.config import ClusterConfig
from tfos.control import messages
from tfos.control.curve import Curve, CurvePoint
from tfos.control.epoch_log import EpochLog
from tfos.control.members import Member, NodeStatus, mean_loss
from tfos.control.restarts.budget import RestartBudget
from tfos.failure import NodeFailure, cause_at
from tfos.phases import ClusterPhase
from tfos.topology import PS_ROLE, Plan

_NOT_BACK = (
    NodeStatus.RESTARTING,
    NodeStatus.MISSING,
    NodeStatus.REGISTERED,
    NodeStatus.READY,
)
"""Statuses of a server that others may wait for; one that has ended did so after the failure."""


@dataclass
class ClusterView:
    """All nodes of one cluster, to read."""

    plan: Plan
    config: ClusterConfig
    phase: ClusterPhase = ClusterPhase.NEW
    failures: list[NodeFailure] = field(default_factory=list)
    """Failures, losses and restarts of servers, in order of arrival: the first and the newest."""
    num_failures: int = 0
    """Failures so far, also those that are no longer kept."""
    fatal: list[NodeFailure] = field(default_factory=list)
    """Failures that failed the cluster; the first is the root cause."""
    tensorboard: messages.TensorBoardUp | None = None
    rooms_mib: Mapping[str, float] = field(default_factory=dict)
    """MiB that a node's executor container has for nodes, by node; 0: unknown, or no container."""
    task_attempts: int = 4
    """Attempts of a task that Spark makes before it fails the job (spark.task.maxFailures)."""
    waits_for: str = ""
    """What the driver waits for before it can start nodes; empty: nothing."""
    is_starting: bool = False
    """The node jobs are submitted."""
    is_ending: bool = False
    """The driver stops the nodes: one that registers now is refused."""
    is_interrupted: bool = False
    """Whether main_fun was awaited on a worker when the driver began to stop them."""
    members: dict[str, Member] = field(init=False)
    epochs: EpochLog = field(default_factory=EpochLog)
    """What the chief's fits have reported."""
    curve: Curve = field(default_factory=Curve)
    """The training over time."""
    saves_asked: int = 0
    """Orders SaveNow so far."""
    training_stop: str = ""
    """Why main_fun was asked to end its training; empty: it was not."""
    streams_stop: str = ""
    """Why the streams that train this cluster are to stop, as with `training_stop`; empty: they go
    on."""
    gone: list[Member] = field(default_factory=list)
    """Lost attempts of workers that were started again, with their last counts."""

    def __post_init__(self) -> None:
        limits = self.config.restarts
        self.members = {
            node.name: Member(
                node, restarts=RestartBudget(limits.ps if node.is_ps else limits.workers)
            )
            for node in self.plan.nodes
        }

    def copied(self) -> ClusterView:
        """Return a copy that stays as it is when the cluster goes on, to make reports of."""
        made = copy.copy(self)
        made.members = {name: each.copied() for name, each in self.members.items()}
        made.gone, made.fatal = self.gone.copy(), self.fatal.copy()
        made.failures = self.failures.copy()
        made.epochs, made.curve = self.epochs.copied(), self.curve.copied()
        return made

    @property
    def servers(self) -> list[Member]:
        """Parameter servers in rank order."""
        return [self.members[node.name] for node in self.plan.servers]

    @property
    def workers(self) -> list[Member]:
        """Workers in rank order, the chief first."""
        return [self.members[node.name] for node in self.plan.workers]

    @property
    def needs_all_workers(self) -> bool:
        """Whether TensorFlow ties the workers together: they end together or not at all."""
        return self.plan.is_mirrored or any(each.in_collective for each in self.workers)

    @property
    def tensorflow_servers(self) -> list[Member]:
        """Nodes that run TensorFlow's servers."""
        return [self.members[node.name] for node in self.plan.tensorflow_servers]

    @property
    def evaluators(self) -> list[Member]:
        """The evaluator, if the cluster has one."""
        return [self.members[node.name] for node in self.plan.evaluators]

    @property
    def is_running(self) -> bool:
        """Whether nodes are to train and to serve."""
        return self.phase is ClusterPhase.RUNNING and not self.is_ending

    def by_cause(self) -> tuple[list[NodeFailure], int]:
        """Return the failures, the cause of a failed cluster first, and how many came before it.

        Those are the last ones.
        """
        every = self.failures
        away = [each.node.name for each in self.servers if each.status in _NOT_BACK]
        ranks = [each.node.name for each in self.workers]
        place = 0
        if self.fatal:
            place = cause_at(every, every.index(self.fatal[0]), ranks=ranks, away=away)
        return [*every[place:], *every[:place]], place

    def roster(self) -> tuple[messages.RosterEntry, ...]:
        """Return every serving node, as its peers see it."""
        return tuple(
            messages.RosterEntry(
                member.node,
                member.planned.rank,
                member.host,
                member.endpoint,
                member.free_port,
            )
            for member in self.members.values()
            if member.endpoint is not None
        )

    def missing(self) -> list[Member]:
        """Return the nodes that the roster still lacks."""
        return [
            member
            for member in self.members.values()
            if member.status in (NodeStatus.MISSING, NodeStatus.REGISTERED)
        ]

    def training(self) -> list[Member]:
        """Return the workers whose main_fun has neither returned nor failed."""
        return [worker for worker in self.workers if worker.status is NodeStatus.RUNNING]

    @property
    def has_stepped(self) -> bool:
        """Whether a worker has made a training step, so that the parameters are in their place."""
        return any(each.progress.get("steps", 0.0) > 0 for each in self.workers)

    def restarting(self) -> list[Member]:
        """Return the workers of a running cluster that were lost and are started again."""
        if self.phase is not ClusterPhase.RUNNING:
            return []
        again = (NodeStatus.RESTARTING, NodeStatus.REGISTERED, NodeStatus.READY)
        return [worker for worker in self.workers if worker.status in again]

    def awaited(self) -> list[Member]:
        """Return the workers whose main_fun has not yet returned.

        No replacement of a worker is awaited once the others are done, except the chief's.
        """
        training, again = self.training(), self.restarting()
        return training + again if training or any(each.planned.is_chief for each in again) else []

    def reading(self, feed: str) -> list[Member]:
        """Return the workers that may read further rows of a feed, or will once they are back.

        Args:
            feed: its name.
        """
        return [each for each in self.training() if each.reads(feed)] + self.restarting()

    def is_terminated(self, feed: str) -> bool:
        """Return whether main_fun has ended a feed by terminate() on every worker that is left.

        Args:
            feed: its name.
        """
        left = [*self.training(), *(each for each in self.workers if each.done is not None)]
        return bool(left) and all(each.has_terminated(feed) for each in left)

    def evaluating(self) -> list[Member]:
        """Return the evaluator while its main_fun runs."""
        return [each for each in self.evaluators if each.status is NodeStatus.RUNNING]

    def unflushed(self, feed: str, epoch: int) -> list[Member]:
        """Return the workers that have yet to reach the end of an epoch of a feed.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        return [
            worker
            for worker in self.training()
            if feed not in worker.flushes or worker.flushes[feed].epoch < epoch
        ]

    def attempts(self) -> list[Member]:
        """Return every attempt of every worker once: the newest, then those before it.

        A lost one that is started again is the record of `gone`.
        """
        return [*{each.node: each for each in (*self.workers, *self.gone)}.values()]

    def point(self, now_s: float) -> CurvePoint:
        """Return how far the training is, with what lost attempts have trained.

        Args:
            now_s: monotonic seconds.
        """
        known = [each.progress for each in self.attempts()]
        steps, rows = (sum(each.get(name, 0.0) for each in known) for name in ("steps", "rows"))
        return CurvePoint(now_s, steps, rows, mean_loss(self.workers))

    def lost_tensorflow_ps(self) -> list[Member]:
        """Return TensorFlow's parameter servers that were lost."""
        return [
            each
            for each in self.tensorflow_servers
            if each.planned.role == PS_ROLE and each.status is NodeStatus.LOST
        ]

    def live(self) -> list[Member]:
        """Return the nodes whose supervisor runs."""
        return [member for member in self.members.values() if member.is_live]
