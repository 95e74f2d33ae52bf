"""State machine of a cluster: events from nodes in, actions of the driver out.

Covers: registration and fencing of attempts, the roster, failures and losses, silence, the end.
Does not: send, wait, lock or look at a clock (tfos.control.coordinator does), decide whether an end
is a loss or fatal (tfos.control.restarts). Pure.
Threads: none; the coordinator serialises the calls.

control.restarts.node_end decides what the end of a node means. A worker that is *lost* is fenced at
the servers. After a fatal end the cluster is FAILED, and every node receives the order to stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from tfos.config import ClusterConfig
from tfos.control import messages
from tfos.control.curve import Curve, CurvePoint
from tfos.control.epoch_log import EpochLog
from tfos.control.members import Member, NodeStatus, mean_loss
from tfos.control.messages import FeedEpoch
from tfos.control.permissions import admitted
from tfos.control.restarts.budget import WINDOW_S, RestartBudget
from tfos.control.restarts.joining import OpenEpochs
from tfos.control.restarts.node_end import (
    WITHOUT_PS,
    Meaning,
    Surroundings,
    explained,
    is_from_outside,
    meaning_of,
)
from tfos.control.restarts.server_orders import kept_for_servers
from tfos.failure import EXECUTOR_LOST, NODE_SILENT, NodeFailure, NodeId, is_crash
from tfos.phases import ClusterPhase, may_move
from tfos.topology import PS_ROLE, Plan, PlannedNode

_MAX_FAILURES = 100
_ATTEMPTS_PER_JOB = 100
"""Attempts of one node job: a restart begins a further hundred, Spark's retries count within it."""
_NOTICE_S = 60.0
"""Seconds in which main_fun notices that TensorFlow's parameter server is gone. Its coordinator
raises within a few; a step that hangs never does."""
_GONE = frozenset({NodeStatus.LOST, NodeStatus.RESTARTING})
_MOST_NAMED = 8
"""Workers that a warning names; of more it has the number."""


@dataclass(frozen=True, slots=True)
class Send:
    """Give this order to this attempt of a node."""

    node: NodeId
    order: messages.Order


@dataclass(frozen=True, slots=True)
class Warn:
    """Warn the user; the cluster goes on."""

    text: str


