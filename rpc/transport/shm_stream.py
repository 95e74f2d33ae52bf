"""Shared-memory stream: a byte stream between two processes of one host, through two rings.

Covers: negotiation over a Unix socket, the rings, waking the peer, falling back to the socket.
Does not: frames (wire.frame_io), the safety of a segment (memfd).
Threads: as every Stream.

Each side makes one segment, which it alone writes and the other side only reads:

    offset  type  field
         0  u64   bytes put into this segment's ring since the beginning
        64  u64   bytes that this side has taken out of the other side's ring
       128  u64   odd while this side may sleep until bytes come; grows with each begin and end
       192  u64   odd while this side may sleep until there is room; likewise
      4096        the ring; byte n of the stream is at n modulo the ring's size

The Unix socket becomes the doorbell: a byte on it means "read the counters again", and its end is
the end of the stream. It is rung once for each time that the peer sleeps or is about to: a system
call that wakes nobody costs as much as copying 100 KB. A side that sleeps says so first and then
reads the counters once more. A side that moves bytes stores its counter first and then reads
whether the peer sleeps. One of them sees the other's store, as each has a fence between its own
two steps. A writer is woken
when half of its ring is free, and not for each chunk; one whose time ends before finds less room.

A writer stores a counter after the bytes that it counts, which is enough on x86 (see memfd). A byte
is copied twice, as through a socket, but both copies stay in the cache and neither costs a system
call. A reader copies bytes to private memory before it looks at them, so the peer cannot change
them later.

Every use checks the peer's counters against the ring's bounds, which finds a lying peer. A peer
that rings without need costs time, as any request does.
Source: single-producer single-consumer ring with free-running counters (Lamport 1983); the two
fences are those of Dekker's mutual exclusion.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from rpc.errors import ConnectionClosed, DeadlineExceeded, PeerGone, ProtocolError
from rpc.limits import MAX_RING_BYTES, MIN_RING_BYTES, Limits
from rpc.transport.memfd import SharedMemory
from rpc.transport.spin_wait import SpinThenPoll
from rpc.transport.stream import SocketStream

_log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
"""Bytes copied between two updates of the counters, so that both sides copy at the same time."""
_PUT, _TAKEN, _NEEDS_BYTES, _NEEDS_ROOM = 0, 8, 16, 24
_CONTROL_BYTES = 4096
_SMALL_BYTES = 16 * 1024
_RING = memoryview(b"!")

_OFFER = struct.Struct("<4sIQ")
_MAGIC = b"TFR2"
_ANSWER_BYTES = 1


class Sleep:
    """One reason to sleep: what this side says of it, and what the peer says.

    Args:
        ours: counters of the segment that this side writes.
        theirs: those of the other one.
        at: the number's place.
    """

    def __init__(self, ours: memoryview, theirs: memoryview, at: int) -> None:
        self._ours = ours
        self._theirs = theirs
        self._at = at
        self._said = 0
        self._rung_for = 0

    def begin(self) -> None:
        """Say that this side is about to sleep."""
        self._said = self._ours[self._at] = (self._said + 1) | 1

    def end(self) -> None:
        """Say that this side is awake."""
        if self._said % 2:
            self._said = self._ours[self._at] = self._said + 1

    def peer_needs_a_ring(self) -> bool:
        """Return whether the peer sleeps and was not rung for yet; from now on it was."""
        said = self._theirs[self._at]
        if said % 2 == 0 or said == self._rung_for:
            return False
        self._rung_for = said
        return True


class SharedStream:
    """One end of a shared-memory stream; made by `share` from an authenticated Unix socket.

    Args:
        doorbell: the Unix socket; the stream owns it from now on.
        ours: segment that this side writes.
        theirs: segment that the peer writes.
    """

    transport = "shm"
    is_mid_record = False

    def __init__(self, doorbell: SocketStream, ours: SharedMemory, theirs: SharedMemory) -> None:
        self.peer_address = doorbell.peer_address
        self._doorbell = doorbell
        self._segments = (ours, theirs)
        self._our_counters = ours.bytes[:_CONTROL_BYTES].cast("Q")
        self._their_counters = theirs.bytes[:_CONTROL_BYTES].cast("Q")
        self._our_ring = ours.bytes[_CONTROL_BYTES:]
        self._their_ring = theirs.bytes[_CONTROL_BYTES:]
        self._put = 0
        self._taken = 0
        counters = self._our_counters, self._their_counters
        self._until_bytes = Sleep(*counters, _NEEDS_BYTES)
        self._until_room = Sleep(*counters, _NEEDS_ROOM)
        self._poll = SpinThenPoll()
        self._lock = threading.Lock()
        self._ended: PeerGone | None = None
        self._closed = False
        self._scratch = memoryview(bytearray(1024))

    def sendmsg(self, views: Sequence[memoryview]) -> int | None:
        """See Stream."""
        self._check_open()
        if self._ended is not None:
            raise self._ended
        total = self._write(views)
        # Full: check whether the peer is gone, then write again, as it may have read meanwhile.
        if total == 0:
            self._drain_doorbell()
            if self._ended is not None:
                raise self._ended
            total = self._write(views)
        return total or None

    def recv_into(self, view: memoryview) -> int | None:
        """See Stream."""
        self._check_open()
        count = self._read(view)
        if count == 0:
            # Empty: first the doorbell, then the counter again. The peer stores the counter before
            # it rings, so a ring that is drained here cannot hide bytes.
            self._drain_doorbell()
            count = self._read(view)
            if count == 0 and self._ended is not None:
                raise self._ended
        return count or None

    def interest(self, *, read: bool, write: bool) -> tuple[int, int]:
        """See Stream; a stream that is ready has no descriptor to wait for."""
        if self._closed or self._goes_to_sleep(read=read, write=write):
            return -1, 0
        return self._doorbell.interest(read=True, write=False)

    def wait(self, *, read: bool, write: bool, timeout_s: float) -> bool:
        """See Stream."""
        self._check_open()
        if self._may_move(read=read, write=write):
            return True
        is_woken = self._poll.wait(
            *self._doorbell.interest(read=True, write=False),
            timeout_s,
            looks=partial(self._may_move, read=read, write=write),
            announces=partial(self._goes_to_sleep, read=read, write=write),
        )
        # A slow reader has made room without ringing: not half of the ring, but it is no stall.
        return is_woken or self._may_move(read=read, write=write)

    def peer_closed(self) -> bool:
        """See Stream."""
        return self._doorbell.peer_closed()

    def shutdown(self) -> None:
        """See Stream."""
        self._doorbell.shutdown()

    def close(self) -> None:
        """See Stream."""
        self._doorbell.close()
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
        """Put what fits into this side's ring and ring the doorbell."""
        free, total, unpublished = self._free(), 0, 0
        ring, size = self._our_ring, len(self._our_ring)
        for view in views:
            offset = 0
            while offset < len(view):
                at = (self._put + unpublished) % size
                # The smallest of: the view's rest, free space, the ring's end, one chunk.
                count = min(len(view) - offset, free, size - at, CHUNK_BYTES)
                if count == 0:
                    break
                _copy(ring[at : at + count], view[offset : offset + count])
                offset += count
                free -= count
                total += count
                unpublished += count
                # Publish per chunk: the reader copies this one while the writer copies the next.
                if unpublished >= CHUNK_BYTES:
                    self._publish(unpublished)
                    unpublished = 0
            if offset < len(view):
                break
        if unpublished:
            self._publish(unpublished)
        if total:
            self._until_room.end()
        return total

    def _publish(self, num_bytes: int) -> None:
        self._put += num_bytes
        self._our_counters[_PUT] = self._put
        self._fence()
        if self._until_bytes.peer_needs_a_ring():
            # A full socket holds rings that the peer has not drained yet: this one may be dropped.
            self._doorbell.sendmsg((_RING,))

    def _goes_to_sleep(self, *, read: bool, write: bool) -> bool:
        """Let the peer ring from now on; return whether bytes can move, so that nobody may ring."""
        if read:
            self._until_bytes.begin()
        if write:
            self._until_room.begin()
        self._fence()
        return self._may_move(read=read, write=write)

    def _fence(self) -> None:
        """Keep a load from passing an earlier store: taking a lock is one atomic instruction."""
        self._lock.acquire()
        self._lock.release()

    def _read(self, view: memoryview) -> int:
        """Copy what is there out of the peer's ring, at most one chunk."""
        used = self._used()
        if used == 0:
            return 0
        ring, size = self._their_ring, len(self._their_ring)
        at = self._taken % size
        count = min(used, len(view), size - at, CHUNK_BYTES)
        _copy(view[:count], ring[at : at + count])
        self._taken += count
        self._our_counters[_TAKEN] = self._taken
        self._until_bytes.end()
        self._fence()
        is_half_free = 2 * (self._their_counters[_PUT] - self._taken) <= size
        if is_half_free and self._until_room.peer_needs_a_ring():
            with contextlib.suppress(PeerGone):  # no error for a reader
                self._doorbell.sendmsg((_RING,))
        return count

    def _may_move(self, *, read: bool, write: bool) -> bool:
        """Return whether bytes can be read, room can be written, or the counters are illegal."""
        is_full = self._put - self._their_counters[_TAKEN] == len(self._our_ring)
        return (read and self._their_counters[_PUT] != self._taken) or (write and not is_full)

    def _used(self) -> int:
        used = self._their_counters[_PUT] - self._taken
        if not 0 <= used <= len(self._their_ring):
            raise ProtocolError(
                f"{self.peer_address} announces {used} bytes to read, its ring has"
                f" {len(self._their_ring)}"
            )
        return used

    def _free(self) -> int:
        used = self._put - self._their_counters[_TAKEN]
        if not 0 <= used <= len(self._our_ring):
            raise ProtocolError(
                f"{self.peer_address} reports {used} unread bytes, this side's ring has"
                f" {len(self._our_ring)}"
            )
        return len(self._our_ring) - used

    def _drain_doorbell(self) -> None:
        """Read all rings of the doorbell, and note the end of the stream."""
        try:
            while self._doorbell.recv_into(self._scratch):
                pass
        except PeerGone as error:
            self._ended = error

    def _check_open(self) -> None:
        if self._closed or self._doorbell.is_shut:
            raise ConnectionClosed(f"connection to {self.peer_address} was closed by this side")


