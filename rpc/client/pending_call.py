"""RPC calls in flight at the client, and the loop that waits for any number of them.

Covers: a connection's state as its calls see it (Line), a call's outcome, waiting with deadlines.
Does not: move bytes (call_io), connect (connect).
Threads: none of its own. The waiting thread moves the bytes; `Line.close` may come from any thread.
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
from rpc.wire.frame_io import FrameReader, FrameWriter

_CLOSING_S = 1.0


class Line:
    """One connection's stream and state: open or closed, and the call that it carries."""

    def __init__(self, stream: Stream, session: Session, limits: Limits) -> None:
        self.peer = session.peer
        self.stream = stream
        self.reader = FrameReader(stream, Opener(session.receive_key, limits))
        self.writer = FrameWriter(stream, Sealer(session.send_key))
        self.closed = False
        self.calls = 0
        self.errors = 0
        # Held by the thread that moves bytes or waits: `close` from another thread must not free
        # the descriptor under it.
        self.driving = threading.Lock()
        self._beginning = threading.Lock()
        self.stall_timeout_s = limits.stall_timeout_s
        self._limits = limits
        self._request_ids = itertools.count(1)
        self._pending: PendingCall | None = None

    def begin(self, request: OutgoingRequest) -> PendingCall:
        """Queue a request; nothing is sent yet.

        Raises:
            ConnectionClosed: the connection is closed.
            BusyError: it carries another call.
            LimitExceeded: the request is larger than any peer accepts.
        """
        with self._beginning:
            if self.closed:
                raise ConnectionClosed(f"connection to {self.peer} is closed; connect again")
            if self._pending is not None:
                raise BusyError(f"a call to {self.peer} is under way; take its result first")
            exchange = Exchange(
                next(self._request_ids), request, self.reader, self.writer, self._limits
            )
            self.calls += 1
            self._pending = pending = PendingCall(self, exchange)
        return pending

    def settled(self, error: RpcError | None, broken: bool) -> None:
        """Note that the call under way has ended."""
        self._pending = None
        if error is not None:
            self.errors += 1
        if broken:
            self.closed = True
            self.stream.shutdown()

    def hold(self) -> bool:
        """Take the right to move bytes; False if another thread has it."""
        if self.driving.acquire(False):
            return True
        # Another thread may be in the middle of closing, which takes no time.
        return self.closed and self.driving.acquire(timeout=_CLOSING_S)

    def close(self) -> None:
        """Close; a call under way ends with ConnectionClosed, in whichever thread it waits."""
        self.closed = True
        self.stream.shutdown()
        self.release_if_closed()

    def release_if_closed(self) -> None:
        """Free the descriptor unless a thread is using it; that thread comes here afterwards."""
        if self.closed and self.driving.acquire(blocking=False):
            try:
                if self._pending is not None:
                    self._pending.settle(
                        error=ConnectionClosed(f"connection to {self.peer} was closed"), broken=True
                    )
                self.stream.close()
            finally:
                self.driving.release()


