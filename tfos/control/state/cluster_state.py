"""State machine of a cluster: events from nodes in, actions of the driver out.

Covers: registration and fencing of attempts, the roster, failures and losses, silence.
Does not: send, wait, lock or look at a clock (tfos.control.coordinator does), decide whether an end
is a loss or fatal (tfos.control.restarts), give the driver's orders (control.state.cluster_orders).
Pure.
Threads: none; the coordinator serialises the calls.

control.restarts.node_end decides what the end of a node means. A worker that is *lost* is fenced at
the servers. After a fatal end the cluster is FAILED, and every node receives the order to stop.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tfos.control import messages
from tfos.control.members import GONE, Member, NodeStatus
from tfos.control.permissions import admitted
from tfos.control.restarts.driver_pause import DriverPause
from tfos.control.restarts.node_end import (
    WITHOUT_PS,
    Meaning,
    Surroundings,
    explained,
    is_from_outside,
    meaning_of,
)
from tfos.control.restarts.silence import silence_of
from tfos.control.state import notices, tied_workers
from tfos.control.state.actions import Action, Replace, Send, Tell, Warn
from tfos.control.state.cluster_orders import ClusterOrders
from tfos.control.state.job_end import JobEnd, blame_of
from tfos.failure import EXECUTOR_LOST, NODE_JOB_FAILED, NODE_SILENT, NodeFailure, NodeId
from tfos.phases import ClusterPhase
from tfos.topology import PS_ROLE

_ATTEMPTS_PER_JOB = 100
"""Attempts of one node job: a restart begins a further hundred, Spark's retries count within it."""
_NOTICE_S = 60.0
"""Seconds in which main_fun notices that TensorFlow's parameter server is gone. Its coordinator
raises within a few; a step that hangs never does."""
_STAND_STILL = "workers stand still"


