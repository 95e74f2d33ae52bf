"""What a stream becomes after its handshake: the same, sealed, or shared memory.

Covers: what a side offers for the way that a peer came, what both then use.
Does not: seal (sealed_stream), share (shared_stream), agree (handshake).
Threads: the one that has the stream.
"""

from __future__ import annotations

from rpc.auth.handshake import Options, Session
from rpc.limits import Limits
from rpc.transport.gmac_stream import SealedStream
from rpc.transport.memfd import cannot_share
from rpc.transport.shm_stream import share
from rpc.transport.stream import SocketStream, Stream


def options_for(transport: str, limits: Limits) -> Options:
    """Return what a side offers in its handshake over a stream of this kind."""
    if transport == "unix" and limits.shared_ring_bytes and not cannot_share():
        return Options.SHARE
    return Options.NONE


def upgraded(
    stream: Stream, session: Session, limits: Limits, deadline: float, *, first: bool = False
) -> Stream:
    """Return the stream to use after the handshake: what both sides can and want.

    On one host through shared memory; over TCP with all bytes authenticated if they agreed to.

    Args:
        stream: what the handshake went over.
        session: its result.
        limits: of this side.
        deadline: monotonic.
        first: this is the server's side.

    Raises:
        TransportError, ProtocolError: see share.
    """
    if session.options & Options.PAYLOAD and stream.transport == "tcp":
        return SealedStream(stream, session)
    if not session.options & Options.SHARE or not isinstance(stream, SocketStream):
        return stream
    return share(stream, limits, first=first, deadline=deadline) or stream
