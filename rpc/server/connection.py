"""Served connection: the thread of one authenticated peer reads requests and runs the handler.

Covers: the request loop, the wire form of a handler's exception, draining unread payload.
Does not: accept or authenticate (authenticator), own the threads (listener).
Threads: `serve` runs in the connection's thread; `shutdown` and the counters may be used from any
thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from rpc.auth.handshake import HandshakeOptions, Session
from rpc.errors import ConnectionClosed, LimitExceeded, PeerGone, ProtocolError, RpcError
from rpc.limits import Limits
from rpc.server.request import Call
from rpc.transport.memfd import SharedMemoryQuota
from rpc.transport.negotiate import upgraded
from rpc.transport.stream import Stream
from rpc.wire.frame import Frame, FrameKind
from rpc.wire.frame_io import FrameChannel

Handler = Callable[[Call], None]

_log = logging.getLogger(__name__)


class ServedConnection:
    """Serves one peer until either side closes.

    Args:
        stream: authenticated; `serve` closes it.
        session: result of the handshake.
        handler: runs for each request and answers it.
        limits: what this side accepts.
        quota: memory that the connections of this listener may share with their peers.
    """

    def __init__(
        self,
        stream: Stream,
        session: Session,
        handler: Handler,
        limits: Limits,
        quota: SharedMemoryQuota,
    ) -> None:
        self.peer = session.peer
        self.errors = 0
        self.in_call = False
        """Whether a request is being handled or its answer sent."""
        self._stream = stream
        self._session = session
        self._handler = handler
        self._limits = limits
        self._quota = quota
        self._shared_bytes = 0
        self._channel = FrameChannel(stream, session, limits)

    def shutdown(self) -> None:
        """End the connection; wakes its thread."""
        self._stream.shutdown()

    def serve(self) -> None:
        """Answer requests until the connection ends; closes the stream."""
        try:
            self._upgrade()
            while True:
                frame = self._channel.receive_frame()
                self.in_call = True
                self._serve_one(frame)
                self.in_call = False
        except (PeerGone, ConnectionClosed) as error:
            if self._channel.reader.mid_frame:
                _log.warning("connection of %s ended inside a frame: %s", self.peer, error)
        except RpcError as error:
            self.errors += 1
            _log.warning(
                "closing connection of %s from %s: %s: %s",
                self.peer, self._stream.peer_address, type(error).__name__, error,
            )  # fmt: skip
        finally:
            self._stream.close()
            self._quota.release(self._shared_bytes)

    def _upgrade(self) -> None:
        deadline_s = time.monotonic() + self._limits.handshake_timeout_s
        limits = self._limits
        if self._session.options & HandshakeOptions.SHARE:
            both_bytes = 2 * limits.shared_ring_bytes
            if self._quota.acquire(both_bytes):
                self._shared_bytes = both_bytes
            else:
                limits = dataclasses.replace(limits, shared_ring_bytes=0)
        stream = upgraded(self._stream, self._session, limits, deadline_s, first=True)
        if stream is not self._stream:
            self._channel = FrameChannel(stream, self._session, self._limits)
            self._stream = stream
        else:
            self._quota.release(self._shared_bytes)
            self._shared_bytes = 0

    def _serve_one(self, frame: Frame) -> None:
        if frame.kind is not FrameKind.REQUEST:
            raise ProtocolError(f"expected a REQUEST, got {frame.kind.name}")
        call = Call(self.peer, frame, self._channel, self._limits)
        try:
            self._handler(call)
            if not call.answered:
                raise RuntimeError("the handler returned without an answer")
        except Exception as error:  # noqa: BLE001 - a handler's failure is the client's answer
            self._answer_failure(call, error)
        if self._channel.broken is not None:
            raise self._channel.broken
        if call.remaining:
            call.discard_rest()

    def _answer_failure(self, call: Call, error: Exception) -> None:
        if self._channel.broken is not None:
            return
        self.errors += 1
        code = _code(error)
        if call.answered:
            _log.error("handler failed after its answer to %s", self.peer, exc_info=error)
        elif code is not None:
            call.fail(code, _message(error), _details(error))
        else:
            _log.error("handler failed on a call of %s", self.peer, exc_info=error)
            call.fail("internal", f"{type(error).__name__} in the handler; see the server's log")


def _code(error: Exception) -> str | None:
    code = getattr(error, "code", None)
    if isinstance(code, str):
        return code
    if isinstance(error, LimitExceeded):
        return "limit_exceeded"
    return "protocol_error" if isinstance(error, ProtocolError) else None


def _message(error: Exception) -> str:
    message = getattr(error, "message", None)
    return message if isinstance(message, str) else str(error)


def _details(error: Exception) -> dict[str, str]:
    details = getattr(error, "details", None)
    if not isinstance(details, dict):
        return {}
    return {str(key): str(value) for key, value in details.items()}