class PendingCall:
    """A call under way; it has an outcome once it is `settled`."""

    settled = False
    """Whether the outcome is known."""
    reply: Reply | None = None
    error: RpcError | None = None
    patience_s = math.inf
    """How long to wait before the peer counts as stalled; without end between frames."""
    _heard_bytes = -1
    _heard_s = 0.0

    def __init__(self, line: Line, exchange: Exchange) -> None:
        self.line = line
        self.exchange = exchange

    def done(self) -> bool:
        """Receive what has arrived, without blocking; True when `result` will not wait."""
        if not self.settled:
            drive([self], 0.0)
        return self.settled

    def result(self, timeout_s: float) -> Reply:
        """Wait for the reply.

        Raises:
            RpcError: as Connection.call; a passed deadline closes the connection.
        """
        if not self.settled:
            drive((self,), timeout_s)
            if not self.settled:
                self.fail_if_overdue(timeout_s)
        if self.reply is None:
            raise self.error or ConnectionClosed("the call has no outcome")
        return self.reply

    def finish_sending(self, timeout_s: float) -> None:
        """Wait until the request has left.

        Raises:
            TransportError, ProtocolError, ConnectionClosed: it cannot; a refusal is left to
            `result`.
        """
        drive([self], timeout_s, until_sent=True)
        if self.exchange.sending:
            self.fail_if_overdue(timeout_s)
        if self.error is not None and not isinstance(self.error, RemoteError):
            raise self.error

    def fail_if_overdue(self, timeout_s: float) -> None:
        """Settle with DeadlineExceeded, and close the connection, unless the outcome is known."""
        if not self.settled:
            where = f"{self.line.peer} at {self.line.stream.peer_address}"
            text = f"{where}: {self.exchange.progress()} within {timeout_s:g} s"
            self.settle(error=DeadlineExceeded(text), broken=True)
            self.line.release_if_closed()

    def settle(
        self, *, reply: Reply | None = None, error: RpcError | None = None, broken: bool = False
    ) -> None:
        """Fix the outcome; the first one counts."""
        if not self.settled:
            self.reply, self.error, self.settled = reply, error, True
            self.line.settled(error, broken)

    def advance(self) -> bool:
        """Move bytes; True if this call has to wait or is settled. The caller holds the line."""
        exchange = self.exchange
        try:
            waits = exchange.advance()
            if not (exchange.sending or exchange.receiving):
                self.settle(reply=exchange.result(), broken=exchange.connection_broken)
            elif waits:
                self.patience_s = self._patience_s() if exchange.mid_frame else math.inf
        except RemoteError as error:
            self.settle(error=error, broken=exchange.connection_broken)
        except RpcError as error:
            self.settle(error=error, broken=True)
        else:
            return waits
        return True

    def _patience_s(self) -> float:
        """Return what is left of the time for the next byte of a frame.

        Raises:
            PeerGone: it is over. A frame is sent without a pause, so its length was changed on the
                way, or the network is down.
        """
        now_s, heard_bytes = time.monotonic(), self.line.reader.received_bytes
        if heard_bytes != self._heard_bytes:
            self._heard_bytes, self._heard_s = heard_bytes, now_s
        left_s = self._heard_s + self.line.stall_timeout_s - now_s
        if left_s <= 0:
            raise PeerGone(
                f"{self.line.peer} at {self.line.stream.peer_address} stopped inside a frame of its"
                f" reply for stall_timeout_s={self.line.stall_timeout_s:g}"
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
    drive(pending, timeout_s, until_any=True)
    return [call for call in pending if call.settled]


def drive(
    calls: Sequence[PendingCall],
    timeout_s: float,
    *,
    until_sent: bool = False,
    until_any: bool = False,
) -> None:
    """Move bytes of all calls until all are settled (or sent, or any is) or the time is over.

    Raises:
        BusyError: another thread drives one of them.
    """
    held: list[PendingCall] = []
    try:
        for call in calls:
            if not call.line.hold():
                raise BusyError("another thread is waiting on one of these calls")
            held.append(call)
        deadline = time.monotonic() + timeout_s
        if len(calls) == 1:
            _drive_one(calls[0], deadline, until_sent)
        else:
            _drive_several(calls, deadline, until_sent, until_any)
    except RpcError:
        raise
    except BaseException:
        # Interrupted between two bytes of a frame: these connections cannot be used again.
        for call in held:
            call.settle(error=ConnectionClosed("the call was interrupted"), broken=True)
        raise
    finally:
        for call in held:
            call.line.driving.release()
            if call.line.closed:
                call.line.release_if_closed()


def _drive_several(
    calls: Sequence[PendingCall], deadline: float, until_sent: bool, until_any: bool
) -> None:
    unfinished = [call for call in calls if not call.settled]
    while unfinished:
        must_wait = True
        for call in unfinished:
            must_wait &= call.advance()
        unfinished = [call for call in unfinished if not call.settled]
        if until_any and len(unfinished) < len(calls):
            return
        if until_sent:
            unfinished = [call for call in unfinished if call.exchange.sending]
        if unfinished:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if must_wait:
                _wait(unfinished, min(left_s, *(call.patience_s for call in unfinished)))


def _drive_one(call: PendingCall, deadline: float, until_sent: bool) -> None:
    """The same for the usual number of calls, without the lists: small calls take half the time."""
    exchange, settled = call.exchange, call.settled
    while not settled:
        waits = call.advance()
        settled = call.settled
        if settled or (until_sent and not exchange.sending):
            return
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        if waits:
            try:
                call.line.stream.wait(
                    read=exchange.receiving,
                    write=exchange.sending,
                    timeout_s=min(left_s, call.patience_s),
                )
            except ConnectionClosed:
                continue  # another thread closed the line: the next attempt to move bytes says so


def _wait(calls: Sequence[PendingCall], timeout_s: float) -> None:
    with contextlib.suppress(ConnectionClosed):
        wait_streams(
            [(call.line.stream, call.exchange.receiving, call.exchange.sending) for call in calls],
            timeout_s,
        )