@dataclass
class ClusterState(ClusterOrders):
    """All nodes of one cluster. Methods named `on_*` take an event and return actions."""

    _for_servers: list[messages.AboutWorker] = field(default_factory=list)
    """Orders about lost and finished workers, for servers that are started again."""
    _told: set[str] = field(default_factory=set)
    """Warnings that are shown once, as for a whole rack of equal executors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pause = DriverPause(self.config)

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
            self._heard_again(register.node)
            if register.pid == member.pid and register.host == member.host and member.is_live:
                return self._accept(), []
            return self._refuse(
                f"attempt {member.attempt} of {member.name} is pid {member.pid} on {member.host}"
            )
        if self.is_running:
            return self._register_again(member, register, now_s)
        if self.phase is not ClusterPhase.RESERVED or self.is_ending:
            return self._refuse(f"the cluster is {self.phase.name} and ends")
        actions = []
        if member.attempt >= 0:
            actions.append(Send(member.node, messages.Stop("replaced by a newer attempt")))
        member.take(register, now_s)
        return self._accept(), [*actions, *self._skew(member, register)]

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
        if of_one_job and 0 < self.task_attempts - 1 <= attempts[0] % _ATTEMPTS_PER_JOB:
            reason = (
                f"one more loss of {member.name} would end the job of all its nodes "
                f"(spark.task.maxFailures={self.task_attempts}): a job of its own starts it"
            )
            return self._refuse(reason)[0], actions
        member.take(register, now_s)
        # This attempt is here already, so no other one has to be started.
        actions = [action for action in actions if not isinstance(action, Replace)]
        return self._accept(), [*actions, *self._skew(member, register)]

    def on_heartbeat(
        self, heartbeat: messages.Heartbeat, now_s: float
    ) -> tuple[messages.HeartbeatReply, list[Action]]:
        """Handle a heartbeat; the reply to a replaced or lost attempt says that it is fenced.

        Args:
            heartbeat: phase, progress and counters.
            now_s: monotonic seconds.
        """
        self._heard_again(heartbeat.node)
        member = self._current(heartbeat.node)
        if member is None:
            return messages.HeartbeatReply(fenced=True), []
        member.heard_s = now_s
        member.take_heartbeat(heartbeat, now_s)
        return messages.HeartbeatReply(), self._begun()

    def on_report(self, report: messages.EventReport, now_s: float) -> list[Action]:
        """Handle a report; one that comes again, because its ack was lost, has no effect.

        Args:
            report: an event with its sender and its number.
            now_s: monotonic seconds.

        Raises:
            ControlRefused: see `on_event`.
        """
        self._heard_again(report.node)
        member = self._current(report.node)
        if member is None:
            return []
        if report.seq <= member.last_report:
            member.heard_s = now_s
            return []
        actions = self.on_event(report.node, report.event, now_s)
        member.last_report = report.seq  # one that raised is not handled, and comes again
        return actions

    def on_event(self, node: NodeId, event: messages.Event, now_s: float) -> list[Action]:
        """Handle an event of a node; reports of fenced attempts are ignored.

        Args:
            node: the node that reports, with its attempt.
            event: what has happened.
            now_s: monotonic seconds.

        Raises:
            ControlRefused: this node may not report this event; see control.permissions.
        """
        self._heard_again(node)
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
                | messages.StrategyBuilt()
                | messages.FlushReached()
                | messages.BatchReport()
            ):
                member.note(event, now_s)
                return self._collective(member, event, now_s)
            case (
                messages.FitReading()
                | messages.EpochTrained()
                | messages.BestSaved()
                | messages.SavedNow()
                | messages.Evaluated()
            ):
                self.epochs.note(event)
                return _shown(member, event)
            case messages.TensorBoardUp():
                self.tensorboard = event
                return notices.tensorboard(event)
            case messages.Restarted():
                self._note(event.failure)
                return [Warn(f"{member.where}: {event}")]
            case messages.UpdatesLost() | messages.CutShort() | messages.NotSaved():
                return [notices.work_lost(member, event)]
            case messages.Failed(failure, feeds):
                member.last_feeds = feeds
                return self._failed(member, failure, now_s)
            case messages.Done():
                member.done, member.moved_s = event, now_s
                warning = notices.no_result(member, event.no_result)
                return [*self._done(member, now_s), *self._once(event.no_result, warning)]

    def on_stream_opened(self, node: NodeId, number: int, now_s: float) -> str:
        """Handle a subscription to orders; return the reason of a refusal, or an empty string.

        Args:
            node: the node that subscribes, with its attempt.
            number: its stream's number; an older stream may be reported after a newer one.
            now_s: monotonic seconds.
        """
        self._heard_again(node)
        member = self._current(node)
        if member is None:
            return f"{node.name} attempt {node.attempt} was replaced or fenced"
        member.heard_s = now_s
        if number > member.stream:
            member.stream, member.stream_lost_s = number, None
        return ""

    def on_stream_closed(self, node: NodeId, number: int, now_s: float) -> list[Action]:
        """Handle a closed connection: after an order to stop it is the end; else it may return.

        Args:
            node: the node whose connection it was.
            number: the stream's number; a newer one may be open.
            now_s: monotonic seconds.
        """
        member = self._current(node)
        if member is not None and number == member.stream:
            if member.stop_ordered:
                member.status = NodeStatus.ENDED
            member.stream_lost_s = now_s
        return []

    def on_not_restarted(self, name: str, reason: str, now_s: float) -> list[Action]:
        """Handle the end of a job that was to start a node again, before the node served.

        Args:
            name: the node's name.
            reason: what Spark says.
            now_s: monotonic seconds.
        """
        member = self.members[name]
        return self._end_of(member, member.failure("", reason), now_s, outside=True)

    def on_job_ended(self, end: JobEnd, now_s: float) -> list[Action]:
        """Handle the end of a Spark job that starts nodes.

        Args:
            end: how it ended.
            now_s: monotonic seconds.
        """
        blame = blame_of(end, self)
        if blame is None:
            return []
        if blame.may_restart:
            return self.on_not_restarted(blame.member.name, blame.reason, now_s)
        failure = blame.member.failure(NODE_JOB_FAILED, blame.reason)
        failure = self._pause.explained(failure, now_s)
        ends_in_order = end.is_cancelled and self.phase is ClusterPhase.RUNNING
        return self.fail(failure, stop=not ends_in_order)

    def on_tick(self, now_s: float) -> list[Action]:
        """Find silent nodes, and note how far the training is; every `driver_pause.tick_s`.

        Args:
            now_s: monotonic seconds.
        """
        self._pause.on_tick(self.members.values(), now_s)
        if self.curve.is_due(now_s):
            self.curve.add(self.point(now_s))
        actions: list[Action] = []
        for member in self.live():
            if reason := silence_of(member, self.config, now_s):
                actions += self._vanished(member, NODE_SILENT, reason, now_s)
        actions += [*self._without_slot(now_s), *self._without_tensorflow_ps(now_s)]
        still = tied_workers.stand_still(self, now_s) if self.is_running else ""
        return [*actions, *self._once(still and _STAND_STILL, Warn(still))]

    # ---- decisions ----

    def _current(self, node: NodeId) -> Member | None:
        """Return the member if this is its newest attempt and it is not fenced."""
        member = self.members.get(node.name)
        if member is None or node.attempt != member.attempt or not member.is_live:
            return None
        return member

    def _heard_again(self, node: NodeId) -> None:
        """Take back a node that was missing because nothing was heard of it while it started.

        Spark repeats no task of a supervisor that lives, so no other attempt would come.
        """
        member = self.members.get(node.name)
        if member is None or member.attempt != node.attempt or not member.is_unheard:
            return
        if self.phase is ClusterPhase.RESERVED and not self.is_ending:
            member.is_unheard = False
            member.status = NodeStatus.READY if member.endpoint else NodeStatus.REGISTERED

    def _skew(self, member: Member, register: messages.Register) -> list[Action]:
        return self._once(register.skew, notices.skewed(member, register.skew))

    def _once(self, reason: str, warning: Warn) -> list[Action]:
        """Warn unless there is no reason, or the same warning was shown before."""
        if not reason or reason in self._told:
            return []
        self._told.add(reason)
        return [warning]

    def _listening(self, member: Member, event: messages.Listening) -> list[Action]:
        if member.status is NodeStatus.RUNNING and member.planned.is_ps:
            member.endpoint = event.endpoint
            return self._moved(member)
        if member.status is not NodeStatus.REGISTERED:
            return []
        member.endpoint, member.free_port = event.endpoint, event.free_port
        if self.is_running:
            return self._joined(member)
        member.status = NodeStatus.READY
        return self._begun()

    def _begun(self) -> list[Action]:
        """Start a cluster whose last node has come."""
        if self.phase is not ClusterPhase.RESERVED or self.missing() or self.is_ending:
            return []
        self.move(ClusterPhase.RUNNING)
        for each in self.members.values():
            each.status = NodeStatus.RUNNING
        start = messages.Start(self.roster())
        return [Send(each.node, start) for each in self.members.values()]

    def _joined(self, member: Member) -> list[Action]:
        """Let a new attempt of a lost node work among the others."""
        if member.planned.is_ps:
            member.status = NodeStatus.RUNNING
            actions = self._server_joined(member)
            for worker in self.workers:
                if worker.status is NodeStatus.READY:
                    actions += self._joined(worker)
            return actions
        if any(server.endpoint is None for server in self.servers):  # lost with it, as with a host
            member.status = NodeStatus.READY
            return []
        member.status = NodeStatus.RUNNING
        joining, missed = self.missed_by_worker(member)
        for feed, first in joining.feeds:
            member.flushes[feed] = messages.FlushReached(feed, first - 1)
        return [
            notices.joins(member, joining),
            Send(member.node, messages.Start(self.roster(), joining)),
            *(Send(member.node, order) for order in missed),
        ]

    def _server_joined(self, member: Member) -> list[Action]:
        """Tell the workers where their server is now, and the server what it has missed."""
        return [
            notices.serves(member),
            Send(member.node, messages.Start(self.roster())),
            *(Send(member.node, order) for order in self._for_servers),
            *self._moved(member),
        ]

    def _moved(self, member: Member) -> list[Action]:
        """Tell the workers of a server that was started again, where it was or elsewhere."""
        roster = self.roster()
        moved = next(entry for entry in roster if entry.node == member.node)
        order = messages.ServerMoved(moved.rank, moved.endpoint)
        told = (each for each in self.workers if each.status is NodeStatus.RUNNING)
        return [Send(each.node, order) for each in told]

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
        done = self._to_servers(messages.WorkerDone(member.planned.rank))
        return [*done, *self._without_absent()]

    def _failed(self, member: Member, failure: NodeFailure, now_s: float) -> list[Action]:
        if member.stop_ordered:
            member.status = NodeStatus.ENDED
            if failure.traceback and self.phase is ClusterPhase.FAILED:
                self._note_end(failure)  # it failed before the order to stop arrived
            return []
        return self._end_of(member, failure, now_s, outside=is_from_outside(failure))

    def _vanished(self, member: Member, error_type: str, text: str, now_s: float) -> list[Action]:
        if not member.is_live:
            return []
        if member.stop_ordered:
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
        if outside:
            failure = self._pause.explained(failure, now_s)
        if member.status is NodeStatus.DONE:  # its value and its last counts are here
            self._lose(member, failure, now_s)
            return [notices.lost_after_return(member, failure)]
        match meaning_of(member, failure, around, outside=outside):
            case Meaning.SPARK_RESTARTS:
                member.status = NodeStatus.MISSING
                member.is_unheard = failure.error_type == NODE_SILENT
                return [notices.lost_while_starting(member, failure)]
            case Meaning.EVALUATOR_LOST:
                self._lose(member, failure, now_s)
                return [notices.evaluator_lost(member, failure)]
            case Meaning.COORDINATOR_DECIDES:
                self._lose(member, failure, now_s)
                names = around.tensorflow_workers
                return [notices.coordinator_decides(member, failure, names)]
            case Meaning.STARTED_AGAIN:
                return self._replaced(member, failure, now_s)
            case Meaning.OTHERS_GO_ON:
                self._lose(member, failure, now_s)
                fences = self._fence(member, failure)
                warning = notices.others_go_on(member, failure, self.training())
                return [*fences, warning, *notices.own_rows_lost(member)]
            case Meaning.FATAL:
                member.status = NodeStatus.FAILED
                lost_ps = [each.name for each in self.lost_tensorflow_ps()]
                failure = explained(member, failure, around, lost_ps)
                return self.fail(tied_workers.explained(failure, member, self))

    def _collective(self, member: Member, event: messages.Event, now_s: float) -> list[Action]:
        """Fail a cluster of which a worker begins to wait for one that will not come."""
        if not isinstance(event, messages.InCollective):
            return []
        return self._without_absent() or self._without_lost(member, now_s)

    def _without_absent(self) -> list[Action]:
        """Fail a cluster whose workers wait for one that has returned without them."""
        absent = tied_workers.never_joins(self) if self.is_running else None
        return self.fail(absent) if absent is not None else []

    def _without_lost(self, member: Member, now_s: float) -> list[Action]:
        """Fail a cluster of which this worker begins to wait for all, if one of them was lost."""
        # A worker that was lost after its main_fun returned is not waited for.
        lost = [each for each in self.workers if each.status in GONE and each.done is None]
        gone = [*self.gone, *lost]
        if not gone or not self.is_running:
            return []
        failure = gone[0].loss
        self.failures = [each for each in self.failures if each is not failure]  # it comes again
        self.num_failures -= 1
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
            has_restart=member.restarts.has_left(now_s),
            needs_all_workers=self.needs_all_workers,
            lacks_strategy=any(not each.has_strategy for each in self.training()),
        )

    def _replaced(self, member: Member, failure: NodeFailure, now_s: float) -> list[Action]:
        """Start a lost node again, by one of the restarts that are left."""
        # An attempt that has not registered was asked for when the one before it was lost.
        is_asked_for = member.status is NodeStatus.RESTARTING
        began_s = member.lost_s if is_asked_for else member.registered_s
        delay_s = member.restarts.take(began_s, now_s) or 0.0  # has_left has said so
        self._note_end(failure)
        if not member.planned.is_ps:
            self.gone.append(member.as_lost(is_first=not self.gone))
        member.status, member.endpoint, member.lost_s = NodeStatus.RESTARTING, None, now_s
        member.first_attempt += _ATTEMPTS_PER_JOB
        fences = [] if member.planned.is_ps else self._fence(member, failure)
        again = Replace(member.planned, member.first_attempt, delay_s)
        return [*fences, notices.started_again(member, failure), again]

    def _lose(self, member: Member, failure: NodeFailure, now_s: float) -> None:
        """Go on without a node; the record stays among the failures.

        Args:
            member: the node.
            failure: how it ended.
            now_s: monotonic seconds.
        """
        member.status, member.lost_s = NodeStatus.LOST, now_s
        self._note_end(failure)

    def _without_slot(self, now_s: float) -> list[Action]:
        """Give up the nodes for whose new attempts Spark has had no slot for too long."""
        limit_s = self.config.reservation_timeout_s
        actions: list[Action] = []
        for member in self.members.values():
            if member.status is NodeStatus.RESTARTING and now_s - member.lost_s > limit_s:
                text = (
                    f"Spark had no slot for a new attempt of {member.name} in {limit_s:.0f} s: "
                    "tasks of jobs that were submitted before come first, also those of other "
                    "threads. Have one more slot than nodes, or "
                    "raise ClusterConfig(reservation_timeout_s=...)"
                )
                member.restarts.limit = 0
                failure = member.failure(EXECUTOR_LOST, text)
                actions += self._end_of(member, failure, now_s, outside=True)
        return actions

    def _without_tensorflow_ps(self, now_s: float) -> list[Action]:
        """Fail a cluster whose main_fun does not notice that a parameter server is gone."""
        lost = self.lost_tensorflow_ps()
        if not lost or not self.training() or self.phase is not ClusterPhase.RUNNING:
            return []
        if now_s - min(each.lost_s for each in lost) < _NOTICE_S:
            return []
        failure = lost[0].loss
        text = f"{failure.message}; main_fun did not notice it for {_NOTICE_S:.0f} s. {WITHOUT_PS}"
        return self.fail(msgspec.structs.replace(failure, message=text))

    def _fence(self, member: Member, failure: NodeFailure) -> list[Action]:
        """Order the servers to fence a worker; they would wait for it or accept its late pushes."""
        rank, attempt = member.planned.rank, member.node.attempt
        return self._to_servers(messages.FenceWorker(rank, attempt, failure.message))

    def _to_servers(self, order: messages.AboutWorker) -> list[Action]:
        self._for_servers.append(order)
        return [Send(server.node, order) for server in self.servers if server.is_live]

    def _accept(self) -> messages.RegisterReply:
        config = self.config
        return messages.RegisterReply(
            accepted=True,
            heartbeat_s=config.heartbeat_s,
            lease_s=config.lease_s,
            hang_s=config.hang_s,
            has_begun=self.is_running,
        )

    def _refuse(self, reason: str) -> tuple[messages.RegisterReply, list[Action]]:
        return messages.RegisterReply(accepted=False, reason=reason), []


def _shown(member: Member, event: messages.Event) -> list[Action]:
    """Show what the progress line does not have."""
    return [Tell(f"{member.name}: {event}")] if isinstance(event, messages.Evaluated) else []
