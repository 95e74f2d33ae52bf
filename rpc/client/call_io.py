"""One RPC call at the client: sends the request and receives the reply, without ever blocking.

Covers: sending the request while receiving the reply, placing the reply's payload in the caller's
buffers, checking the reply.
Does not: wait, deadlines, closing (pending_call).
Threads: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rpc.errors import LimitExceeded, PeerGone, ProtocolError
from rpc.limits import Limits
from rpc.wire.frame import Frame, FrameKind, decode_error
from rpc.wire.frame_io import Buffer, FrameReader, FrameWriter, as_views

_STEPS_PER_TURN = 64
"""Sends and receives before other connections get their turn: tens of MB at most."""


class Reply(msgspec.Struct, frozen=True):
    """A reply: meta and payload. `payload` is empty when the caller gave buffers for it."""

    meta: bytes
    payload: memoryview


class OutgoingRequest(msgspec.Struct, frozen=True):
    """A request: meta, payload buffers in order, and the buffers for the reply's payload."""

    meta: bytes
    payload: Sequence[Buffer] = ()
    into: Sequence[Buffer] | None = None


class Exchange:
    """One request and its reply on one connection."""

    sending = True
    """Whether request bytes are left."""
    receiving = True
    """Whether reply bytes are awaited."""
    connection_broken = False
    """Whether the peer closed before it took the whole request; its reply may still come."""
    _frame: Frame | None = None
    _frame_left = 0

    def __init__(
        self,
        request_id: int,
        request: OutgoingRequest,
        reader: FrameReader,
        writer: FrameWriter,
        limits: Limits,
    ) -> None:
        """Check the request against the limits; nothing is sent yet.

        Raises:
            LimitExceeded: the request is larger than any peer accepts.
            ValueError: a buffer is not contiguous, or `into` is not writable.
        """
        views = as_views(request.payload) if request.payload else []
        payload_bytes = sum(map(len, views)) if views else 0
        if len(request.meta) > limits.max_meta_bytes:
            raise LimitExceeded(
                f"meta of {len(request.meta)} bytes exceeds max_meta_bytes={limits.max_meta_bytes}"
            )
        if payload_bytes > limits.max_payload_bytes:
            raise LimitExceeded(
                f"payload of {payload_bytes} bytes exceeds"
                f" max_payload_bytes={limits.max_payload_bytes}"
            )
        self._sink = _Sink(request.into, limits.max_reply_bytes)
        self._request_id = request_id
        self._reader = reader
        self._writer = writer
        writer.queue(FrameKind.REQUEST, request_id, request.meta, views)

    @property
    def mid_frame(self) -> bool:
        """Whether a frame of the reply has begun to arrive and is not complete."""
        return self._frame_left > 0 or (self.receiving and self._reader.mid_frame)

    def advance(self) -> bool:
        """Move what can be moved; True if now it has to wait or is done, False if its turn is over.

        Raises:
            TransportError: the peer is gone.
            ProtocolError: the peer's bytes are wrong.
        """
        for _ in range(_STEPS_PER_TURN):
            sent = self.sending and self._send()
            # Right after a short request the reply cannot be there yet: poll first, it costs less.
            if sent and not self.sending and self._frame is None and not self._reader.mid_frame:
                return True
            received = self.receiving and self._receive()
            if not (sent or received) or not (self.sending or self.receiving):
                return True
        return False

    def result(self) -> Reply:
        """Return the reply of a call that is done.

        Raises:
            RemoteError: the handler refused.
            ProtocolError: the reply does not fill `into`.
        """
        final = self._frame
        if final is None or self.receiving:
            raise ProtocolError("the reply is not complete")
        if final.kind == FrameKind.ERROR:
            raise decode_error(final.meta)
        return Reply(final.meta, self._sink.payload())

    def progress(self) -> str:
        """Say how far the call is, for messages."""
        if self.sending:
            return "request not sent to its end"
        return "request sent, no reply" if self._frame is None else "reply not complete"

    def _send(self) -> bool:
        try:
            sent = self._writer.send_some()
        except PeerGone:
            # The reason for the end may stand in a reply that is still to be read.
            self.connection_broken = True
            self.sending = False
            return True
        self.sending = self._writer.pending
        return sent

    def _receive(self) -> bool:
        left = self._frame_left
        if left:
            count = self._sink.fill(self._reader, left)
            if count is None:
                return False
            frame, left = self._frame, left - count
        else:
            frame = self._reader.next_frame()
            if frame is None:
                return False
            left = self._begin_frame(frame)
        self._frame_left = left
        if left == 0 and frame is not None and not frame.more:
            if frame.kind is FrameKind.REPLY:
                self._sink.check_full()
            self.receiving = False
        return True

    def _begin_frame(self, frame: Frame) -> int:
        """Check a frame and take what has arrived with it; return the payload bytes left."""
        if frame.request_id != self._request_id or frame.kind == FrameKind.REQUEST:
            raise ProtocolError(
                f"expected a reply to request {self._request_id},"
                f" got {frame.kind.name} of request {frame.request_id}"
            )
        self._frame = frame
        left = frame.payload_bytes
        if left:
            self._sink.expect(left)
            if self._reader.mid_frame:
                left -= self._sink.fill(self._reader, left) or 0
        return left


class _Sink:
    """Where reply payload goes: the caller's views in order, or memory taken frame by frame."""

    _at = 0
    _offset = 0

    def __init__(self, into: Sequence[Buffer] | None, max_bytes: int) -> None:
        self._given = into is not None
        self._views = as_views(into) if into else []
        if self._given:
            max_bytes = 0
            for view in self._views:
                if view.readonly:
                    raise ValueError("`into` holds a read-only buffer; replies need writable ones")
                max_bytes += len(view)
        self._left = self._max_bytes = max_bytes

    def expect(self, num_bytes: int) -> None:
        """Make room for the payload of a frame."""
        if num_bytes > self._left:
            used = self._max_bytes - self._left
            if self._given:
                raise ProtocolError(
                    f"reply has at least {used + num_bytes} payload bytes,"
                    f" the caller's buffers hold {self._max_bytes}"
                )
            raise LimitExceeded(
                f"reply has at least {used + num_bytes} payload bytes,"
                f" max_reply_bytes={self._max_bytes}; give buffers by `into`"
            )
        self._left -= num_bytes
        if not self._given and num_bytes:
            self._views.append(memoryview(bytearray(num_bytes)))

    def fill(self, reader: FrameReader, num_bytes: int) -> int | None:
        """Receive at most so many bytes into the destination; None if none have arrived."""
        view, offset = self._views[self._at], self._offset
        count = reader.read_payload(view[offset : offset + num_bytes])
        if count is not None:
            self._offset = offset + count
            if self._offset == len(view):
                self._at += 1
                self._offset = 0
        return count

    def check_full(self) -> None:
        """Refuse a reply that is shorter than the caller's buffers."""
        if self._given and self._left:
            raise ProtocolError(
                f"reply has {self._max_bytes - self._left} payload bytes,"
                f" the caller's buffers hold {self._max_bytes}"
            )

    def payload(self) -> memoryview:
        """Return the payload if memory was taken for it."""
        if self._given or not self._views:
            return memoryview(b"")
        if len(self._views) == 1:
            return self._views[0]
        return memoryview(b"".join(self._views))