def share(
    doorbell: SocketStream, limits: Limits, *, first: bool, deadline_s: float
) -> SharedStream | None:
    """Exchange segments with the peer; None if one side has no shared memory.

    Both sides call it right after a handshake that agreed on HandshakeOptions.SHARE:

        server -> client   4s "TFR2" | u32 0 | u64 ring_bytes, with the segment's descriptor
        client -> server   the same
        server -> client   u8: 1 both use the rings from now on, 0 both stay with the socket

    A side that has no segment, or cannot map the other one, offers 0 bytes and no descriptor.

    Args:
        doorbell: the authenticated Unix socket.
        limits: has the ring's size in bytes.
        first: whether this is the server's side, which sends first.
        deadline_s: in seconds of time.monotonic.

    Raises:
        TransportError: the peer is gone, or did not answer before the deadline.
        ProtocolError: the peer's descriptor is no sealed segment of the announced size.
    """
    with contextlib.ExitStack() as owned:

        def kept(segment: SharedMemory | None) -> SharedMemory | None:
            if segment is not None:
                owned.callback(segment.close)
            return segment

        ours = kept(_make_offer(doorbell, limits.shared_ring_bytes)) if first else None
        theirs = kept(_take_offer(doorbell, deadline_s))
        if not first:
            ours = kept(
                _make_offer(doorbell, limits.shared_ring_bytes if theirs is not None else 0)
            )
        agreed = ours is not None and theirs is not None
        if first:
            doorbell.send_with(bytes([agreed]), None)
        else:
            agreed &= _receive_decision(doorbell, deadline_s)
        if not agreed or ours is None or theirs is None:
            return None
        owned.pop_all()
        return SharedStream(doorbell, ours, theirs)


