"""Coordinator: the driver's shell around ClusterState; serialises events, executes actions.

Covers: the lock, the clock, liveness, waiting with deadlines, showing nodes' output.
Does not: decide (tfos.control.state), move bytes (tfos.control.server), run Spark jobs
(tfos.spark.jobs).
Runs in: the driver.
Threads: every method from any thread; `_lock` guards the state, `_changed` wakes waiting threads.
The user's thread only reads: `with` of a plain lock is safe from Ctrl-C, of a Condition it is not
(Python code enters it). One thread checks for silent nodes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from rpc.auth.certificates import TlsCredentials
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.console.line_rate import LineRate
from tfos.console.log_tail import LogTail
from tfos.control import messages
from tfos.control.members import NodeStatus
from tfos.control.restarts.driver_pause import tick_s
from tfos.control.server import ControlServer
from tfos.control.state.actions import Action, Replace, Send, Warn
from tfos.control.state.cluster_state import ClusterState
from tfos.control.state.cluster_view import ClusterView
from tfos.errors import ControlError, ControlRefused, NodeFailedError
from tfos.failure import NodeFailure, NodeId
from tfos.phases import ClusterPhase
from tfos.topology import Plan

Value = TypeVar("Value")

READ_S = 10.0
"""A reader of a node's log reads it again within this time."""
FIRST_LINES_S = 3.0
"""Seconds until lines of an unread node arrive: usually its next heartbeat asks for them."""
FOLLOWED_S = 5.0
"""A reader who follows a log, or has the page open, looks again within this time."""
LAST_LOOK_S = 3.0
"""How long the end waits for that look, and for one at the page: more than the time between two."""
_MOST_BLIND_TICKS = 2
"""Errors in a row in the search for silent nodes: the second is no accident."""
_LINES_PER_S = 400.0
_BURST_LINES = 2000
"""Per node, twice what its supervisor sends (node.supervisor.log_buffer): a node that does not keep
its own limit cannot flood the user's terminal."""


