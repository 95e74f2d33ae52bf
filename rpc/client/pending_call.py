"""RPC calls in flight at the client, and the loop that waits for any number of them.

Covers: the state of a connection that its calls share (BaseConnection), a call's outcome, waiting
with deadlines.
Does not: move bytes (call_io), connect (connect).
Threads: none of its own. The waiting thread moves the bytes; `close` may come from any thread.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Sequence

from rpc.auth.handshake import Session
from rpc.client.call_io import Exchange, OutgoingRequest, Reply
from rpc.client.deadline import Deadline
from rpc.errors import (
    BusyError,
    ConnectionClosed,
    DeadlineExceeded,
    PeerGone,
    RemoteError,
    RpcError,
)
from rpc.limits import Limits
from rpc.transport.stream import Stream, wait_streams
from rpc.wire.frame import Opener, Sealer
from rpc.wire.frame_io import Buffer, FrameReader, FrameWriter

_CLOSING_S = 1.0


class BaseConnection:
    """State of a connection: its stream, whether it is open, and the call in flight.

    Args:
        stream: after the handshake.
        session: what the handshake has agreed on: the peer, keys, options.
        limits: sizes and times of this side.

    Lock order: `_beginning`, then `driving`.
    """

    def __init__(self, stream: Stream, session: Session, limits: Limits) -> None:
        self.peer = session.peer
        self.stream = stream
        self.reader = FrameReader(stream, Opener(session.receive_key, limits))
        self.writer = FrameWriter(stream, Sealer(session.send_key))
        self.closed = False
        self.calls = 0
        self.errors = 0
        # Held by the thread that moves bytes or waits: `close` from another thread must not free
        # the descriptor meanwhile.
        self.driving = threading.Lock()
        self._beginning = threading.Lock()
        self.stall_timeout_s = limits.stall_timeout_s
        self._limits = limits
        self._request_ids = itertools.count(1)
        self.pending: PendingCall | None = None
        """The call in flight."""

    def begin(
        self, meta: bytes, payload: Sequence[Buffer] = (), *, into: Sequence[Buffer] | None = None
    ) -> PendingCall:
        """Queue a request. Its bytes move while a thread waits for it, by `wait_any` for several.

        Args:
            meta: small encoded message for the handler.
            payload: contiguous buffers, sent in order without a copy; leave them alone meanwhile.
            into: writable buffers that the reply's payload fills exactly, in order.

        Raises:
            ConnectionClosed: the connection is closed.
            BusyError: it carries another call.
            LimitExceeded: the request is larger than any peer accepts.
        """
        request = OutgoingRequest(meta, payload, into)
        with self._beginning:
            if self.closed:
                raise ConnectionClosed(f"connection to {self.peer} is closed; connect again")
            if self.pending is not None:
                raise BusyError(f"a call to {self.peer} is under way; take its result first")
            pending = PendingCall(
                next(self._request_ids), request, self.reader, self.writer, self._limits
            )
            pending.connection = self
            self.calls += 1
            self.pending = pending
        return pending

    def hold(self) -> bool:
        """Acquire the right to move bytes; False if another thread has it."""
        if self.driving.acquire(False):
            return True
        # Another thread may be closing, which takes a moment only.
        return self.closed and self.driving.acquire(timeout=_CLOSING_S)

    def close(self) -> None:
        """Close; a call in flight in another thread ends with ConnectionClosed. Idempotent."""
        self.closed = True
        self.stream.shutdown()
        self.release_if_closed()

    def release_if_closed(self) -> None:
        """Free the descriptor, unless a thread uses it; that thread calls this when it is done."""
        if self.closed and self.driving.acquire(blocking=False):
            try:
                if self.pending is not None:
                    self.pending.settle(
                        error=ConnectionClosed(f"connection to {self.peer} was closed"), broken=True
                    )
                self.stream.close()
            finally:
                self.driving.release()


class PendingCall(Exchange):
    """A call in flight; it has an outcome once it is `settled`."""

    connection: BaseConnection
    settled = False
    """Whether the outcome is known."""
    reply: Reply | None = None
    error: RpcError | None = None
    stall_left_s = math.inf
    """Seconds until the peer counts as stalled; infinite between frames."""
    _received_bytes = -1
    _received_s = 0.0

    def done(self) -> bool:
        """Receive what has arrived, without blocking; True if `result` will not wait."""
        if not self.settled:
            drive_one(self, 0.0)
        return self.settled

    def result(self, timeout_s: float) -> Reply:
        """Wait for the reply.

        Raises:
            RpcError: as Connection.call; a passed deadline closes the connection.
        """
        if not self.settled:
            begun_s = time.monotonic()
            deadline = Deadline(begun_s, begun_s + timeout_s)
            drive_one(self, timeout_s)
            while not self.done() and (left_s := deadline.left_s()) > 0:
                drive_one(self, left_s)
            self.fail_if_overdue(timeout_s)
        if self.reply is None:
            raise self.error or ConnectionClosed("the call has no outcome")
        return self.reply

    def finish_sending(self, timeout_s: float) -> None:
        """Wait until the request is sent.

        Raises:
            TransportError, ProtocolError, ConnectionClosed: it cannot be sent. `result` raises a
                refusal by the handler.
        """
        drive_one(self, timeout_s, until_sent=True)
        if self.sending:
            self.fail_if_overdue(timeout_s)
        if self.error is not None and not isinstance(self.error, RemoteError):
            raise self.error

    def fail_if_overdue(self, timeout_s: float) -> None:
        """Settle with DeadlineExceeded, and close the connection, unless the outcome is known."""
        if not self.settled:
            where = f"{self.connection.peer} at {self.connection.stream.peer_address}"
            text = f"{where}: {self.progress()} within {timeout_s:g} s"
            self.settle(error=DeadlineExceeded(text), broken=True)
            self.connection.release_if_closed()

    def settle(
        self, *, reply: Reply | None = None, error: RpcError | None = None, broken: bool = False
    ) -> None:
        """Set the outcome, once: later calls are ignored.

        Args:
            reply: reply of a successful call.
            error: error of a failed one.
            broken: whether the connection cannot be used any more.
        """
        if self.settled:
            return
        self.reply, self.error, self.settled = reply, error, True
        connection = self.connection
        connection.pending = None
        if error is not None:
            connection.errors += 1
        if broken:
            connection.closed = True
            connection.stream.shutdown()

    def advance(self) -> bool:
        """Move bytes; True if this call has to wait or is settled. The caller holds `driving`."""
        try:
            waits = self.move()
            # Both directions are done: a peer that closed after its reply has still answered.
            if not (self.sending or self.receiving):
                self.settle(reply=self.outcome(), broken=self.connection_broken)
            elif waits:
                # Only inside a frame: between frames the handler may take as long as it needs.
                self.stall_left_s = self._stall_left_s() if self.is_inside_frame else math.inf
        # A refusal by the handler leaves the connection usable, any other error does not.
        except RemoteError as error:
            self.settle(error=error, broken=self.connection_broken)
        except RpcError as error:
            self.settle(error=error, broken=True)
        else:
            return waits
        return True

    def _stall_left_s(self) -> float:
        """Return the seconds left for the next byte of a frame.

        Raises:
            PeerGone: none is left. A frame is sent without a pause, so its length was changed on
                the way, or the network is down.
        """
        now_s, received_bytes = time.monotonic(), self.connection.reader.received_bytes
        if received_bytes != self._received_bytes:
            self._received_bytes, self._received_s = received_bytes, now_s
        left_s = self._received_s + self.connection.stall_timeout_s - now_s
        if left_s <= 0:
            raise PeerGone(
                f"{self.connection.peer} at {self.connection.stream.peer_address} stopped inside a"
                f" frame of its reply for stall_timeout_s={self.connection.stall_timeout_s:g}"
            )
        return left_s


def wait_any(pending: Sequence[PendingCall], timeout_s: float) -> list[PendingCall]:
    """Wait until at least one call is done.

    Args:
        pending: calls in flight, each on its own connection.
        timeout_s: longest wait.

    Returns:
        The calls that are done; none if `timeout_s` passed first.
    """
    ready = [call for call in pending if call.settled]
    if ready or not pending:
        return ready
    if len(pending) == 1:
        drive_one(pending[0], timeout_s)
    else:
        _drive_any(pending, timeout_s)
    return [call for call in pending if call.settled]


def drive_one(call: PendingCall, timeout_s: float, *, until_sent: bool = False) -> None:
    """Move bytes of a call until it is settled (or sent) or the time is over.

    Args:
        call: to drive.
        timeout_s: longest wait; 0 only moves what can move now.
        until_sent: return once the request is sent.

    Raises:
        BusyError: another thread drives it.
    """
    connection = call.connection
    if not connection.hold():
        raise BusyError("another thread is waiting on this call")
    try:
        deadline_s = time.monotonic() + timeout_s
        while True:
            # First move, then look at the clock: a timeout of 0 still takes what has arrived.
            waits = call.advance()
            left_s = deadline_s - time.monotonic()
            if call.settled or (until_sent and not call.sending) or left_s <= 0:
                return
            # Not at the end of a turn (`advance` was False): there is more to move at once.
            if waits:
                try:
                    connection.stream.wait(
                        read=call.receiving,
                        write=call.sending,
                        timeout_s=min(left_s, call.stall_left_s),
                    )
                except ConnectionClosed:
                    continue  # closed by another thread: the next `advance` settles the call
    except RpcError:
        raise
    except BaseException:
        # An interrupt may fall between two bytes of a frame: the connection cannot be used again.
        call.settle(error=ConnectionClosed("the call was interrupted"), broken=True)
        raise
    finally:
        connection.driving.release()
        if connection.closed:
            connection.release_if_closed()


def _drive_any(calls: Sequence[PendingCall], timeout_s: float) -> None:
    """Move bytes of all calls until any is settled or the time is over.

    Raises:
        BusyError: another thread drives one of them.
    """
    driven: list[PendingCall] = []
    try:
        for call in calls:
            if not call.connection.hold():
                raise BusyError("another thread is waiting on one of these calls")
            driven.append(call)
        _move_until_any(calls, time.monotonic() + timeout_s)
    except RpcError:
        raise
    except BaseException:
        # An interrupt may fall between two bytes of a frame, so no connection can be used again.
        for call in driven:
            call.settle(error=ConnectionClosed("the call was interrupted"), broken=True)
        raise
    finally:
        for call in driven:
            call.connection.driving.release()
            if call.connection.closed:
                call.connection.release_if_closed()


def _move_until_any(calls: Sequence[PendingCall], deadline_s: float) -> None:
    while True:
        must_wait, is_any_settled = True, False
        # All calls get a turn before any wait: one large reply must not starve the others.
        for call in calls:
            must_wait &= call.advance()
            is_any_settled |= call.settled
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or is_any_settled:
            return
        if must_wait:
            _wait(calls, min(left_s, *(call.stall_left_s for call in calls)))


def _wait(calls: Sequence[PendingCall], timeout_s: float) -> None:
    with contextlib.suppress(ConnectionClosed):
        wait_streams(
            [(call.connection.stream, call.receiving, call.sending) for call in calls],
            timeout_s,
        )