@dataclass(frozen=True, slots=True)
class Tell:
    """Inform the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Replace:
    """Start a new attempt of a lost node in a slot that Spark has."""

    node: PlannedNode
    first_attempt: int
    delay_s: float


Action = Send | Warn | Tell | Replace


@dataclass
class ClusterState:
    """All nodes of one cluster. Methods named `on_*` take an event and return actions."""

    plan: Plan
    config: ClusterConfig
    phase: ClusterPhase = ClusterPhase.NEW
    failures: list[NodeFailure] = field(default_factory=list)
    """Every failure and loss, in order of arrival."""
    fatal: list[NodeFailure] = field(default_factory=list)
    """Those that failed the cluster; the first is the root cause."""
    tensorboard: messages.TensorBoardUp | None = None
    rooms_mib: Mapping[str, float] = field(default_factory=dict)
    """By node, what its executor's container has for nodes; 0: unknown, or it has no container."""
    waits_for: str = ""
    """What the driver waits for before it can start nodes; empty: nothing."""
    is_starting: bool = False
    """The node jobs are submitted: a node may hold a slot before it registers."""
    is_ending: bool = False
    """The driver stops the nodes: one that registers now is refused."""
    members: dict[str, Member] = field(init=False)
    epochs: EpochLog = field(default_factory=EpochLog)
    """What the chief's fits have reported."""
    stop_asked: str = ""
    """Why the streams that train this cluster are to stop; empty: they go on."""
    curve: Curve = field(default_factory=Curve)
    """The training over time."""
    saves_asked: int = 0
    """Orders SaveNow so far."""
    training_stop: str = ""
    """Why main_fun was asked to end its training; empty: it was not."""
    gone: list[Member] = field(default_factory=list)
    """Lost attempts of workers that were started again, with their last counts."""
    open_epochs: OpenEpochs = field(default_factory=OpenEpochs)
    """For workers that join later."""
    _finished_feeds: tuple[str, ...] = ()
    _for_servers: list[messages.Order] = field(default_factory=list)
    """Orders about lost and finished workers, for servers that are started again."""
    _budgets: dict[str, RestartBudget] = field(default_factory=dict)
    """By name of a node that was started again."""
    _ps_missed_s: float | None = None
    """When TensorFlow's first lost parameter server was noticed, in monotonic seconds."""
    _told: set[str] = field(default_factory=set)
    """Warnings that are shown once, as for a whole rack of equal executors."""

    def __post_init__(self) -> None:
        self.members = {node.name: Member(node) for node in self.plan.nodes}

    def wait_for(self, what: str) -> list[Action]:
        """Note what the driver waits for, for those who ask; empty: nothing any more."""
        self.waits_for = what
        return []

    # ---- queries of the coordinator ----

    @property
    def servers(self) -> list[Member]:
        """Parameter servers in rank order."""
        return [self.members[node.name] for node in self.plan.servers]

    @property
    def workers(self) -> list[Member]:
        """Workers in rank order, the chief first."""
        return [self.members[node.name] for node in self.plan.workers]

    @property
    def tensorflow_servers(self) -> list[Member]:
        """Nodes that run TensorFlow's servers."""
        return [self.members[node.name] for node in self.plan.tensorflow_servers]

    @property
    def evaluators(self) -> list[Member]:
        """The evaluator, if the cluster has one."""
        return [self.members[node.name] for node in self.plan.evaluators]

    def roster(self) -> tuple[messages.RosterEntry, ...]:
        """Return every serving node, as its peers see it."""
        return tuple(
            messages.RosterEntry(
                member.node,
                member.planned.rank,
                member.host,
                member.executor_id,
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

    def restarting(self) -> list[Member]:
        """Return the workers of a running cluster that were lost and are started again."""
        if self.phase is not ClusterPhase.RUNNING:
            return []
        again = (NodeStatus.RESTARTING, NodeStatus.REGISTERED)
        return [worker for worker in self.workers if worker.status in again]

    def awaited(self) -> list[Member]:
        """Return the workers whose main_fun is still to return.

        Nobody waits for a replacement of a worker once the others are done, but for the chief's.
        """
        training, again = self.training(), self.restarting()
        return training + again if training or any(each.planned.is_chief for each in again) else []

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

    def crash_of(self, member: Member) -> NodeFailure | None:
        """Return how this attempt crashed; None: it lives, or ended in another way."""
        ends = (each for each in self.failures if each.node == member.node and is_crash(each))
        return next(ends, None)

    def live(self) -> list[Member]:
        """Return the nodes whose supervisor runs."""
        return [member for member in self.members.values() if member.is_live]

    # ---- orders ----

    def move(self, target: ClusterPhase) -> None:
        """Enter a phase if that is legal; a failed or closed cluster stays so."""
        if may_move(self.phase, target):
            self.phase = target

    def flush(
        self,
        feed: str,
        epoch: int,
        checked_by: FeedEpoch | None = None,
        rounds: int = 0,
        *,
        counts: bool = True,
    ) -> list[Action]:
        """End an epoch of a feed at every worker that still trains, after so many rounds.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
            checked_by: the feed and epoch that validate this one; None: none.
            rounds: rounds in which rows were fed.
            counts: whether a run that resumes this one leaves the epoch out.
        """
        order = messages.Flush(feed, epoch, checked_by, rounds, counts)
        self.open_epochs.note(order)
        return [Send(each.node, order) for each in self.training()]

    def feed_again(self, feed: str, epoch: int) -> list[Action]:
        """Tell the workers that lost rows of this epoch are fed again.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        order = messages.FeedAgain(feed, epoch)
        self.open_epochs.revoke(feed, epoch)  # who joins now may train them, and must not end it
        return [Send(each.node, order) for each in self.training()]

    def come_to(self, feed: str, epoch: int) -> list[Action]:
        """Note that the rows of this epoch of a feed are fed next: those before it are trained.

        Args:
            feed: name of the feed.
            epoch: number of the epoch, from 0.
        """
        self.open_epochs.come_to(feed, epoch)
        return []

    def finish(self, feeds: tuple[str, ...]) -> list[Action]:
        """End the feeds finally, also at workers whose main_fun has returned."""
        self._finished_feeds = feeds
        return [
            Send(worker.node, messages.FinishFeed(feed))
            for worker in self.workers
            if worker.is_live
            for feed in feeds
        ]

    def stop(self, members: list[Member], reason: str, *, grace_s: float) -> list[Action]:
        """Stop these nodes; their end is no failure any more.

        Args:
            members: the nodes.
            reason: for their logs.
            grace_s: seconds until they are killed.
        """
        actions: list[Action] = []
        for member in members:
            if member.is_live and not member.stop_ordered:
                member.stop_ordered = True
                actions.append(Send(member.node, messages.Stop(reason, grace_s)))
        return actions

    def end(self, members: list[Member], reason: str, *, grace_s: float) -> list[Action]:
        """Stop these nodes finally: no node may join any more.

        Args:
            members: the nodes.
            reason: for their logs.
            grace_s: seconds until they are killed.
        """
        self.is_ending = True
        return self.stop(members, reason, grace_s=grace_s)

    def fail(self, failure: NodeFailure, *, stop: bool = True) -> list[Action]:
        """Fail the cluster because of this record; without `stop` the caller ends it in order.

        Args:
            failure: the record; the first one is the headline.
            stop: stop all nodes at once.
        """
        self._note(failure)
        if len(self.fatal) < _MAX_FAILURES:
            self.fatal.append(failure)
        self.move(ClusterPhase.FAILED)
        if not stop:
            return []
        reason = f"{failure.node.name} failed"
        return self.stop(self.live(), reason, grace_s=self.config.abort_s / 4)

    def ask_stop(self, reason: str) -> list[Action]:
        """Ask the streams that train this cluster to stop; the first reason stays.

        Args:
            reason: for the user.
        """
        self.stop_asked = self.stop_asked or reason
        return []

    def save_now(self) -> list[Action]:
        """Order the chief to save; the answer is `epochs.saved`, under the number `saves_asked`."""
        self.saves_asked += 1
        return [Send(self.workers[0].node, messages.SaveNow(self.saves_asked))]

    def stop_training(self, reason: str) -> list[Action]:
        """Ask main_fun on every worker, and streams, to train no further; the first reason stays.

        Args:
            reason: for the nodes' logs.
        """
        if self.training_stop:
            return []
        self.training_stop = reason
        order = messages.StopTraining(reason)
        return [*self.ask_stop(reason), *(Send(each.node, order) for each in self.training())]

    def stop_evaluating(self, reason: str) -> list[Action]:
        """Ask the evaluator to evaluate what is saved, and nothing after it.

        Args:
            reason: for its log.
        """
        return [Send(each.node, messages.StopTraining(reason)) for each in self.evaluating()]

    # ---- events ----

    def on_register(
        self, register: messages.Register, now_s: float
    ) -> tuple[messages.RegisterReply, list[Action]]:
        """Handle a registration: an upsert by (role, index, attempt).

        Args:
            register: the node, its attempt, host and process.
            now_s: monotonic seconds.
        """
        member = self.members.get(register.node.name)
        if member is None:
            return self._refuse(f"this cluster has no {register.node.name}: {self.plan}")
        if register.node.attempt < member.attempt:
            return self._refuse(f"replaced by attempt {member.attempt}")
        if register.node.attempt == member.attempt:
            if register.pid == member.pid and register.host == member.host and member.is_live:
                return self._accept(), []
            return self._refuse(
                f"attempt {member.attempt} of {member.name} is pid {member.pid} on {member.host}"
            )
        if self.phase is ClusterPhase.RUNNING and not self.is_ending:
            return self._register_again(member, register, now_s)
        if self.phase is not ClusterPhase.RESERVED or self.is_ending:
            return self._refuse(f"the cluster is {self.phase.name} and ends")
        actions = []
        if member.attempt >= 0:
            actions.append(Send(member.node, messages.Stop("replaced by a newer attempt")))
        member.take(register, now_s)
        return self._accept(), [*actions, *self._skew(member, register.skew)]

    def _register_again(
        self, member: Member, register: messages.Register, now_s: float
    ) -> tuple[messages.RegisterReply, list[Action]]:
        """Handle a newer attempt of a node of a running cluster."""
        actions: list[Action] = []
        attempts = register.node.attempt, member.attempt
        of_one_job = len({attempt // _ATTEMPTS_PER_JOB for attempt in attempts}) == 1
        if member.is_live and of_one_job:
            actions = self._vanished(
                member, EXECUTOR_LOST, "Spark restarted its task: its executor was lost", now_s
            )
        if member.status is not NodeStatus.RESTARTING:
            reason = "the cluster runs already; a lost node does not rejoin"
            if member.is_live:
                reason = f"attempt {member.attempt} of {member.name} is at work"
            return self._refuse(reason)[0], actions
        member.take(register, now_s)
        # This attempt is here already, so no other one has to be started.
        actions = [action for action in actions if not isinstance(action, Replace)]
        return self._accept(), [*actions, *self._skew(member, register.skew)]

    def on_heartbeat(
        self, heartbeat: messages.Heartbeat, now_s: float
    ) -> tuple[messages.HeartbeatReply, list[Action]]:
        """Handle a heartbeat; the reply to a replaced or lost attempt says that it is fenced.

        Args:
            heartbeat: phase, progress and counters.
            now_s: monotonic seconds.
        """
        member = self._current(heartbeat.node)
        if member is None:
            return messages.HeartbeatReply(fenced=True), []
        member.heard_s = now_s
        member.take_heartbeat(heartbeat, now_s)
        return messages.HeartbeatReply(), []

    def on_event(self, node: NodeId, event: messages.Event, now_s: float) -> list[Action]:
        """Handle an event of a node; reports of fenced attempts are ignored.

        Args:
            node: who reports, with its attempt.
            event: what has happened.
            now_s: monotonic seconds.

        Raises:
            ControlRefused: this node may not report this event; see control.permissions.
        """
        member = self._current(node)
        if member is None:
            return []
        event = admitted(member.planned, node, event)
        member.heard_s = now_s
        match event:
            case messages.Listening():
                return self._listening(member, event)
            case (
                messages.PhaseChanged()
                | messages.ServesShard()
                | messages.InCollective()
                | messages.FlushReached()
                | messages.BatchReport()
            ):
                member.note(event, now_s)
                return self._collective(member, now_s)
            case (
                messages.FitReading()
                | messages.EpochTrained()
                | messages.BestSaved()
                | messages.SavedNow()
                | messages.Evaluated()
            ):
                self.epochs.note(event)
                return _told(member, event)
            case messages.TensorBoardUp():
                return self._tensorboard(event)
            case messages.Restarted():
                self._note(event.failure)
                return [Warn(f"{member.where}: {event}")]
            case messages.UpdatesLost(text):
                return [Warn(text)]
            case messages.Failed(failure, feeds):
                member.last_feeds = feeds
                return self._failed(member, failure, now_s)
            case messages.Done():
                member.done = event
                return [*self._done(member, now_s), *self._without_result(event.no_result, member)]

    def on_stream_opened(self, node: NodeId, now_s: float) -> str:
        """Handle a subscription to orders; return the reason of a refusal, or an empty string.

        Args:
            node: who subscribes, with its attempt.
            now_s: monotonic seconds.
        """
        member = self._current(node)
        if member is None:
            return f"{node.name} attempt {node.attempt} was replaced or fenced"
        member.heard_s = now_s
        member.stream_lost_s = None
        return ""

    def on_stream_closed(self, node: NodeId, now_s: float) -> list[Action]:
        """Handle a closed connection: after an order to stop it is the end; else it may return.

        Args:
            node: whose connection it was.
            now_s: monotonic seconds.
        """
        member = self._current(node)
        if member is not None:
            if member.stop_ordered:
                member.status = NodeStatus.ENDED
            member.stream_lost_s = now_s
        return []

    def on_tick(self, now_s: float) -> list[Action]:
        """Find silent nodes, and note how far the training is.

        Args:
            now_s: monotonic seconds.
        """
        if self.curve.is_due(now_s):
            known = [worker.progress for worker in self.workers]
            steps, rows = (sum(each.get(name, 0.0) for each in known) for name in ("steps", "rows"))
            self.curve.add(CurvePoint(now_s, steps, rows, mean_loss(self.workers)))
        actions: list[Action] = []
        for member in self.live():
            silent_s = now_s - member.heard_s
            lost_s = now_s - member.stream_lost_s if member.stream_lost_s is not None else 0.0
            if min(lost_s, silent_s) > self.config.reconnect_s:
                actions += self._vanished(
                    member,
                    NODE_SILENT,
                    f"its supervisor ended: connection closed {lost_s:.1f} s ago",
                    now_s,
                )
            elif silent_s > self.config.hang_s:
                actions += self._vanished(
                    member,
                    NODE_SILENT,
                    f"no heartbeat for {silent_s:.1f} s (limit {self.config.hang_s:.0f} s): "
                    "frozen or cut off from the driver",
                    now_s,
                )
        return [*actions, *self._without_slot(now_s), *self._without_tensorflow_ps(now_s)]

    # ---- decisions ----

    def _current(self, node: NodeId) -> Member | None:
        """Return the member if this is its newest attempt and it is not fenced."""
        member = self.members.get(node.name)
        if member is None or node.attempt != member.attempt or not member.is_live:
            return None
        return member

    def _skew(self, member: Member, skew: str) -> list[Action]:
        if not skew or skew in self._told:
            return []
        self._told.add(skew)
        where = f"executor {member.executor_id} on {member.host}"
        return [Warn(f"{where} has {skew}: results may differ from node to node")]

    def _without_result(self, reason: str, member: Member) -> list[Action]:
        """Warn once that results() will refuse: main_fun may return what only it understands."""
        if not reason or reason in self._told:
            return []
        self._told.add(reason)
        return [Warn(f"{member.name}: {reason}. The run goes on; cluster.results() will fail")]

    def _listening(self, member: Member, event: messages.Listening) -> list[Action]:
        if member.status is not NodeStatus.REGISTERED:
            return []
        member.endpoint, member.free_port = event.endpoint, event.free_port
        if self.phase is ClusterPhase.RUNNING and not self.is_ending:
            return self._joined(member)
        member.status = NodeStatus.READY
        if self.missing() or self.phase is not ClusterPhase.RESERVED or self.is_ending:
            return []
        self.move(ClusterPhase.RUNNING)
        for each in self.members.values():
            each.status = NodeStatus.RUNNING
        start = messages.Start(self.roster())
        return [Send(each.node, start) for each in self.members.values()]

    def _joined(self, member: Member) -> list[Action]:
        """Let a new attempt of a lost node work among the others."""
        member.status = NodeStatus.RUNNING
        if member.planned.is_ps:
            return self._server_joined(member)
        joining, missed = self.open_epochs.joining(self.epochs)
        for feed, first in joining.feeds:
            member.flushes[feed] = messages.FlushReached(feed, first - 1)
        orders: list[messages.Order] = [messages.Start(self.roster(), joining), *missed]
        orders += [messages.FinishFeed(feed) for feed in self._finished_feeds]
        if self.training_stop:
            orders.append(messages.StopTraining(self.training_stop))
        where = f"{member.where} joins as attempt {member.attempt}"
        if joining.fit is not None and joining.fit.epoch >= 0:
            where += f", in epoch {joining.fit.epoch + 1} of fit"
        back = messages.WorkerJoined(member.planned.rank)
        return [
            Tell(where),
            *self._to_servers(back),
            *(Send(member.node, order) for order in orders),
        ]

    def _server_joined(self, member: Member) -> list[Action]:
        """Tell the workers where their server is now, and it what it has missed of them."""
        roster = self.roster()
        moved = next(entry for entry in roster if entry.node == member.node)
        told = [each for each in self.workers if each.status is NodeStatus.RUNNING]
        return [
            Tell(f"{member.where} serves as attempt {member.attempt}"),
            Send(member.node, messages.Start(roster)),
            *(Send(member.node, order) for order in self._for_servers),
            *(Send(each.node, messages.ServerMoved(moved.rank, moved.endpoint)) for each in told),
        ]

    def _tensorboard(self, event: messages.TensorBoardUp) -> list[Action]:
        if event == self.tensorboard:
            return []  # a report that was sent twice
        self.tensorboard = event
        if not event.url:
            return [Warn(f"no TensorBoard: {event.reason}")]
        actions: list[Action] = [Tell(f"TensorBoard: {event.url}")]
        if not event.is_local:
            actions.append(
                Warn(
                    f"TensorBoard has no login: anyone who reaches {event.url} can read it. Pass "
                    "tensorboard_host='127.0.0.1' to reserve() to bind loopback on the chief's host"
                )
            )
        return actions

    def _done(self, member: Member, now_s: float) -> list[Action]:
        if not member.planned.runs_main_fun and not member.stop_ordered:
            failure = member.failure("", "the server ended without an order")
            return self._failed(member, failure, now_s)
        if member.status in (NodeStatus.REGISTERED, NodeStatus.READY) and not member.stop_ordered:
            return self._failed(
                member,
                member.failure(
                    "", "the worker ended before main_fun began; what it imports calls sys.exit?"
                ),
                now_s,
            )
        member.status = NodeStatus.DONE
        if not member.planned.runs_main_fun or member.planned.is_evaluator:
            return []
        return self._to_servers(messages.WorkerDone(member.planned.rank))

    def _failed(self, member: Member, failure: NodeFailure, now_s: float) -> list[Action]:
        if member.stop_ordered:
            member.status = NodeStatus.ENDED
            if failure.traceback and self.phase is ClusterPhase.FAILED:
                self._note(failure)  # it failed before the order to stop arrived
            return []
        return self._end_of(member, failure, now_s, outside=is_from_outside(failure))

    def _vanished(self, member: Member, error_type: str, text: str, now_s: float) -> list[Action]:
        if not member.is_live:
            return []
        if member.stop_ordered or member.status is NodeStatus.DONE:
            member.status = NodeStatus.ENDED
            return []
        return self._end_of(member, member.failure(error_type, text), now_s, outside=True)

    def _end_of(
        self, member: Member, failure: NodeFailure, now_s: float, *, outside: bool
    ) -> list[Action]:
        """Handle the end of a node without an order.

        Args:
            member: the node.
            failure: how it ended.
            now_s: monotonic seconds.
            outside: whether it was killed from outside.
        """
        around = self._around(member, now_s)
        match meaning_of(member, failure, around, outside=outside):
            case Meaning.SPARK_RESTARTS:
                member.status, member.endpoint = NodeStatus.MISSING, None
                return [Warn(f"{member.where} was lost while starting: {failure.message}")]
            case Meaning.EVALUATOR_LOST:
                return self._evaluator_lost(member, failure)
            case Meaning.COORDINATOR_DECIDES:
                return self._tensorflow_lost(member, failure, around.tensorflow_workers)
            case Meaning.STARTED_AGAIN:
                return self._replaced(member, failure, now_s)
            case Meaning.OTHERS_GO_ON:
                return self._worker_lost(member, failure)
            case Meaning.FATAL:
                member.status = NodeStatus.FAILED
                lost_ps = [each.name for each in self._lost_tensorflow_ps()]
                return self.fail(explained(member, failure, around, lost_ps))

    def _collective(self, member: Member, now_s: float) -> list[Action]:
        """Fail a cluster whose workers wait for one that was lost before they could say so."""
        gone = [*self.gone, *(each for each in self.workers if each.status in _GONE)]
        is_running = self.phase is ClusterPhase.RUNNING and not self.is_ending
        if not member.in_collective or not gone or not is_running:
            return []
        known = [each for each in self.failures if each.node == gone[0].node]
        failure = (known or [gone[0].failure("", f"{gone[0].name} was lost")])[0]
        self.failures = [each for each in self.failures if each is not failure]  # it comes again
        return self.fail(explained(gone[0], failure, self._around(member, now_s), ()))

    def _around(self, member: Member, now_s: float) -> Surroundings:
        """Return the cluster as a node that ends leaves it behind."""
        beside = [each for each in self.tensorflow_servers if each.is_live and each is not member]
        return Surroundings(
            self.phase,
            self.is_ending,
            self.plan,
            self.config,
            num_training=sum(each is not member for each in self.training()),
            tensorflow_workers=[each.name for each in beside if each.planned.role != PS_ROLE],
            has_restart=self._budget_of(member).has_left(now_s),
            needs_all_workers=self.plan.is_mirrored or any(w.in_collective for w in self.workers),
        )

    def not_restarted(self, name: str, reason: str, now_s: float) -> list[Action]:
        """Handle the end of a job that was to start a node again, before the node served.

        Args:
            name: of the node.
            reason: what Spark says.
            now_s: monotonic seconds.
        """
        member = self.members[name]
        return self._end_of(member, member.failure("", reason), now_s, outside=True)

    def _budget_of(self, member: Member) -> RestartBudget:
        limits = self.config.restarts
        limit = limits.ps if member.planned.is_ps else limits.workers
        return self._budgets.setdefault(member.name, RestartBudget(limit))

    def _replaced(self, member: Member, failure: NodeFailure, now_s: float) -> list[Action]:
        """Start a lost node again, by one of the restarts that are left."""
        budget = self._budget_of(member)
        delay_s = budget.take(member.registered_s, now_s) or 0.0  # not None: has_left has said so
        self._note(failure)
        if not member.planned.is_ps:
            self.gone.append(member.as_lost())
        member.status, member.endpoint, member.lost_s = NodeStatus.RESTARTING, None, now_s
        member.first_attempt += _ATTEMPTS_PER_JOB
        text = (
            f"{member.where} was lost: {failure.message}; it is started again "
            f"({budget.num_recent} of {budget.limit} times within {WINDOW_S / 60:.0f} minutes)"
        )
        fences = [] if member.planned.is_ps else self._fence(member, failure)
        return [*fences, Warn(text), Replace(member.planned, member.first_attempt, delay_s)]

    def _worker_lost(self, member: Member, failure: NodeFailure) -> list[Action]:
        """Let the other workers go on without a lost one."""
        member.status = NodeStatus.LOST
        self._note(failure)
        left = self.training()
        remaining = ", ".join(worker.name for worker in left)
        if len(left) > _MOST_NAMED:
            remaining = f"{len(left)} workers"
        text = f"{member.where} was lost: {failure.message}; {remaining} go on"
        return [*self._fence(member, failure), Warn(text)]

    def _without_slot(self, now_s: float) -> list[Action]:
        """Give up the nodes for whose new attempts Spark has had no slot for too long."""
        limit_s = self.config.reservation_timeout_s
        actions: list[Action] = []
        for member in self.members.values():
            if member.status is NodeStatus.RESTARTING and now_s - member.lost_s > limit_s:
                text = f"Spark had no slot for a new attempt of {member.name} in {limit_s:.0f} s"
                self._budgets[member.name].limit = 0
                failure = member.failure(EXECUTOR_LOST, text)
                actions += self._end_of(member, failure, now_s, outside=True)
        return actions

    def _evaluator_lost(self, member: Member, failure: NodeFailure) -> list[Action]:
        """Let the training go on; the record stays among the failures."""
        member.status = NodeStatus.LOST
        self._note(failure)
        reason = failure.message
        if failure.error_type and failure.traceback:
            reason = f"{failure.error_type}: {reason}"
        text = f"{member.where} was lost: {reason}; the training goes on without it"
        return [Warn(text)]

    def _tensorflow_lost(
        self, member: Member, failure: NodeFailure, workers: Sequence[str]
    ) -> list[Action]:
        """Leave the end of one of TensorFlow's servers to the coordinator in main_fun."""
        member.status = NodeStatus.LOST
        self._note(failure)
        then = "the chief's strategy cannot go on without it"
        if member.planned.role != PS_ROLE:
            then = f"the chief's coordinator gives its work to {', '.join(workers)}"
        return [Warn(f"{member.where} was lost: {failure.message}; {then}")]

    def _lost_tensorflow_ps(self) -> list[Member]:
        return [
            each
            for each in self.tensorflow_servers
            if each.planned.role == PS_ROLE and each.status is NodeStatus.LOST
        ]

    def _without_tensorflow_ps(self, now_s: float) -> list[Action]:
        """Fail a cluster whose main_fun does not notice that a parameter server is gone."""
        lost = self._lost_tensorflow_ps()
        if not lost or not self.training() or self.phase is not ClusterPhase.RUNNING:
            return []
        if self._ps_missed_s is None:
            self._ps_missed_s = now_s
        if now_s - self._ps_missed_s < _NOTICE_S:
            return []
        known = [each for each in self.failures if each.node == lost[0].node]
        failure = (known or [lost[0].failure("", f"{lost[0].name} was lost")])[0]
        text = f"{failure.message}; main_fun did not notice it for {_NOTICE_S:.0f} s. {WITHOUT_PS}"
        return self.fail(msgspec.structs.replace(failure, message=text))

    def _fence(self, member: Member, failure: NodeFailure) -> list[Action]:
        """Order the servers to fence a worker; they would wait for it or accept its late pushes."""
        rank, attempt = member.planned.rank, member.node.attempt
        return self._to_servers(messages.FenceWorker(rank, attempt, failure.message))

    def _to_servers(self, order: messages.Order) -> list[Action]:
        self._for_servers = kept_for_servers(self._for_servers, order)
        return [Send(server.node, order) for server in self.servers if server.is_live]

    def _note(self, failure: NodeFailure) -> None:
        if len(self.failures) < _MAX_FAILURES:
            self.failures.append(failure)

    def _accept(self) -> messages.RegisterReply:
        config = self.config
        return messages.RegisterReply(
            accepted=True,
            heartbeat_s=config.heartbeat_s,
            lease_s=config.lease_s,
            hang_s=config.hang_s,
        )

    def _refuse(self, reason: str) -> tuple[messages.RegisterReply, list[Action]]:
        return messages.RegisterReply(accepted=False, reason=reason), []


def _told(member: Member, event: messages.Event) -> list[Action]:
    """Show what the progress line does not have."""
    return [Tell(f"{member.name}: {event}")] if isinstance(event, messages.Evaluated) else []
