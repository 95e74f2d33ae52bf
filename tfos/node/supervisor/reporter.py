"""Reporter: registers, then reports events and heartbeats on one thread, lines on another.

Covers: order and retry of reports, the rhythm of heartbeats, the time of the last contact.
Does not: decide anything; refusals and orders are posted to the supervisor.
Threads: `report`, `log` and `finish` belong to the supervisor's main thread; `post` and `vitals`
are called on this object's threads or the client's. Lines have a thread of their own because a
driver whose screen takes none must not cost the node its lease.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rpc.process_stat import resident_bytes
from tfos.control import messages
from tfos.errors import ControlError, ControlFailed, ControlRefused, ControlUnavailable
from tfos.failure import NodeFailure
from tfos.node.supervisor.pending_output import PendingOutput

if TYPE_CHECKING:
    from tfos.control.client import ControlClient

REGISTER_WINDOW_S = 45.0
"""Seconds to try to register; the node task fails after 60 s (tfos.node.launch)."""
_REACH_DRIVER = (
    "let TFOS_SERVER_HOST and TFOS_SERVER_PORT, or spark.driver.host and spark.driver.bindAddress, "
    "name an address and port of the driver that this host reaches, or open the port"
)
_RETRY_S = 0.5
_LAST_LINES_S = 3.0
"""Seconds for the last lines of output, however long the last events are offered."""
_CLOSE_S = 3.0
"""Seconds to close the connection: gRPC waits for its threads, some of which may never start."""
_MOST_FAILURES_S = 10.0
"""How long the driver may fail to handle an event before this node gives up."""


@dataclass(frozen=True, slots=True)
class Registered:
    """The driver accepted this node."""

    reply: messages.RegisterReply


@dataclass(frozen=True, slots=True)
class Unwanted:
    """The driver refused this node, replaced it, or is unreachable."""

    reason: str
    is_cut_off: bool = False
    """Whether no call has reached the driver."""


Notice = messages.Order | Registered | Unwanted


@dataclass(frozen=True, slots=True)
class HeartbeatState:
    """Content of a heartbeat; replaced as a whole, so a reader needs no lock."""

    phase: str = "starting"
    child_pid: int = 0
    progress: tuple[tuple[str, float], ...] = ()
    feeds: tuple[messages.FeedSnapshot, ...] = ()
    stats: bytes = b""


class Reporter:
    """A supervisor's line to its driver.

    Args:
        connect: opens the control plane, on this object's thread: with gRPC's import that takes as
            long as the start of the node's child, which goes on meanwhile.
        register: what the node registers with.
        vitals: returns what the next heartbeat carries.
        post: passes what the driver sent to the supervisor's main thread.
    """

    def __init__(
        self,
        connect: Callable[[], ControlClient],
        register: messages.Register,
        *,
        vitals: Callable[[], HeartbeatState],
        post: Callable[[Notice], None],
    ) -> None:
        self._connect = connect
        self._client: ControlClient
        self._register_message = register
        self._heartbeat_state = vitals
        self._post = post
        self._changed = threading.Condition()
        self._events: deque[tuple[int, messages.Event]] = deque()
        self._num_events = 0
        self._fails_since_s: float | None = None
        """Time since when the driver cannot handle the oldest event; None: it has not said so."""
        self._output = PendingOutput()
        self._finish_by_s: float | None = None
        self._is_connected = threading.Event()
        self._heartbeat_s = 2.0
        self._last_contact_s = time.monotonic()
        self._seq = 0
        self._thread = threading.Thread(target=self._run, name="tfos-reporter", daemon=True)
        self._lines_thread = threading.Thread(
            target=self._send_output, name="tfos-lines", daemon=True
        )

    @property
    def last_contact_s(self) -> float:
        """Monotonic time of the last answer from the driver."""
        return self._last_contact_s

    def start(self) -> None:
        """Register, then keep reporting."""
        self._thread.start()

    def report(self, event: messages.Event) -> None:
        """Queue an event; the driver handles events in this order, each once."""
        with self._changed:
            self._num_events += 1
            self._events.append((self._num_events, event))
            self._changed.notify_all()

    def log(self, lines: tuple[str, ...], dropped: int) -> None:
        """Queue lines of output for a driver that wants them.

        They are dropped, and counted, when it does not answer.

        Args:
            lines: without line ends.
            dropped: lines that were left out before these.
        """
        if lines or dropped:
            with self._changed:
                self._output.add(lines, dropped)
                self._changed.notify_all()

    def finish(self, timeout_s: float) -> None:
        """Send queued reports for at most `timeout_s` seconds, and disconnect.

        Nothing is sent where `start` was not called.
        """
        by_s = time.monotonic() + timeout_s
        with self._changed:
            self._finish_by_s = by_s
            self._changed.notify_all()
        for thread, most_s in ((self._thread, timeout_s), (self._lines_thread, _LAST_LINES_S)):
            if thread.ident is not None:
                thread.join(max(0.0, min(most_s, by_s - time.monotonic())))
        if self._is_connected.is_set():
            self._close_client()

    def _close_client(self) -> None:
        """Close the connection; without a thread for that, the end of this process does."""
        closing = threading.Thread(target=self._client.close, name="tfos-close", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads on this host
            closing.start()
            closing.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._client = self._connect()
        except Exception as error:  # noqa: BLE001 - the node task shows the reason
            self._post(Unwanted(f"cannot open the control plane: {type(error).__name__}: {error}"))
            return
        self._is_connected.set()
        try:
            reply = self._register()
            if not reply.accepted:
                self._post(Unwanted(reply.reason))
                return
            self._heartbeat_s = reply.heartbeat_s
            self._post(Registered(reply))
            self._client.orders(self._post, lambda reason: self._post(Unwanted(reason)))
            self._lines_thread.start()
            self._serve()
        except ControlRefused as error:
            self._post(Unwanted(str(error)))
        except ControlFailed as error:  # the driver is reached: no port is to be opened
            text = f"the driver could not handle the registration: {error}"
            self._post(Unwanted(f"{text}. Start the cluster again, and report this"))
        except ControlUnavailable as error:
            host = self._register_message.host
            text = f"{host} did not reach the driver in {REGISTER_WINDOW_S:g} s: {error}"
            self._post(Unwanted(f"{text}; {_REACH_DRIVER}", is_cut_off=True))

    def _register(self) -> messages.RegisterReply:
        deadline_s = time.monotonic() + REGISTER_WINDOW_S
        first: ControlUnavailable | None = None
        while True:
            try:
                left_s = max(0.0, deadline_s - time.monotonic())
                reply = self._client.register(
                    self._register_message, timeout_s=min(messages.REGISTER_TIMEOUT_S, left_s)
                )
            except ControlUnavailable as error:
                first = first or error  # a call that the window cuts short knows no reason
                left_s = max(0.0, deadline_s - time.monotonic())
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._finish_by_s is not None, min(_RETRY_S, left_s)
                    )
                if time.monotonic() >= deadline_s or self._finish_by_s is not None:
                    raise first from None
            else:
                self._last_contact_s = time.monotonic()
                return reply

    def _serve(self) -> None:
        next_beat_s = time.monotonic()
        while not self._is_over(has_more=bool(self._events)):
            are_sent = self._try(self._send_events)
            if time.monotonic() >= next_beat_s:  # also when the driver takes no event
                next_beat_s = time.monotonic() + self._heartbeat_s
                self._try(self._beat)
            with self._changed:
                if not are_sent:
                    self._pause()
                elif not self._events and self._finish_by_s is None:
                    self._changed.wait(max(0.0, next_beat_s - time.monotonic()))

    @staticmethod
    def _try(call: Callable[[], None]) -> bool:
        """Return whether the driver has answered."""
        try:
            call()
        except ControlUnavailable:
            return False
        return True

    def _is_over(self, *, has_more: bool) -> bool:
        if self._finish_by_s is None:
            return False
        return not has_more or time.monotonic() > self._finish_by_s

    def _send_events(self) -> None:
        while self._events:
            seq, event = self._events[0]
            try:
                self._client.report(event, seq, timeout_s=self._timeout_s())
            except ControlFailed as error:
                self._fails_since_s = self._fails_since_s or time.monotonic()
                if time.monotonic() - self._fails_since_s < _MOST_FAILURES_S:
                    raise
                self._give_up(seq, event, error)
            self._last_contact_s = time.monotonic()
            self._fails_since_s = None
            self._events.popleft()

    def _give_up(self, seq: int, event: messages.Event, error: ControlFailed) -> None:
        """Report the driver's failure instead of an event that it cannot handle.

        Raises:
            ControlRefused: always; the node ends.
        """
        text = (
            f"the driver could not handle {type(event).__name__} for {_MOST_FAILURES_S:g} s, and "
            f"later reports of this node wait for it: {error}. Start the cluster again, and "
            "report this"
        )
        node = self._register_message
        failure = NodeFailure(
            node.node,
            node.host,
            node.pid,
            executor_id=node.executor_id,
            phase=self._heartbeat_state().phase,
            error_type=ControlFailed.__name__,
            message=text,
        )
        # Else the driver finds a silent node, and starts one again that would do the same.
        with contextlib.suppress(ControlError):
            self._client.report(messages.Failed(failure), seq, timeout_s=self._timeout_s())
        raise ControlRefused(text) from error

    def _send_output(self) -> None:
        try:
            while not self._is_over(has_more=not self._output.is_empty):
                with self._changed:
                    due_s = self._output.due_s()
                    if self._finish_by_s is None and time.monotonic() < due_s:
                        wait_s = None if due_s == math.inf else due_s - time.monotonic()
                        self._changed.wait(wait_s)
                        continue
                    lines, dropped = self._output.take(time.monotonic())
                if lines or dropped:
                    self._send_lines(lines, dropped)
        except ControlRefused as error:
            self._post(Unwanted(str(error)))

    def _send_lines(self, lines: tuple[str, ...], dropped: int) -> None:
        batch = messages.LogBatch(self._register_message.node, lines, dropped)
        try:
            self._client.log(batch, timeout_s=self._timeout_s())
        except ControlUnavailable:
            with self._changed:
                self._output.lose(dropped + len(lines))
                self._pause()
        else:
            self._last_contact_s = time.monotonic()

    def _beat(self) -> None:
        vitals = self._heartbeat_state()
        self._seq += 1
        reply = self._client.heartbeat(
            messages.Heartbeat(
                node=self._register_message.node,
                seq=self._seq,
                phase=vitals.phase,
                child_pid=vitals.child_pid,
                rss_bytes=resident_bytes(vitals.child_pid),
                progress=dict(vitals.progress),
                feeds=vitals.feeds,
                stats=vitals.stats,
            )
        )
        self._last_contact_s = time.monotonic()
        with self._changed:
            self._output.wanted = reply.output
            self._changed.notify_all()
        if reply.fenced:
            self._post(Unwanted("the driver has given this attempt up, or a newer one replaced it"))

    def _pause(self) -> None:
        """Wait before another try, at most until `finish` is called; hold `_changed`."""
        before = self._finish_by_s
        self._changed.wait_for(lambda: self._finish_by_s is not before, _RETRY_S)

    def _timeout_s(self) -> float:
        if self._finish_by_s is None:
            return messages.CALL_TIMEOUT_S
        return max(0.1, min(messages.CALL_TIMEOUT_S, self._finish_by_s - time.monotonic()))
