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
    """One request and its reply on one connection.

    The reply's payload goes into the caller's views in order, or into memory taken frame by frame.
    """

    sending = True
    """Whether request bytes are left."""
    receiving = True
    """Whether the reply is not complete."""
    connection_broken = False
    """Whether the peer closed before it took the whole request; its reply may still come."""
    is_inside_frame = False
    """Whether a frame of the reply has begun to arrive and is not complete; after `move`."""
    _frame: Frame | None = None
    _frame_left = 0
    _at = 0
    _offset = 0

    def __init__(
        self,
        request_id: int,
        request: OutgoingRequest,
        reader: FrameReader,
        writer: FrameWriter,
        limits: Limits,
    ) -> None:
        """Check the request against the limits; nothing is sent yet.

        Args:
            request_id: number of the call on its connection.
            request: the encoded message, its payload and the views for the reply's payload.
            reader: reads the connection's frames.
            writer: sends them.
            limits: largest meta, payload and reply, in bytes.

        Raises:
            LimitExceeded: the request is larger than any peer accepts.
            ValueError: a buffer is not contiguous, or `into` is not writable.
        """
        meta, into = request.meta, request.into
        payload = as_views(request.payload) if request.payload else []
        payload_bytes = sum(map(len, payload))
        if len(meta) > limits.max_meta_bytes:
            raise LimitExceeded(
                f"meta of {len(meta)} bytes exceeds max_meta_bytes={limits.max_meta_bytes}"
            )
        if payload_bytes > limits.max_payload_bytes:
            raise LimitExceeded(
                f"payload of {payload_bytes} bytes exceeds"
                f" max_payload_bytes={limits.max_payload_bytes}"
            )
        self._given = into is not None
        self._views = as_views(into) if into else []
        room = 0 if self._given else limits.max_reply_bytes
        for view in self._views:
            if view.readonly:
                raise ValueError("`into` holds a read-only buffer; replies need writable ones")
            room += len(view)
        self._room = self._max_bytes = room
        self._request_id = request_id
        self._reader = reader
        self._writer = writer
        writer.queue(FrameKind.REQUEST, request_id, meta, payload)

    def move(self) -> bool:
        """Send and receive what is possible without waiting.

        Returns:
            True if the call has to wait or is done; False if its turn is over and more can move.

        Raises:
            TransportError: the peer is gone.
            ProtocolError: the peer's bytes are wrong.
        """
        reader, writer = self._reader, self._writer
        for _ in range(_STEPS_PER_TURN):
            sent = False
            if self.sending:
                try:
                    sent = writer.send_some()
                    self.sending = writer.pending
                except PeerGone:
                    # The peer may have sent a reply with the reason before it closed: read it.
                    self.connection_broken = sent = True
                    self.sending = False
                # Right after a short request the reply cannot be there yet: poll first, it costs
                # less.
                if sent and not self.sending and self._frame is None and reader.end == reader.start:
                    return True
            # Receive also while sending: the server may reply before it has read the request.
            received = self.receiving and self._receive()
            self.is_inside_frame = self._frame_left > 0 or reader.mid_frame
            if not (sent or received) or not (self.sending or self.receiving):
                return True
        return False

    def outcome(self) -> Reply:
        """Return the reply of a call that is done.

        Raises:
            RemoteError: the handler refused.
            ProtocolError: the reply does not fill `into`.
        """
        final = self._frame
        if final is None or self.receiving:
            raise ProtocolError("the reply is not complete")
        if final.kind is FrameKind.ERROR:
            raise decode_error(final.meta)
        if self._given or not self._views:
            return Reply(final.meta, _NOTHING)
        payload = self._views[0] if len(self._views) == 1 else memoryview(b"".join(self._views))
        return Reply(final.meta, payload)

    def progress(self) -> str:
        """Return how far the call is, for errors."""
        if self.sending:
            return "request not sent to its end"
        return "request sent, no reply" if self._frame is None else "reply not complete"

    def _receive(self) -> bool:
        """Receive a frame's head with its first payload bytes, or more of its payload."""
        reader, frame, left = self._reader, self._frame, self._frame_left
        has_bytes = True
        # Between frames: the next head has to be complete before any payload is taken.
        if not left:
            frame = reader.next_frame()
            if frame is None:
                return False
            if frame.request_id != self._request_id or frame.kind is FrameKind.REQUEST:
                raise ProtocolError(
                    f"expected a reply to request {self._request_id},"
                    f" got {frame.kind.name} of request {frame.request_id}"
                )
            self._frame, left = frame, frame.payload_bytes
            if left:
                self._make_room(left)
            # Only what came with the head: one more system call would mostly find nothing yet.
            has_bytes = reader.end > reader.start
        if left and has_bytes:
            view, offset = self._views[self._at], self._offset
            count = reader.read_payload(view[offset : offset + left])
            if count is None:
                return False
            left -= count
            self._offset = offset + count
            if self._offset == len(view):
                self._at += 1
                self._offset = 0
        self._frame_left = left
        if not left and frame is not None and not frame.more:
            # An ERROR frame has no payload, so it may leave the buffers empty.
            if self._given and self._room and frame.kind is FrameKind.REPLY:
                raise ProtocolError(
                    f"reply has {self._max_bytes - self._room} payload bytes,"
                    f" the caller's buffers hold {self._max_bytes}"
                )
            self.receiving = False
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Make room for the payload of a frame."""
        if num_bytes > self._room:
            used = self._max_bytes - self._room
            if self._given:
                raise ProtocolError(
                    f"reply has at least {used + num_bytes} payload bytes,"
                    f" the caller's buffers hold {self._max_bytes}"
                )
            raise LimitExceeded(
                f"reply has at least {used + num_bytes} payload bytes,"
                f" max_reply_bytes={self._max_bytes}; give buffers by `into`"
            )
        self._room -= num_bytes
        if not self._given:
            self._views.append(memoryview(bytearray(num_bytes)))


_NOTHING = memoryview(b"")
