"""Client side: connect to a process, call it, and drive several calls at once from the caller's thread.

Covers: choosing the way (inproc, Unix socket, TCP), the handshake, calls with deadlines, closing.
Does not: what moves in a call (exchange), the bytes (frame, frame_io).
Threads: none of its own. A connection carries one call at a time; `close` may come from any thread and ends it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rpc.address import Endpoint, boot_id
from rpc.errors import (
    AuthError,
    BusyError,
    ClosedError,
    DeadlineExceeded,
    PeerGone,
    RemoteError,
    RpcError,
)
from rpc.exchange import Exchange, Reply, Request
from rpc.frame import Limits, Opener, Sealer
from rpc.frame_io import Buffer, FrameReader, FrameWriter
from rpc.handshake import ClientHandshake, Credentials, Identity, Role, Session, mismatch_text
from rpc.inproc import dial_inproc
from rpc.transport import DEFAULT_OPTIONS, SocketOptions, Stream, dial_tcp, dial_unix, wait_streams

__all__ = [
    "Buffer",
    "Connection",
    "ConnectionStats",
    "OutCall",
    "PendingCall",
    "Reply",
    "call_all",
    "connect",
    "wait_any",
]

_DEFAULT_LIMITS: Final = Limits()


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """Totals since the connection was made; bytes include frame headers."""

    calls: int
    errors: int
    """Calls that ended in any RpcError, refusals by the handler included."""
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class OutCall:
    """One call of `call_all`."""

    connection: Connection
    meta: bytes
    payload: Sequence[Buffer] = ()
    into: Sequence[memoryview] | None = None


class Connection:
    """An authenticated connection to one peer; made by `connect`.

    After a TransportError, a ProtocolError or a passed deadline it is closed; a RemoteError leaves it usable.
    """

    def __init__(self, stream: Stream, session: Session, limits: Limits = _DEFAULT_LIMITS) -> None:
        self.peer: Identity = session.peer
        self.transport: str = stream.transport
        self._stream = stream
        self._limits = limits
        self._reader = FrameReader(stream, Opener(session.receive_key, limits))
        self._writer = FrameWriter(stream, Sealer(session.send_key))
        self._request_ids = itertools.count(1)
        self._closed = False
        self._pending: PendingCall | None = None
        # Held by the thread that moves bytes or waits; `close` from another thread must not free the descriptor then.
        self._driving = threading.Lock()
        self._calls = 0
        self._errors = 0

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return f"<Connection to {self.peer} by {self._stream.peer_address}, {state}>"

    @property
    def closed(self) -> bool:
        """Whether no call can be made any more."""
        return self._closed

    def call(
        self,
        meta: bytes,
        payload: Sequence[Buffer] = (),
        *,
        into: Sequence[memoryview] | None = None,
        timeout_s: float,
    ) -> Reply:
        """Send a request and return its reply, sending and receiving at the same time.

        Args:
            meta: small encoded message for the handler.
            payload: contiguous buffers, sent in order without a copy; unchanged until the call returns.
            into: writable buffers that the reply's payload fills exactly, in order.
            timeout_s: for the whole call.

        Raises:
            RemoteError: the handler refused; the connection stays usable.
            TransportError: the peer is gone or the time is over; the connection is closed.
            ProtocolError: the peer's bytes are wrong; the connection is closed.
            ClosedError: the connection was closed before.
        """
        return self._begin(Request(meta, payload, into)).result(timeout_s)

    def start(
        self,
        meta: bytes,
        payload: Sequence[Buffer] = (),
        *,
        into: Sequence[memoryview] | None = None,
        timeout_s: float,
    ) -> PendingCall:
        """Send a request and return without its reply; meant for replies that fit the kernel's buffers.

        Raises:
            TransportError, ProtocolError, ClosedError: as `call`.
        """
        pending = self._begin(Request(meta, payload, into))
        pending.finish_sending(timeout_s)
        return pending

    def stats(self) -> ConnectionStats:
        """Return totals so far."""
        return ConnectionStats(
            self._calls, self._errors, self._writer.sent_bytes, self._reader.received_bytes
        )

    def close(self) -> None:
        """Close; a call under way in another thread ends with ClosedError. Idempotent."""
        self._closed = True
        self._stream.shutdown()
        self._release_if_closed()

    def _begin(self, request: Request) -> PendingCall:
        if self._closed:
            raise ClosedError(f"connection to {self.peer} is closed; connect again")
        if self._pending is not None:
            raise BusyError(f"a call to {self.peer} is under way; take its result first")
        exchange = Exchange(
            next(self._request_ids), request, self._reader, self._writer, self._limits
        )
        self._calls += 1
        self._pending = PendingCall(self, exchange)
        return self._pending

    def _settled(self, pending: PendingCall, error: BaseException | None, broken: bool) -> None:
        if self._pending is pending:
            self._pending = None
        if error is not None:
            self._errors += 1
        if broken:
            self._closed = True
            self._stream.shutdown()

    def _release_if_closed(self) -> None:
        """Free the descriptor unless a thread is using it; that thread comes here when it is done."""
        if self._closed and self._driving.acquire(blocking=False):
            try:
                if self._pending is not None:
                    self._pending.fail(ClosedError(f"connection to {self.peer} was closed"))
                self._stream.close()
            finally:
                self._driving.release()


class PendingCall:
    """A call whose request is sent and whose reply is awaited."""

    def __init__(self, connection: Connection, exchange: Exchange) -> None:
        self._connection = connection
        self._exchange = exchange
        self._reply: Reply | None = None
        self._error: RpcError | None = None

    @property
    def connection(self) -> Connection:
        """The connection that carries this call."""
        return self._connection

    def done(self) -> bool:
        """Receive what has arrived, without blocking; True when `result` will not wait."""
        if not self._is_settled:
            _drive([self], 0.0)
        return self._is_settled

    def result(self, timeout_s: float) -> Reply:
        """Wait for the reply.

        Raises:
            RpcError: as Connection.call.
        """
        if not self._is_settled:
            _drive([self], timeout_s)
            if not self._is_settled:
                self.fail(self.overdue(timeout_s))
        if self._error is not None:
            raise self._error
        if self._reply is None:
            raise ClosedError("the call has no result")
        return self._reply

    def finish_sending(self, timeout_s: float) -> None:
        """Wait until the request has left."""
        _drive([self], timeout_s, until_sent=True)
        if not self._is_settled and self._exchange.sending:
            self.fail(self.overdue(timeout_s))
        if isinstance(self._error, RpcError) and not isinstance(self._error, RemoteError):
            raise self._error

    def fail(self, error: RpcError) -> None:
        """End this call with an error and close its connection."""
        self._settle(error=error, broken=True)
        self._connection._release_if_closed()

    def overdue(self, timeout_s: float) -> DeadlineExceeded:
        """Return the error for a call whose time is over."""
        return DeadlineExceeded(
            f"{self._connection.peer} at {self._connection._stream.peer_address}:"
            f" {self._exchange.progress()} within {timeout_s:g} s"
        )

    @property
    def _is_settled(self) -> bool:
        return self._reply is not None or self._error is not None

    def _settle(
        self, *, reply: Reply | None = None, error: RpcError | None = None, broken: bool = False
    ) -> None:
        if not self._is_settled:
            self._reply, self._error = reply, error
            self._connection._settled(self, error, broken)

    def _advance(self) -> bool:
        """Move bytes; True if this call has to wait or is settled. The caller holds the connection."""
        try:
            waits = self._exchange.advance()
            if self._exchange.done:
                self._settle(reply=self._exchange.result(), broken=self._exchange.connection_broken)
        except RemoteError as error:
            self._settle(error=error, broken=self._exchange.connection_broken)
        except RpcError as error:
            self._settle(error=error, broken=True)
        else:
            return waits
        return True


def wait_any(pending: Sequence[PendingCall], timeout_s: float) -> list[PendingCall]:
    """Wait until at least one call is done; return those that are, none when the time is over."""
    settled = [call for call in pending if call.done()]
    if settled or not pending:
        return settled
    _drive(pending, timeout_s, until_any=True)
    return [call for call in pending if call._is_settled]


def call_all(calls: Sequence[OutCall], *, timeout_s: float) -> list[Reply | RpcError]:
    """Make one call on each of several connections at once; errors stand in their places."""
    outcomes: list[Reply | RpcError | None] = [None] * len(calls)
    begun: dict[int, PendingCall] = {}
    for index, call in enumerate(calls):
        try:
            begun[index] = call.connection._begin(Request(call.meta, call.payload, call.into))
        except RpcError as error:
            outcomes[index] = error
    _drive(list(begun.values()), timeout_s)
    for index, pending in begun.items():
        if not pending._is_settled:
            pending.fail(pending.overdue(timeout_s))
        outcomes[index] = pending._reply or pending._error
    return [outcome for outcome in outcomes if outcome is not None]


def _drive(
    calls: Sequence[PendingCall],
    timeout_s: float,
    *,
    until_sent: bool = False,
    until_any: bool = False,
) -> None:
    """Move bytes of all calls until all are settled (or sent, or one is settled) or the time is over."""
    held = [call for call in calls if call._connection._driving.acquire(blocking=False)]
    if len(held) < len(calls):
        for call in held:
            call._connection._driving.release()
        raise BusyError("another thread is waiting on one of these calls")
    try:
        _drive_held(held, time.monotonic() + timeout_s, until_sent, until_any)
    except BaseException:
        # Interrupted between two bytes of a frame: these connections cannot be used again.
        for call in held:
            call._settle(error=ClosedError("the call was interrupted"), broken=True)
        raise
    finally:
        for call in held:
            call._connection._driving.release()
            call._connection._release_if_closed()


def _drive_held(
    calls: Sequence[PendingCall], deadline: float, until_sent: bool, until_any: bool
) -> None:
    open_calls = [call for call in calls if not call._is_settled]
    while open_calls:
        must_wait = True
        for call in open_calls:
            must_wait &= call._advance()
        left = [call for call in open_calls if not call._is_settled]
        if until_any and len(left) < len(calls):
            return
        if until_sent:
            left = [call for call in left if call._exchange.sending]
        open_calls = left
        if open_calls:
            timeout_s = deadline - time.monotonic()
            if timeout_s <= 0:
                return
            if must_wait:
                _wait(open_calls, timeout_s)


def _wait(calls: Sequence[PendingCall], timeout_s: float) -> None:
    wanted = [
        (call._connection._stream, call._exchange.receiving, call._exchange.sending)
        for call in calls
    ]
    # Closed by another thread: the next attempt to move bytes says so.
    with contextlib.suppress(ClosedError):
        if len(wanted) == 1:
            stream, read, write = wanted[0]
            stream.wait(read=read, write=write, timeout_s=timeout_s)
        else:
            wait_streams(wanted, timeout_s)


def connect(
    endpoint: Endpoint,
    identity: Identity,
    credentials: Credentials,
    *,
    expect: Role | None = None,
    timeout_s: float = 5.0,
    limits: Limits = _DEFAULT_LIMITS,
    options: SocketOptions = DEFAULT_OPTIONS,
) -> Connection:
    """Connect by the best way that works: in-process name, Unix socket on the same host, TCP.

    Args:
        endpoint: where the peer listens.
        identity: who this side is.
        credentials: the cluster's secret; both sides prove that they know it.
        expect: role that the peer must have.
        timeout_s: for connecting and the handshake together.
        limits: what this side accepts from the peer.
        options: socket buffers.

    Raises:
        AuthError: the peer has another token, or another role than expected.
        PeerGone: nothing listens there, or it closed.
        DeadlineExceeded: it did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    for attempt in (1, 2):
        stream = _dial(endpoint, deadline, options)
        try:
            session = _authenticate(stream, ClientHandshake(identity, credentials), deadline)
            if session is not None:
                if expect is not None and session.peer.role != expect:
                    raise AuthError(
                        f"expected a {expect.value} at {endpoint}, found {session.peer}"
                    )
                return Connection(stream, session, limits)
        except BaseException:
            stream.close()
            raise
        stream.close()
        # A server that dies just after the proof looks like a refusal; a dead one does not listen a second time.
        if attempt == 2:
            raise AuthError(mismatch_text(credentials))
    raise PeerGone(f"{endpoint} closed the connection")


