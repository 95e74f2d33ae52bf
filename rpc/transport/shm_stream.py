"""A stream through shared memory, for two processes of one host.

Covers: agreeing on it over a Unix socket, two rings, waking the other side, falling back.
Does not: frames (frame_io), how a segment is made safe (segment).
Threads: as every Stream.

Each side makes one segment, which it alone writes and the other one can only read:

    offset  type  field
         0  u64   bytes put into this segment's ring since the beginning
        64  u64   bytes that this side has taken out of the other side's ring
      4096        the ring; byte number n of the stream stands at n modulo its size

The Unix socket stays: a byte on it means "look again", and its end is the end of the stream. The
counters are stored after the bytes that they count, which is enough on x86 (see segment). A byte
travels by two copies, as through a socket, but both stay in the processor's cache and neither is
made by the kernel. What is taken out is private memory at once, so nobody can change it later.

A peer that lies in its counters is found by the bounds of every use; one that rings without need
costs time, as with any request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import time
from collections.abc import Sequence

import numpy as np

from rpc.errors import ConnectionClosed, DeadlineExceeded, PeerGone, ProtocolError
from rpc.limits import MAX_RING_BYTES, MIN_RING_BYTES, Limits
from rpc.transport.memfd import SharedMemory
from rpc.transport.stream import SocketStream

_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""Copied between two looks at the counters, so that both sides copy at the same time."""
_PUT, _TAKEN = 0, 8
_CONTROL_BYTES = 4096
_SMALL_BYTES = 16 * 1024
_BELL = memoryview(b"!")

_OFFER = struct.Struct("<4sIQ")
_MAGIC = b"TFRS"
_ANSWER_BYTES = 1


class SharedStream:
    """One end; made by `share` from an authenticated Unix socket."""

    transport = "shm"

    def __init__(self, bell: SocketStream, ours: SharedMemory, theirs: SharedMemory) -> None:
        self.peer_address = bell.peer_address
        self._bell = bell
        self._segments = (ours, theirs)
        self._our_counters = ours.bytes[:_CONTROL_BYTES].cast("Q")
        self._their_counters = theirs.bytes[:_CONTROL_BYTES].cast("Q")
        self._our_ring = ours.bytes[_CONTROL_BYTES:]
        self._their_ring = theirs.bytes[_CONTROL_BYTES:]
        self._put = 0
        self._taken = 0
        self._ended: PeerGone | None = None
        self._closed = False
        self._heard = memoryview(bytearray(1024))

    def sendmsg(self, views: Sequence[memoryview]) -> int | None:
        """See Stream."""
        self._check_open()
        total = self._write(views)
        if total == 0:
            self._listen()
            if self._ended is not None:
                raise self._ended
            total = self._write(views)
        return total or None

    def recv_into(self, view: memoryview) -> int | None:
        """See Stream."""
        self._check_open()
        count = self._read(view)
        if count == 0:
            # In this order: the bell rings after the counter was stored.
            self._listen()
            count = self._read(view)
            if count == 0 and self._ended is not None:
                raise self._ended
        return count or None

    def interest(self, *, read: bool, write: bool) -> list[tuple[int, int]]:
        """See Stream; what is ready already has no descriptor to wait for."""
        if self._closed or self._may_move(read=read, write=write):
            return [(-1, 0)]
        return self._bell.interest(read=True, write=False)

    def wait(self, *, read: bool, write: bool, timeout_s: float) -> bool:
        """See Stream."""
        self._check_open()
        if self._may_move(read=read, write=write):
            return True
        return self._bell.wait(read=True, write=False, timeout_s=timeout_s)

    def peer_closed(self) -> bool:
        """See Stream."""
        return self._bell.peer_closed()

    def shutdown(self) -> None:
        """See Stream."""
        self._bell.shutdown()

    def close(self) -> None:
        """See Stream."""
        self._bell.close()
        if self._closed:
            return
        self._closed = True
        for view in (
            self._our_counters, self._their_counters, self._our_ring, self._their_ring
        ):  # fmt: skip
            view.release()
        for segment in self._segments:
            segment.close()

    def _write(self, views: Sequence[memoryview]) -> int:
        """Put what fits into our ring and ring the bell."""
        free, total, since_bell = self._free(), 0, 0
        ring, size = self._our_ring, len(self._our_ring)
        for view in views:
            offset = 0
            while offset < len(view):
                at = (self._put + since_bell) % size
                count = min(len(view) - offset, free, size - at, CHUNK_BYTES)
                if count == 0:
                    break
                _copy(ring[at : at + count], view[offset : offset + count])
                offset += count
                free -= count
                total += count
                since_bell += count
                if since_bell >= CHUNK_BYTES:
                    self._publish(since_bell)
                    since_bell = 0
            if offset < len(view):
                break
        if since_bell:
            self._publish(since_bell)
        return total

    def _publish(self, num_bytes: int) -> None:
        self._put += num_bytes
        self._our_counters[_PUT] = self._put
        # A full socket is full of bells that nobody has heard yet: one more says nothing new.
        self._bell.sendmsg((_BELL,))

    def _read(self, view: memoryview) -> int:
        """Take what is there out of their ring, at most one chunk."""
        used = self._used()
        if used == 0:
            return 0
        ring, size = self._their_ring, len(self._their_ring)
        at = self._taken % size
        count = min(used, len(view), size - at, CHUNK_BYTES)
        _copy(view[:count], ring[at : at + count])
        self._taken += count
        self._our_counters[_TAKEN] = self._taken
        if 2 * used >= size:
            # Only a peer that found its ring full waits for room. Had this look found less than
            # half, then the next one finds more. Without a listener it is no error here.
            with contextlib.suppress(PeerGone):
                self._bell.sendmsg((_BELL,))
        return count

    def _may_move(self, *, read: bool, write: bool) -> bool:
        """Tell whether a move of bytes would find bytes, or room, or a lie about them."""
        is_full = self._put - self._their_counters[_TAKEN] == len(self._our_ring)
        return (read and self._their_counters[_PUT] != self._taken) or (write and not is_full)

    def _used(self) -> int:
        used = self._their_counters[_PUT] - self._taken
        if not 0 <= used <= len(self._their_ring):
            raise ProtocolError(f"{self.peer_address} says that it has put {used} bytes to read")
        return used

    def _free(self) -> int:
        used = self._put - self._their_counters[_TAKEN]
        if not 0 <= used <= len(self._our_ring):
            raise ProtocolError(f"{self.peer_address} says that it has not read {used} bytes")
        return len(self._our_ring) - used

    def _listen(self) -> None:
        """Hear the bells that have rung, and the end."""
        try:
            while self._bell.recv_into(self._heard):
                pass
        except PeerGone as error:
            self._ended = error

    def _check_open(self) -> None:
        if self._closed or self._bell.is_shut:
            raise ConnectionClosed(f"connection to {self.peer_address} was closed by this side")


