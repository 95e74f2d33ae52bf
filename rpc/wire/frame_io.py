"""Frame I/O: non-blocking reader and writer, and a server's channel that waits with a budget.

Covers: a small receive buffer for headers and metas (payload goes straight to its destination),
sending from the caller's buffers without joining them, the time that a slow peer may take.
Does not: the layout (frame), what a call is (client.call_io, server.request).
Threads: one thread at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rpc.auth.handshake import Session
from rpc.errors import DeadlineExceeded, RpcError
from rpc.limits import Limits
from rpc.transport.stream import IOV_MAX, Stream
from rpc.wire.frame import HEADER_BYTES, META_LEN_AT, Frame, FrameKind, Opener, Sealer

Buffer = bytes | bytearray | memoryview | npt.NDArray[Any]

_STAGING_BYTES = 8 * 1024
_SCRATCH_BYTES = 256 * 1024


class FrameReader:
    """Reads frames: `next_frame`, then `read_payload` until the frame's payload is complete.

    Args:
        stream: where the bytes come from.
        opener: checks each frame's MAC and sizes.
    """

    def __init__(self, stream: Stream, opener: Opener) -> None:
        self.received_bytes = 0
        self.start = self.end = 0
        """Bounds of the staged bytes, of a next frame or of this frame's payload; equal: none."""
        self._stream = stream
        self._opener = opener
        self._max_meta_bytes = opener.max_meta_bytes
        self._staging = memoryview(bytearray(_STAGING_BYTES))

    @property
    def mid_frame(self) -> bool:
        """Whether bytes of a next frame have arrived, or of the record that begins it."""
        return self.end > self.start or self._stream.is_mid_record

    def next_frame(self) -> Frame | None:
        """Return the next frame without its payload; None if more bytes must arrive first."""
        while True:
            start, staged = self.start, self.end - self.start
            needed = HEADER_BYTES
            if staged >= HEADER_BYTES:
                meta_at = start + HEADER_BYTES
                header = bytes(self._staging[start:meta_at])
                meta_bytes = META_LEN_AT.unpack_from(header)[0]
                needed += meta_bytes
                if meta_bytes > self._max_meta_bytes:
                    raise self._opener.too_long(meta_bytes)
                if staged >= needed:
                    self.start = end = start + needed
                    return self._opener.open(header, bytes(self._staging[meta_at:end]))
            if staged:
                self._make_room(needed)
            else:
                self.start = self.end = 0
            count = self._stream.recv_into(self._staging[self.end :])
            if count is None:
                return None
            self.end += count
            self.received_bytes += count

    def read_payload(self, view: memoryview) -> int | None:
        """Receive payload into a view; it is not empty and not longer than the payload's rest."""
        start = self.start
        staged = self.end - start
        if staged:
            count = min(staged, len(view))
            view[:count] = self._staging[start : start + count]
            self.start = start + count
            return count
        received = self._stream.recv_into(view)
        if received is not None:
            self.received_bytes += received
        return received

    def _make_room(self, needed: int) -> None:
        staged = self.end - self.start
        if self.start + needed <= len(self._staging) and self.end < len(self._staging):
            return
        kept = bytes(self._staging[self.start : self.end])
        if needed > len(self._staging):
            self._staging = memoryview(bytearray(needed))
        self._staging[:staged] = kept
        self.start, self.end = 0, staged


class FrameWriter:
    """Sends frames from the buffers they are in.

    Args:
        stream: where the bytes go.
        sealer: makes each frame's header and MAC.
    """

    def __init__(self, stream: Stream, sealer: Sealer) -> None:
        self.sent_bytes = 0
        self.pending = False
        """Whether bytes are left to send."""
        self._stream = stream
        self._sealer = sealer
        self._views: list[memoryview] = []
        self._at = 0
        self._num_bytes = 0

    def queue(
        self,
        kind: FrameKind,
        request_id: int,
        meta: bytes,
        payload: Sequence[memoryview] = (),
        *,
        more: bool = False,
    ) -> None:
        """Append one frame to what is pending.

        Args:
            kind: kind of the frame.
            request_id: chosen by the client.
            meta: encoded message.
            payload: flat byte views; they must stay unchanged until they are sent.
            more: whether further frames of this message follow.
        """
        payload_bytes = sum(map(len, payload)) if payload else 0
        head = self._sealer.seal(kind, request_id, meta, payload_bytes, more=more)
        self._views += (memoryview(head), *payload)
        self._num_bytes += len(head) + payload_bytes
        self.pending = True

    def send_some(self) -> bool:
        """Make one attempt to send what is pending; False if it would block."""
        views = self._views
        several = self._at or len(views) > IOV_MAX
        sent = self._stream.sendmsg(views[self._at : self._at + IOV_MAX] if several else views)
        if sent is None:
            return False
        self.sent_bytes += sent
        if sent == self._num_bytes:
            self._views, self._at, self._num_bytes, self.pending = [], 0, 0, False
            return True
        self._num_bytes -= sent
        while sent:
            view = views[self._at]
            if sent < len(view):
                views[self._at] = view[sent:]
                return True
            sent -= len(view)
            self._at += 1
        return True


