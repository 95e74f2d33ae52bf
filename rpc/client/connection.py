"""RPC connection: connects to a process and calls it; waits for several calls in one thread.

Covers: the public face of a connection.
Does not: reach the peer (connect), wait (pending_call), move bytes (call_io, wire.frame_io).
Threads: none of its own. A connection carries one call at a time; `close` may come from any thread
and ends the call under way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rpc.auth.handshake import Credentials, Identity, Role, Session
from rpc.client.call_io import Reply
from rpc.client.connect import dial
from rpc.client.pending_call import BaseConnection, PendingCall, wait_any
from rpc.endpoint import Endpoint
from rpc.errors import AuthError
from rpc.limits import DEFAULT_LIMITS, Limits
from rpc.transport.stream import Stream
from rpc.transport.tls_stream import TlsStream
from rpc.wire.frame_io import Buffer

__all__ = [
    "Buffer",
    "Connection",
    "ConnectionStats",
    "PendingCall",
    "Reply",
    "connect",
    "wait_any",
]


@dataclass(frozen=True, slots=True)
class ConnectionStats:
    """Totals since the connection was made; bytes include frame headers."""

    calls: int
    errors: int
    """Calls that ended in any RpcError, refusals by the handler included."""
    bytes_sent: int
    bytes_received: int


class Connection(BaseConnection):
    """An authenticated connection to one peer; made by `connect`.

    After a TransportError (a passed deadline is one) or a ProtocolError it is closed; a RemoteError
    leaves it usable.

    Args:
        stream: after the handshake.
        session: what the handshake has agreed on: the peer, keys, options.
        limits: sizes and times of this side.
    """

    def __init__(self, stream: Stream, session: Session, limits: Limits = DEFAULT_LIMITS) -> None:
        super().__init__(stream, session, limits)
        self.transport: str = stream.transport

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return f"<Connection to {self.peer} at {self.stream.peer_address}, {state}>"

    @property
    def is_nearly_used(self) -> bool:
        """Whether its keys are good for few more bytes: who keeps it replaces it between two calls.

        It still carries 64 GiB in one direction, and then breaks.
        """
        return isinstance(self.stream, TlsStream) and self.stream.is_nearly_used

    def peer_closed(self) -> bool:
        """Return, without a call, whether either side has closed. A silent peer counts as open."""
        return self.closed or self.stream.peer_closed()

    def call(
        self,
        meta: bytes,
        payload: Sequence[Buffer] = (),
        *,
        into: Sequence[Buffer] | None = None,
        timeout_s: float,
    ) -> Reply:
        """Send a request and return its reply, sending and receiving at the same time.

        Args:
            meta: small encoded message for the handler.
            payload: contiguous buffers, sent in order without a copy; leave them alone meanwhile.
            into: writable buffers that the reply's payload fills exactly, in order.
            timeout_s: for the whole call.

        Raises:
            RemoteError: the handler refused; the connection stays usable.
            TransportError: the peer is gone or the time is over; the connection is closed.
            ProtocolError: the peer's bytes are wrong; the connection is closed.
            LimitExceeded: the request is too large; nothing was sent, the connection stays usable.
            ConnectionClosed: the connection was closed before.
        """
        return self.begin(meta, payload, into=into).result(timeout_s)

    def start(
        self,
        meta: bytes,
        payload: Sequence[Buffer] = (),
        *,
        into: Sequence[Buffer] | None = None,
        timeout_s: float,
    ) -> PendingCall:
        """Send a request and return without its reply.

        Meant for small replies: a large one fills the kernel's buffers, and a server closes a
        connection on which it cannot send for long.

        Args:
            meta: small encoded message for the handler.
            payload: contiguous buffers, sent in order without a copy.
            into: writable buffers that the reply's payload fills exactly, in order.
            timeout_s: for sending.

        Raises:
            TransportError, ProtocolError, ConnectionClosed: as `call`.
        """
        pending = self.begin(meta, payload, into=into)
        pending.finish_sending(timeout_s)
        return pending

    def stats(self) -> ConnectionStats:
        """Return totals so far."""
        return ConnectionStats(
            self.calls, self.errors, self.writer.sent_bytes, self.reader.received_bytes
        )


def connect(
    endpoint: Endpoint,
    identity: Identity,
    credentials: Credentials,
    *,
    expect: Role | Identity | None = None,
    timeout_s: float = 5.0,
    limits: Limits = DEFAULT_LIMITS,
) -> Connection:
    """Connect by the fastest transport that works: in-process, Unix socket on the same host, TCP.

    Args:
        endpoint: where the peer listens.
        identity: who this side is.
        credentials: the cluster's secret; both sides prove that they know it.
        expect: role that the peer must have, or also its rank and least generation.
        timeout_s: for connecting and the handshake together.
        limits: what this side accepts from the peer.

    Raises:
        AuthError: the peer has another token, or is another one than expected.
        VersionMismatch: the peer has the token and runs another release.
        PeerGone: nothing listens there, or it closed.
        DeadlineExceeded: it did not answer in time.
    """
    stream, session = dial(endpoint, identity, credentials, limits, time.monotonic() + timeout_s)
    if expect is not None and not _is_expected(session.peer, expect):
        stream.close()
        wanted = f"a {expect.value}" if isinstance(expect, Role) else _attempt_text(expect)
        raise AuthError(
            f"expected {wanted} at {endpoint}, found {_attempt_text(session.peer)}; check the "
            "roster"
        )
    return Connection(stream, session, limits)


def _is_expected(peer: Identity, expect: Role | Identity) -> bool:
    if isinstance(expect, Role):
        return peer.role is expect
    same = (peer.role, peer.rank) == (expect.role, expect.rank)
    return same and peer.generation >= expect.generation


def _attempt_text(peer: Identity) -> str:
    return f"{peer} generation {peer.generation}"