def share(
    bell: SocketStream, limits: Limits, *, first: bool, deadline: float
) -> SharedStream | None:
    """Exchange segments with a peer that offers it too; None if one of both could not.

    Both sides call it right after the handshake, the server as the `first`:

        server -> client   4s "TFRS" | u32 0 | u64 ring_bytes, with the segment's descriptor
        client -> server   the same
        server -> client   u8: 1 both use the rings from now on, 0 both stay with the socket

    A side that has no segment, or cannot map the other's, says 0 bytes and passes none.

    Raises:
        TransportError: the peer is gone, or did not answer before the (monotonic) deadline.
        ProtocolError: what it passed is no sealed segment of the size that it says.
    """
    with contextlib.ExitStack() as owned:

        def kept(segment: SharedMemory | None) -> SharedMemory | None:
            if segment is not None:
                owned.callback(segment.close)
            return segment

        ours = kept(_make_offer(bell, limits.shared_ring_bytes)) if first else None
        theirs = kept(_take_offer(bell, deadline))
        if not first:
            ours = kept(_make_offer(bell, limits.shared_ring_bytes if theirs is not None else 0))
        agreed = ours is not None and theirs is not None
        if first:
            bell.send_with(bytes([agreed]), None)
        else:
            agreed &= _takes_rings(bell, deadline)
        if not agreed or ours is None or theirs is None:
            return None
        owned.pop_all()
        return SharedStream(bell, ours, theirs)


def _make_offer(bell: SocketStream, ring_bytes: int) -> SharedMemory | None:
    """Pass a new segment; without memory, or for a ring of 0 bytes, say that there is none."""
    if not ring_bytes:
        bell.send_with(_OFFER.pack(_MAGIC, 0, 0), None)
        return None
    try:
        segment, descriptor = SharedMemory.make("tfos-rpc", _CONTROL_BYTES + ring_bytes)
    except OSError as error:
        _log.info("no shared memory with %s: %s", bell.peer_address, error.strerror)
        return _make_offer(bell, 0)
    try:
        bell.send_with(_OFFER.pack(_MAGIC, 0, ring_bytes), descriptor)
    except BaseException:
        segment.close()
        raise
    finally:
        os.close(descriptor)
    return segment


def _take_offer(bell: SocketStream, deadline: float) -> SharedMemory | None:
    data, descriptor = _receive(bell, _OFFER.size, deadline)
    try:
        magic, reserved, ring_bytes = _OFFER.unpack(data)
        if magic != _MAGIC or reserved or (descriptor is not None and not ring_bytes):
            raise ProtocolError(f"{bell.peer_address} sent {data!r}, no offer of shared memory")
        if descriptor is None:  # nothing offered, or this process has no descriptor left for it
            return None
        if not MIN_RING_BYTES <= ring_bytes <= MAX_RING_BYTES:
            raise ProtocolError(f"{bell.peer_address} offers a ring of {ring_bytes} bytes")
        return SharedMemory.take(descriptor, _CONTROL_BYTES + ring_bytes)
    except OSError as error:
        _log.info("cannot map the memory of %s: %s", bell.peer_address, error.strerror)
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _takes_rings(bell: SocketStream, deadline: float) -> bool:
    """Receive the server's last word."""
    answer, descriptor = _receive(bell, _ANSWER_BYTES, deadline)
    if descriptor is not None:
        os.close(descriptor)
    return answer == b"\x01"


def _receive(bell: SocketStream, num_bytes: int, deadline: float) -> tuple[bytes, int | None]:
    """Receive a short message that was sent at once."""
    while True:
        got = bell.receive_with(num_bytes)
        if got is not None:
            if len(got[0]) == num_bytes:
                return got
            if got[1] is not None:
                os.close(got[1])
            raise ProtocolError(f"{bell.peer_address} sent {len(got[0])} of {num_bytes} bytes")
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not bell.wait(read=True, write=False, timeout_s=left_s):
            raise DeadlineExceeded(f"{bell.peer_address} did not agree on shared memory in time")


def _copy(into: memoryview, data: memoryview) -> None:
    """Copy equally long bytes; numpy costs more for a few, and lets other threads run meanwhile."""
    if len(into) < _SMALL_BYTES:
        into[:] = data
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
