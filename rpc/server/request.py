"""RPC request at the server: what a handler reads and answers.

Threads: a call belongs to its connection's thread; only `peer_gone` may be used from another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rpc.auth.handshake import Identity
from rpc.errors import ConnectionClosed, ProtocolError
from rpc.limits import Limits
from rpc.wire.frame import Frame, FrameKind, encode_error
from rpc.wire.frame_io import Buffer, FrameChannel, as_views


class Call:
    """One request. A handler answers it exactly once, by `reply` or `fail`.

    A handler that has to wait reads its request first: a client that cannot send for 20 s loses its
    connection.

    `send` may send reply payload before the request was read to its end: clients read while they
    write.

    Args:
        peer: the client, as the handshake proved it.
        frame: the request's first frame, with its meta.
        channel: the connection; its payload is read and the reply sent there.
        limits: sizes and times of this side.
    """

    def __init__(self, peer: Identity, frame: Frame, channel: FrameChannel, limits: Limits) -> None:
        self.peer = peer
        self.meta: bytes = frame.meta
        self.payload_bytes: int = frame.payload_bytes
        self.remaining: int = frame.payload_bytes
        """Payload bytes not read yet."""
        self._request_id = frame.request_id
        self._channel = channel
        self._limits = limits
        self.answered = False
        """Whether the last frame of the reply was sent, or is being sent."""
        self.before_reply: Callable[[], None] | None = None
        """Called before the end of the reply is sent; what it raises is the answer instead."""

    def read_into(self, view: memoryview) -> None:
        """Fill the view with the next payload bytes, straight from the socket.

        Raises:
            ProtocolError: the request has fewer bytes left than the view takes.
            TransportError: the peer is gone or too slow.
        """
        flat = view if view.format == "B" and view.ndim == 1 else view.cast("B")
        if len(flat) > self.remaining:
            raise ProtocolError(
                f"{self.peer} announced {self.payload_bytes} payload bytes;"
                f" {self.remaining} are left, {len(flat)} expected"
            )
        # Count first: after an error inside the read, no later read may continue at that place.
        self.remaining -= len(flat)
        self._channel.read_into(flat)

    def discard_rest(self) -> None:
        """Read and drop what is left of the payload."""
        left, self.remaining = self.remaining, 0
        if left:
            self._channel.discard(left)

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Send a part of the reply's payload now; more follows."""
        if self.answered:
            raise _answered_before()
        self._channel.send_frame(
            FrameKind.REPLY, self._request_id, b"", as_views(buffers), more=True
        )

    def reply(self, meta: bytes, buffers: Sequence[Buffer] = ()) -> None:
        """Send the end of the reply: its meta and the last part of its payload.

        Args:
            meta: small encoded message for the client.
            buffers: contiguous; sent in order without a copy.

        Raises:
            ValueError: the meta is larger than a frame takes.
        """
        if self.answered:
            raise _answered_before()
        if len(meta) > self._limits.max_meta_bytes:
            raise ValueError(
                f"reply meta has {len(meta)} bytes, max_meta_bytes={self._limits.max_meta_bytes};"
                " large data belongs in the payload"
            )
        views = as_views(buffers) if buffers else ()
        if self.before_reply is not None:
            self.before_reply()
        self.answered = True
        self._channel.send_frame(FrameKind.REPLY, self._request_id, meta, views)

    def fail(self, code: str, message: str, details: Mapping[str, str] | None = None) -> None:
        """Answer with an error; parts of the reply that were sent are void.

        Args:
            code: `code` of an error class of the room, which the client raises again.
            message: the text of the error.
            details: further named values of the error; None: none.
        """
        if self.answered:
            raise _answered_before()
        self.answered = True
        meta = encode_error(code, message, dict(details or {}))
        self._channel.send_frame(FrameKind.ERROR, self._request_id, meta)

    def peer_gone(self) -> bool:
        """Return whether the client or this listener closed; cheap, for handlers that wait long."""
        return self._channel.stream.peer_closed()


def _answered_before() -> ConnectionClosed:
    return ConnectionClosed("this call was answered before; a handler answers exactly once")
