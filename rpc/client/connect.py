"""Connecting to a process: picks the transport, then runs the client's side of the handshake.

Covers: in-process name, Unix socket or shared memory on the same host, TCP, TLS over TCP; one
deadline over all of it, except the look-up of a host's name, which has the resolver's own.
Does not: calls (connection).
Threads: any.
"""

from __future__ import annotations

import logging
import time

from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import ClientHandshake, Credentials, Identity, Session, mismatch_text
from rpc.endpoint import Endpoint, boot_id
from rpc.errors import AuthError, DeadlineExceeded, PeerGone
from rpc.limits import Limits
from rpc.transport.inproc import dial_inproc
from rpc.transport.memfd import cannot_share
from rpc.transport.negotiate import options_for, upgraded
from rpc.transport.stream import Stream, dial_tcp, dial_unix
from rpc.transport.tls_stream import TlsStream

_log = logging.getLogger(__name__)


def dial(
    endpoint: Endpoint,
    identity: Identity,
    credentials: Credentials,
    limits: Limits,
    deadline_s: float,
) -> tuple[Stream, Session]:
    """Return an authenticated stream, and the session of its handshake.

    Args:
        endpoint: where the peer listens.
        identity: this process.
        credentials: the cluster's secret.
        limits: what this side accepts.
        deadline_s: in seconds of time.monotonic, for connecting and the handshake together.

    Raises:
        AuthError: the peer does not know the secret, closed after the client's proof, or is
            another role or rank than its certificate says.
        VersionMismatch: the peer knows the secret and speaks another version.
        PeerGone: nothing listens there, or the peer closed.
        DeadlineExceeded: the peer did not answer in time.
    """
    # A server that dies just after the proof looks like one that refuses it. So try a second time:
    # a dead server does not listen any more, and the caller can tell a restart from a wrong token.
    for _ in range(2):
        stream = _reach(endpoint, credentials, deadline_s, limits)
        try:
            options = options_for(stream.transport, limits)
            handshake = ClientHandshake(
                identity, credentials, options=options, is_remote=not endpoint.is_near
            )
            session = _authenticate(stream, handshake, deadline_s)
            if session is not None:
                if isinstance(stream, TlsStream):
                    stream.check_peer(session.peer)
                stream = upgraded(stream, session, limits, deadline_s)
        except BaseException:
            stream.close()
            raise
        if session is not None:
            _log.info(
                "%s at %s is reached %s",
                session.peer,
                endpoint,
                transport_text(stream.transport, endpoint),
            )
            return stream, session
        stream.close()
    over_tls = f"; or its certificate is not for {identity}" if credentials.tls is not None else ""
    raise AuthError(f"{endpoint}: {mismatch_text(credentials)}{over_tls}")


def _reach(
    endpoint: Endpoint, credentials: Credentials, deadline_s: float, limits: Limits
) -> Stream:
    if endpoint.inproc:
        return dial_inproc(endpoint.inproc)
    if endpoint.unix_path and endpoint.boot_id == boot_id():
        try:
            return dial_unix(endpoint.unix_path, limits=limits)
        except PeerGone:
            # The same kernel, but another mount namespace, or the socket's directory is gone.
            if not endpoint.port:
                raise
    stream = dial_tcp(endpoint.host, endpoint.port, deadline_s=deadline_s, limits=limits)
    if credentials.tls is None:
        return stream
    return _secured(stream, credentials.tls, credentials.cluster_id, deadline_s)


def _secured(stream: Stream, keys: TlsCredentials, cluster_id: str, deadline_s: float) -> TlsStream:
    """Start TLS on a new stream, before any byte of the protocol."""
    try:
        tls = TlsStream(stream, keys, cluster_id, server_side=False)
        while not tls.shake_hands():
            _wait(tls, deadline_s, read=True)
    except AuthError as error:
        stream.close()
        raise AuthError(f"{stream.peer_address}: {error}") from error
    except BaseException:
        stream.close()
        raise
    return tls


def transport_text(transport: str, endpoint: Endpoint) -> str:
    """Return which transport a connection uses, and why not a faster one, for log lines.

    Args:
        transport: the stream's `transport`, for example "tcp".
        endpoint: the peer.
    """
    if transport == "unix":
        return f"by its Unix socket: {cannot_share() or 'one of both shares no memory'}"
    if not transport.startswith("tcp"):
        return "through shared memory" if transport == "shm" else "in this process"
    name = "by TLS" if transport == "tcp+tls" else "by TCP"
    if not endpoint.unix_path:
        return f"{name}: it has no Unix socket"
    if endpoint.boot_id != boot_id():
        return f"{name}: it is on another host"
    return f"{name}: its Unix socket cannot be reached from here"


def _authenticate(stream: Stream, handshake: ClientHandshake, deadline_s: float) -> Session | None:
    """Run the handshake; None if the peer closed after our proof."""
    while handshake.session is None:
        try:
            answer = handshake.feed(_receive_exactly(stream, handshake.wanted, deadline_s))
        except (PeerGone, DeadlineExceeded) as error:
            if not handshake.proof_sent:
                raise type(error)(
                    f"{error}; it sent nothing: it is frozen, is ending, or waits for TLS"
                    " (security='tls')"
                ) from error
            if isinstance(error, PeerGone):
                return None
            raise
        if answer:
            _send_all(stream, answer, deadline_s)
    return handshake.session


def _receive_exactly(stream: Stream, num_bytes: int, deadline_s: float) -> bytes:
    data = bytearray(num_bytes)
    view, at = memoryview(data), 0
    while at < num_bytes:
        count = stream.recv_into(view[at:])
        if count is None:
            _wait(stream, deadline_s, read=True)
        else:
            at += count
    return bytes(data)


def _send_all(stream: Stream, data: bytes, deadline_s: float) -> None:
    view = memoryview(data)
    while view:
        count = stream.sendmsg([view])
        if count is None:
            _wait(stream, deadline_s, read=False)
        else:
            view = view[count:]


def _wait(stream: Stream, deadline_s: float, *, read: bool) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0 or not stream.wait(read=read, write=not read, timeout_s=left_s):
        raise DeadlineExceeded(f"{stream.peer_address} did not finish the handshake in time")
