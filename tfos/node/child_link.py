"""The control link between a supervisor and its child: typed structs over an inherited socketpair.

Covers: the message types and their framing (4-byte little-endian length, msgpack body); the child's
thread that receives orders, and ends the child when its supervisor is gone.
Does not: decide (tfos.node.supervisor), carry orders out (tfos.node.ps_process,
tfos.worker.process).
Threads: `send` may be called from any thread; `receive` from one thread.

Child to supervisor: events of tfos.control.messages as they are, without those that the supervisor
makes itself, and Progress and Raised below.
Supervisor to child: every Order of tfos.control.messages as it is, and HasBegun to a server.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from rpc.errors import UNREADABLE
from tfos.control import messages
from tfos.errors import LinkError

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""A roster of thousands of nodes fits; anything larger is a broken peer."""

_POLL_S = 3600.0
"""One poll waits this long at most: milliseconds above 2**31, some 24 days, are refused by it."""

_LENGTH = struct.Struct("<I")


class Progress(msgspec.Struct, frozen=True, tag=True):
    """The child's latest numbers; replaces the previous one."""

    values: dict[str, float]
    feeds: tuple[messages.FeedSnapshot, ...] = ()
    stats: bytes = b""
    """See messages.Heartbeat."""


class Raised(msgspec.Struct, frozen=True, tag=True):
    """User code or ours raised in the child; it exits with code 1 after this."""

    error_type: str
    message: str
    traceback: str


class HasBegun(msgspec.Struct, frozen=True, tag=True):
    """Whether the cluster had begun when the server was started, so that it restores what it held.

    A node's first server does not ask.
    """

    yes: bool


ToServer = messages.Order | HasBegun

FromChild = (
    messages.Listening
    | messages.PhaseChanged
    | messages.ServesShard
    | messages.InCollective
    | messages.StrategyBuilt
    | messages.FlushReached
    | messages.BatchReport
    | messages.FitReading
    | messages.EpochTrained
    | messages.BestSaved
    | messages.SavedNow
    | messages.NotSaved
    | messages.Evaluated
    | messages.UpdatesLost
    | messages.Done
    | Progress
    | Raised
)

Received = TypeVar("Received")


class ChildLink(Generic[Received]):
    """One end of the socketpair; `Received` is the union of what may arrive at this end.

    Args:
        sock: this end of the socketpair.
        accepts: union of the message types that may arrive.
    """

    def __init__(self, sock: socket.socket, accepts: object) -> None:
        sock.setblocking(False)  # one flag for both directions, so every wait is a poll
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(accepts)
        self._encoder = msgspec.msgpack.Encoder()
        self._send_lock = threading.Lock()
        self._buffer = bytearray()
        self._is_open = True

    def fileno(self) -> int:
        """Return the descriptor to poll for input."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, *, timeout_s: float = 5.0) -> bool:
        """Send one message.

        Args:
            message: message of a type that the peer accepts.
            timeout_s: seconds until the peer counts as stuck.

        Returns:
            False if the peer has ended or has not read for `timeout_s`; the link is then
            useless, and the receiving side detects the peer's end.
        """
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            name = type(message).__name__
            raise LinkError(f"{name} of {len(body)} bytes exceeds {MAX_MESSAGE_BYTES}")
        with self._send_lock:
            return self._send_all(memoryview(_LENGTH.pack(len(body)) + body), timeout_s)

    def receive(
        self, timeout_s: float | None = None, *, peer_pidfd: int | None = None
    ) -> Received | None:
        """Wait for one message; None when the peer has closed its end and all have been returned.

        Args:
            timeout_s: None waits however long the peer is silent.
            peer_pidfd: the peer's pidfd; its end is the link's too: a fork of the peer may hold its
                end of the link open. None: the link alone is watched.

        Raises:
            TimeoutError: no message has come in time.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if peer_pidfd is not None:
            poll.register(peer_pidfd, select.POLLIN)
        while True:
            message = self._next_buffered()
            if message is not None or not self._is_open:
                return message
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            turn_s = _POLL_S if left_s is None else min(left_s, _POLL_S)
            ready = poll.poll(math.ceil(1000 * turn_s))
            if not ready and left_s is not None and left_s <= _POLL_S:
                raise TimeoutError
            has_ended = any(each == peer_pidfd for each, _ in ready)
            self._is_open = self._fill() and not has_ended

    def receive_ready(self) -> tuple[list[Received], bool]:
        """Return the messages that have arrived, without waiting, and whether the link is open."""
        is_open = self._fill()
        found: list[Received] = []
        while (message := self._next_buffered()) is not None:
            found.append(message)
        return found, is_open

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _send_all(self, data: memoryview, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while data:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
                return False
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                continue
            except OSError:
                return False
        return True

    def _fill(self) -> bool:
        """Read all available bytes; False at the peer's end."""
        try:
            while data := self._socket.recv(65536):
                self._buffer += data
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _next_buffered(self) -> Received | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > MAX_MESSAGE_BYTES:
            raise LinkError(f"message of {length} bytes announced, limit is {MAX_MESSAGE_BYTES}")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        try:
            return self._decoder.decode(body)
        except UNREADABLE as error:
            raise LinkError(f"the peer sent an unknown message: {error}") from error


_logger = logging.getLogger(__name__)


def start_order_thread(
    link: ChildLink[Received], on_order: Callable[[Received], None]
) -> threading.Thread:
    """Call `on_order` for each order, in order, on a daemon thread; return the thread.

    When the supervisor's end of the link closes, this process exits at once: without a supervisor
    no process would report for it or end it. It also exits, with status 1, when `on_order` raises.

    Args:
        link: this process's end of the link.
        on_order: called with each order.
    """

    def carry_out() -> None:
        try:
            while (order := link.receive()) is not None:
                on_order(order)
        except Exception:
            # A process that goes on would take no later order, not even the one to stop.
            _logger.exception("an order could not be read or carried out")
        os._exit(1)

    thread = threading.Thread(target=carry_out, name="tfos-orders", daemon=True)
    thread.start()
    return thread


def aside(carry_out: Callable[..., None], *args: Any) -> None:
    """Carry out an order that waits on a thread of its own, so that the next order does not.

    Args:
        carry_out: carries out the order.
        args: the call's arguments.
    """
    name = f"tfos-{carry_out.__name__.strip('_')}"
    threading.Thread(target=carry_out, args=args, name=name, daemon=True).start()