class Coordinator:
    """One cluster's control plane in the driver.

    Args:
        plan: the nodes.
        config: timeouts, and what is shown.
        console: where warnings and output go.
        rooms_mib, task_attempts: see ClusterState.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        plan: Plan,
        config: ClusterConfig,
        console: Console,
        *,
        rooms_mib: Mapping[str, float] | None = None,
        task_attempts: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = ClusterState(
            plan, config, rooms_mib=rooms_mib or {}, task_attempts=task_attempts
        )
        self._config = config
        self._console = console
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._server: ControlServer | None = None
        self._line_rates = {
            name: LineRate(_LINES_PER_S, _BURST_LINES, clock) for name in self._state.members
        }
        self._read_until_s: dict[str, float] = {}
        self._followed_s: dict[str, float] = {}
        """When a follower of a log looked last, by node."""
        self._log_tails = {name: LogTail() for name in self._state.members}
        self._answer: Callable[[messages.Ask], bytes] | None = None
        self._closing = threading.Event()
        self._at_close: list[Callable[[], None]] = []
        self._explain: Callable[[NodeFailure, bool], NodeFailure] = _as_it_is
        self._replace: Callable[[Replace], None] = _not_replaced
        self._not_begun: list[tuple[float, Replace, str]] = []
        """Attempts that could not be started: from when on that counts as their end, and why."""
        self._liveness: threading.Thread | None = None

    def start(self, host: str, credentials: TlsCredentials, ports: Sequence[int] = (0,)) -> int:
        """Listen on the first port that is free and return it.

        Args:
            host: address to listen at.
            credentials: the driver's certificate and the cluster's authority.
            ports: ports to try, in this order; 0 is one of the system's choice.

        Raises:
            ControlError: none of them can be bound.
        """
        server = ControlServer(self, credentials, num_nodes=len(self._state.plan.nodes))
        try:
            port = server.start(host, ports)
        except ControlError:
            server.close()
            raise
        with self._lock:
            self._server = server
            self._state.move(ClusterPhase.RESERVED)
        self._liveness = threading.Thread(
            target=self._watch_liveness, name="tfos-liveness", daemon=True
        )
        self._liveness.start()
        return port

    def close(self, phase: ClusterPhase = ClusterPhase.CLOSED) -> None:
        """Stop listening. Idempotent."""
        self._closing.set()
        with self._lock:
            server, self._server = self._server, None
            self._state.move(phase)
            self._changed.notify_all()
            closers, self._at_close = self._at_close, []
        for close in closers:
            try:
                close()
            except Exception as error:  # noqa: BLE001 - the others, and the server, close as well
                self._console.warn(
                    f"a part of the control plane did not close: {type(error).__name__}: {error}",
                    waits=False,
                )
        if server is not None:
            server.close()
        thread = self._liveness
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._config.heartbeat_s)

    def at_close(self, close: Callable[[], None]) -> None:
        """Close something together with the control plane; what it raises is a warning."""
        with self._lock:
            self._at_close.append(close)

    def answer_with(self, answer: Callable[[messages.Ask], bytes]) -> None:
        """Let the operator's questions be answered by this function, on threads of the server."""
        self._answer = answer

    def log_after(self, name: str, number: int) -> list[tuple[int, str]] | None:
        """Return a node's newer lines with their numbers, see LogTail.after; None: no such node.

        Args:
            name: `worker:1`.
            number: number of the last line that the reader has.
        """
        with self._changed:
            tail = self._log_tails.get(name)
            if tail is None:
                return None
            has_begun = self._is_read(name)
            self._read_until_s[name] = self._clock() + READ_S
            if has_begun or number:
                self._followed_s[name] = self._clock()
                self._changed.notify_all()
            if not has_begun and not self._console.enabled:  # the node has sent nothing so far
                self._changed.wait_for(lambda: tail.after(number), FIRST_LINES_S)
            return tail.after(number)

    def await_last_looks(self) -> None:
        """Let a follower of a node's log look once more, for the lines of the end."""
        with self._changed:
            before = {
                name: at_s
                for name, at_s in self._followed_s.items()
                if self._clock() - at_s < FOLLOWED_S
            }
            self._changed.wait_for(
                lambda: all(self._followed_s[name] > at_s for name, at_s in before.items()),
                LAST_LOOK_S,
            )

    def replace_by(self, replace: Callable[[Replace], None]) -> None:
        """Let this function start lost nodes again; called under the lock, it only begins."""
        self._replace = replace

    @property
    def phase(self) -> ClusterPhase:
        """Phase of the cluster."""
        with self._lock:
            return self._state.phase

    def read(self, question: Callable[[ClusterView], Value]) -> Value:
        """Return the result of a function of the state, called under the lock."""
        with self._lock:
            return question(self._state)

    def copied(self) -> ClusterView:
        """Return the state as it is now, for reports: making them takes too long for the lock."""
        with self._lock:
            return self._state.copied()

    def act(self, decide: Callable[[ClusterState], list[Action]]) -> None:
        """Let the state decide and execute its actions."""
        with self._lock:
            self._execute(decide(self._state))
            self._changed.notify_all()

    def wait(self, done: Callable[[ClusterView], bool], timeout_s: float) -> bool:
        """Wait until `done`; return whether it came true in time.

        The coordinator checks the condition after every event, so there is no polling delay.

        Args:
            done: the condition on the state, called under the lock.
            timeout_s: seconds to wait at most.
        """
        with self._changed:
            return self._changed.wait_for(lambda: done(self._state), timeout_s)

    def wake(self) -> None:
        """Make waiting threads check again: something outside of the state has changed."""
        with self._lock:
            self._changed.notify_all()

    def now_s(self) -> float:
        """Return the coordinator's monotonic time."""
        return self._clock()

    def error(self) -> NodeFailedError | None:
        """Return the error of a failed cluster, root cause first."""
        with self._lock:
            has_failed, (failures, num_earlier) = bool(self._state.fatal), self._state.by_cause()
        return NodeFailedError(failures, num_earlier) if has_failed else None

    def explain_by(self, explain: Callable[[NodeFailure, bool], NodeFailure]) -> None:
        """Have failures explained.

        Args:
            explain: returns a failure with what is known from elsewhere; with True it may wait some
                seconds for that.
        """
        self._explain = explain

    def raised_error(self) -> NodeFailedError | None:
        """Return `error()` as a user sees it: with its first failure explained."""
        error = self.error()
        if error is None:
            return None
        first, *others = error.failures
        return NodeFailedError([self._explain(first, True), *others], error.num_earlier)

    def failures(self) -> tuple[NodeFailure, ...]:
        """Return every failure so far, in order of arrival, with what is known of it now."""
        found = self.read(lambda state: tuple(state.failures))
        return tuple(self._explain(each, False) for each in found)

    # ---- ControlHandler ----

    def on_register(self, register: messages.Register) -> messages.RegisterReply:
        """Answer a node that announces itself."""
        with self._lock:
            reply, actions = self._state.on_register(register, self._clock())
            self._execute(actions)
            self._changed.notify_all()
            return reply

    def on_heartbeat(self, heartbeat: messages.Heartbeat) -> messages.HeartbeatReply:
        """Record a heartbeat and a node's counters."""
        with self._lock:
            reply, actions = self._state.on_heartbeat(heartbeat, self._clock())
            self._execute(actions)
            self._changed.notify_all()
            return msgspec.structs.replace(reply, output=self._wanted_of(heartbeat.node.name))

    def on_report(self, report: messages.EventReport) -> None:
        """Act on a node's event, which may come again."""
        self.act(lambda state: state.on_report(report, self._clock()))

    def on_log(self, batch: messages.LogBatch) -> None:
        """Show lines of a node's output; the attempt does not matter, they were written."""
        with self._lock:
            host = _host(self._state, batch.node)
            rate = self._line_rates.get(batch.node.name)
            passed = rate.admit(len(batch.lines)) if rate else 0
            dropped = batch.dropped + len(batch.lines) - passed
            if (tail := self._log_tails.get(batch.node.name)) is not None:
                tail.add(batch.lines[:passed], dropped)
                if self._is_read(batch.node.name):
                    self._changed.notify_all()
        self._console.node_lines(f"{batch.node.name}@{host}", batch.lines[:passed], dropped)

    def on_stream_opened(self, node: NodeId, number: int) -> str:
        """Return why this attempt gets no orders; empty if it may have them.

        Args:
            node: the node that subscribes, with its attempt.
            number: its stream's number.
        """
        with self._lock:
            return self._state.on_stream_opened(node, number, self._clock())

    def on_ask(self, ask: messages.Ask) -> bytes:
        """Answer an operator.

        Raises:
            ControlRefused: this driver shows nothing yet.
        """
        if self._answer is None:
            raise ControlRefused("the driver is about to start or to end; ask again")
        return self._answer(ask)

    def on_stream_closed(self, node: NodeId, number: int) -> None:
        """Record that the node's connection is closed, unless it has a newer one.

        Args:
            node: the node whose stream it was, with its attempt.
            number: the stream's number.
        """
        self.act(lambda state: state.on_stream_closed(node, number, self._clock()))

    # ---- inside ----

    def _is_read(self, name: str) -> bool:
        return self._clock() < self._read_until_s.get(name, -math.inf)

    def _wanted_of(self, name: str) -> messages.Output:
        if self._console.enabled:
            return "all"
        return "piece" if self._is_read(name) else "none"

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                if self._server is not None:
                    self._server.send(action.node, action.order)
            elif isinstance(action, Warn):
                self._console.warn(action.text, waits=False)
            elif isinstance(action, Replace):
                self._begin_again(action)
            else:
                self._console.line(action.text, waits=False)

    def _begin_again(self, wanted: Replace) -> None:
        try:
            self._replace(wanted)
        except Exception as error:  # noqa: BLE001 - such as no thread left on this host
            reason = f"the driver cannot start it again: {type(error).__name__}: {error}"
            # At a later tick: each further attempt has its delay, and none begins inside this one.
            self._not_begun.append((self._clock() + wanted.delay_s, wanted, reason))

    def _on_tick(self, state: ClusterState) -> list[Action]:
        now_s = self._clock()
        due = [each for each in self._not_begun if each[0] <= now_s]
        self._not_begun = [each for each in self._not_begun if each[0] > now_s]
        actions = []
        for _, wanted, reason in due:
            member = state.members[wanted.node.name]
            if state.is_running and member.status is NodeStatus.RESTARTING:
                actions += state.on_not_restarted(member.name, reason, now_s)
        return [*actions, *state.on_tick(now_s)]

    def _watch_liveness(self) -> None:
        interval_s, num_errors = tick_s(self._config), 0
        while not self._closing.wait(interval_s):
            try:
                self.act(self._on_tick)
                num_errors = 0
            except Exception as error:  # noqa: BLE001 - else frozen nodes are waited for without end
                num_errors += 1
                with contextlib.suppress(Exception):  # the next tick tries again
                    self._on_blind(error, is_fatal=num_errors >= _MOST_BLIND_TICKS)

    def _on_blind(self, error: Exception, *, is_fatal: bool) -> None:
        """Report that silent nodes were not looked for; end a cluster if that goes on."""
        text = f"the driver cannot look for silent nodes: {type(error).__name__}: {error}"
        if not is_fatal:
            self._console.warn(text, waits=False)
            return
        if self.phase in (ClusterPhase.FAILED, ClusterPhase.CLOSED):
            return  # it is reported once
        text += f", {_MOST_BLIND_TICKS} times in a row. Start the cluster again, and report this"
        try:
            self.act(lambda state: state.fail(state.workers[0].failure("", text)))
        finally:
            self.wake()  # also where an order could not be sent


def _as_it_is(failure: NodeFailure, _waits: bool) -> NodeFailure:
    return failure


def _not_replaced(action: Replace) -> None:
    raise ControlError(f"nobody starts {action.node.name} again")


def _host(state: ClusterView, node: NodeId) -> str:
    member = state.members.get(node.name)
    return member.host if member is not None and member.host else "?"