class Budget:
    """Bounds how long this side waits for a peer that sends or receives a number of bytes.

    At most `stall_timeout_s` without any byte, and in total `stall_timeout_s` plus the bytes at
    `min_bytes_per_s`. Only waiting counts: a handler's time between reads does not.

    Args:
        limits: has both bounds.
        num_bytes: to be moved.
        what: names them in the error.
    """

    def __init__(self, limits: Limits, num_bytes: int, what: str) -> None:
        self._limits = limits
        self._stall_s = limits.stall_timeout_s
        self._left_s = limits.stall_timeout_s + num_bytes / limits.min_bytes_per_s
        self._what = what

    def wait(self, stream: Stream, *, read: bool, write: bool) -> None:
        """Wait until the stream is ready.

        Args:
            stream: what is waited for.
            read: wait for bytes to read.
            write: wait for room to write; with `read`, either is enough.

        Raises:
            DeadlineExceeded: the budget is used up.
        """
        began = time.monotonic()
        timeout_s = min(self._stall_s, self._left_s)
        ready = stream.wait(read=read, write=write, timeout_s=timeout_s)
        self._left_s -= time.monotonic() - began
        if not ready or self._left_s <= 0:
            raise DeadlineExceeded(
                f"{stream.peer_address} was too slow with {self._what}"
                f" (stall_timeout_s={self._limits.stall_timeout_s:g},"
                f" min_bytes_per_s={self._limits.min_bytes_per_s}); is it frozen, or the network?"
            )


class FrameChannel:
    """Server's side of an authenticated connection: waits for the peer, with a budget per frame.

    Args:
        stream: authenticated.
        session: has the keys of both directions.
        limits: what this side accepts.
    """

    def __init__(self, stream: Stream, session: Session, limits: Limits) -> None:
        self.stream = stream
        self.reader = FrameReader(stream, Opener(session.receive_key, limits))
        self.writer = FrameWriter(stream, Sealer(session.send_key))
        self.broken: RpcError | None = None
        """Why this connection cannot be used any more; a handler may have swallowed the error."""
        self._limits = limits
        self._payload_bytes = 0
        self._payload_budget: Budget | None = None

    def receive_frame(self) -> Frame:
        """Return the next frame; waits for ever for its first byte, not for the others."""
        reader, budget = self.reader, None
        while True:
            if not reader.mid_frame:
                # Between calls the next one is rarely there already: poll first.
                self.stream.wait(read=True, write=False, timeout_s=math.inf)
            frame = reader.next_frame()
            if frame is not None:
                self._payload_bytes, self._payload_budget = frame.payload_bytes, None
                return frame
            if reader.mid_frame:
                budget = budget or Budget(self._limits, 0, "the rest of a frame's header")
                budget.wait(self.stream, read=True, write=False)

    def read_into(self, view: memoryview) -> None:
        """Fill the view with payload of the current frame."""
        at = 0
        try:
            while at < len(view):
                count = self.reader.read_payload(view[at:] if at else view)
                if count is None:
                    self._wait_for_payload()
                else:
                    at += count
        except RpcError as error:
            self.broken = error
            raise

    def _wait_for_payload(self) -> None:
        if self._payload_budget is None:
            what = "the payload of a request"
            self._payload_budget = Budget(self._limits, self._payload_bytes, what)
        self._payload_budget.wait(self.stream, read=True, write=False)

    def discard(self, num_bytes: int) -> None:
        """Read and drop payload of the current frame."""
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes:
            part = scratch[: min(num_bytes, len(scratch))]
            self.read_into(part)
            num_bytes -= len(part)

    def send_frame(
        self,
        kind: FrameKind,
        request_id: int,
        meta: bytes,
        payload: Sequence[memoryview] = (),
        *,
        more: bool = False,
    ) -> None:
        """Send one whole frame; arguments: see `FrameWriter.queue`.

        Raises:
            DeadlineExceeded: the peer takes the bytes too slowly.
            PeerGone: the peer closed.
        """
        self.writer.queue(kind, request_id, meta, payload, more=more)
        budget: Budget | None = None
        try:
            while self.writer.pending:
                if not self.writer.send_some():
                    num_bytes = sum(len(view) for view in payload)
                    budget = budget or Budget(self._limits, num_bytes, "taking a reply")
                    budget.wait(self.stream, read=False, write=True)
        except RpcError as error:
            self.broken = error
            raise


def as_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Return flat byte views of the buffers that are not empty, without copying.

    Raises:
        ValueError: an array is not C-contiguous.
    """
    views = []
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, np.ndarray):
            if not buffer.flags.c_contiguous:
                raise ValueError(
                    f"buffer {index} (shape {buffer.shape}, strides {buffer.strides}) is not"
                    " C-contiguous; pass numpy.ascontiguousarray(...)"
                )
            view = buffer.reshape(-1).view(np.uint8).data if buffer.size else memoryview(b"")
        else:
            view = buffer if type(buffer) is memoryview else memoryview(buffer)
        if view.nbytes:
            views.append(view if view.format == "B" and view.ndim == 1 else view.cast("B"))
    return views