def _dial(endpoint: Endpoint, deadline: float, options: SocketOptions) -> Stream:
    if endpoint.inproc:
        return dial_inproc(endpoint.inproc)
    if endpoint.unix_path and endpoint.boot_id == boot_id():
        try:
            return dial_unix(endpoint.unix_path, deadline=deadline, options=options)
        except PeerGone:
            # Same kernel, but another mount namespace, or the socket's directory is gone.
            if not endpoint.port:
                raise
    return dial_tcp(endpoint.host, endpoint.port, deadline=deadline, options=options)


def _authenticate(stream: Stream, handshake: ClientHandshake, deadline: float) -> Session | None:
    """Run the handshake; None if the peer closed after our proof."""
    while handshake.session is None:
        try:
            answer = handshake.feed(_receive_exactly(stream, handshake.wanted, deadline))
        except PeerGone:
            if handshake.proof_sent:
                return None
            raise
        if answer:
            _send_all(stream, answer, deadline)
    return handshake.session


def _receive_exactly(stream: Stream, num_bytes: int, deadline: float) -> bytes:
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        count = stream.recv_into(view[at:])
        if count is None:
            _wait_handshake(stream, deadline, read=True)
        else:
            at += count
    return bytes(data)


def _send_all(stream: Stream, data: bytes, deadline: float) -> None:
    view = memoryview(data)
    while view:
        count = stream.sendmsg([view])
        if count is None:
            _wait_handshake(stream, deadline, read=False)
        else:
            view = view[count:]


def _wait_handshake(stream: Stream, deadline: float, *, read: bool) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0 or not stream.wait(read=read, write=not read, timeout_s=left_s):
        raise DeadlineExceeded(f"{stream.peer_address} did not finish the handshake in time")
