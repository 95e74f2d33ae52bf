"""Negotiation of the stream after the handshake: unchanged, AES-GMAC records, or shared memory.

Covers: which options a side offers on a transport, which stream both sides then use.
Does not: the records (gmac_stream), the rings (shm_stream), the agreement (auth.handshake).
Threads: the one that owns the stream.
"""

from __future__ import annotations

from rpc.auth.handshake import HandshakeOptions, Session
from rpc.limits import Limits
from rpc.transport.gmac_stream import SealedStream
from rpc.transport.memfd import cannot_share
from rpc.transport.shm_stream import share
from rpc.transport.stream import SocketStream, Stream


def options_for(transport: str, limits: Limits) -> HandshakeOptions:
    """Return the options that a side offers in its handshake.

    Args:
        transport: the stream's `transport`; only "unix" can become shared memory.
        limits: limits of this side.
    """
    if transport == "unix" and limits.shared_ring_bytes and not cannot_share():
        return HandshakeOptions.SHARE
    return HandshakeOptions.NONE


def upgraded(
    stream: Stream, session: Session, limits: Limits, deadline_s: float, *, first: bool = False
) -> Stream:
    """Return the stream to use after the handshake.

    A Unix socket becomes shared memory if both sides can; TCP becomes AES-GMAC records if both
    sides have agreed to authenticate every byte; any other stream stays as it is.

    Args:
        stream: the stream of the handshake.
        session: the handshake's result.
        limits: limits of this side.
        deadline_s: in seconds of time.monotonic.
        first: whether this is the server's side.

    Raises:
        TransportError, ProtocolError: see share.
    """
    if session.options & HandshakeOptions.PAYLOAD and stream.transport == "tcp":
        return SealedStream(stream, session)
    if not session.options & HandshakeOptions.SHARE or not isinstance(stream, SocketStream):
        return stream
    return share(stream, limits, first=first, deadline_s=deadline_s) or stream