def _make_offer(doorbell: SocketStream, ring_bytes: int) -> SharedMemory | None:
    """Offer a new segment; offer 0 bytes without memory or for a ring of 0 bytes."""
    if not ring_bytes:
        doorbell.send_with(_OFFER.pack(_MAGIC, 0, 0), None)
        return None
    try:
        segment, descriptor = SharedMemory.make("tfos-rpc", _CONTROL_BYTES + ring_bytes)
    except OSError as error:
        _log.info("no shared memory with %s: %s", doorbell.peer_address, error.strerror)
        return _make_offer(doorbell, 0)
    try:
        doorbell.send_with(_OFFER.pack(_MAGIC, 0, ring_bytes), descriptor)
    except BaseException:
        segment.close()
        raise
    finally:
        os.close(descriptor)
    return segment


def _take_offer(doorbell: SocketStream, deadline_s: float) -> SharedMemory | None:
    data, descriptor = _receive(doorbell, _OFFER.size, deadline_s)
    try:
        magic, reserved, ring_bytes = _OFFER.unpack(data)
        if magic != _MAGIC or reserved or (descriptor is not None and not ring_bytes):
            raise ProtocolError(f"{doorbell.peer_address} sent {data!r}, no offer of shared memory")
        if descriptor is None:  # nothing offered, or this process has no descriptor left for it
            return None
        if not MIN_RING_BYTES <= ring_bytes <= MAX_RING_BYTES:
            raise ProtocolError(f"{doorbell.peer_address} offers a ring of {ring_bytes} bytes")
        return SharedMemory.take(descriptor, _CONTROL_BYTES + ring_bytes)
    except OSError as error:
        _log.info("cannot map the memory of %s: %s", doorbell.peer_address, error.strerror)
        return None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _receive_decision(doorbell: SocketStream, deadline_s: float) -> bool:
    """Receive the server's decision: whether both sides use the rings."""
    answer, descriptor = _receive(doorbell, _ANSWER_BYTES, deadline_s)
    if descriptor is not None:
        os.close(descriptor)
    return answer == b"\x01"


def _receive(doorbell: SocketStream, num_bytes: int, deadline_s: float) -> tuple[bytes, int | None]:
    """Receive a short message that was sent in one piece."""
    while True:
        got = doorbell.receive_with(num_bytes)
        if got is not None:
            if len(got[0]) == num_bytes:
                return got
            if got[1] is not None:
                os.close(got[1])
            raise ProtocolError(f"{doorbell.peer_address} sent {len(got[0])} of {num_bytes} bytes")
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not doorbell.wait(read=True, write=False, timeout_s=left_s):
            raise DeadlineExceeded(
                f"{doorbell.peer_address} did not agree on shared memory in time"
            )


def _copy(into: memoryview, data: memoryview) -> None:
    """Copy equally many bytes; numpy is slower below 16 KiB and releases the GIL above."""
    if len(into) < _SMALL_BYTES:
        into[:] = data
    else:
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(data, np.uint8))
