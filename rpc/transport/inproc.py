"""In-process stream: the twin of a socket, made of bounded byte queues that can be polled.

Covers: InprocStream (a Stream), the names of this process's listeners, connecting to them.
Does not: cross a process boundary; the handshake and frames on top are the real ones.
Threads: each end of a pair belongs to one thread; the queues between them are locked.
Lock order: `_names_lock`, then an acceptor's lock, then a stream's, then a pipe's.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Sequence

from rpc.errors import ConnectionClosed, PeerGone, PortInUse
from rpc.transport.spin_wait import poll_ms
from rpc.transport.stream import Stream

CAPACITY_BYTES = 64 * 1024
"""Bytes that one direction holds; small, so that tests see the stalls of a full socket."""

_serial = itertools.count(1)


class _Signal:
    """A pollable flag: its descriptor is readable while it is set."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False

    def put(self, value: bool) -> None:
        if value and not self._is_set:
            os.eventfd_write(self.descriptor, 1)
        elif self._is_set and not value:
            os.eventfd_read(self.descriptor)
        self._is_set = value


class _Pipe:
    """One direction: a ring of bytes; either side ends it, the second release frees it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.readable = _Signal()
        self.writable = _Signal()
        self.ended = False
        self._ring = bytearray(capacity_bytes)
        self._start = 0
        self._used = 0
        self._owners = 2
        self._lock = threading.Lock()
        self.writable.put(True)

    def write(self, view: memoryview) -> int:
        """Write what fits; returns the bytes written, -1 when the pipe has ended."""
        with self._lock:
            if self.ended:
                return -1
            capacity = len(self._ring)
            count = min(len(view), capacity - self._used)
            at = (self._start + self._used) % capacity
            first = min(count, capacity - at)
            self._ring[at : at + first] = view[:first]
            self._ring[: count - first] = view[first:count]
            self._used += count
            self._signal()
            return count

    def read(self, view: memoryview) -> int:
        """Read what is there; returns the bytes read, -1 when the pipe has ended and is empty."""
        with self._lock:
            if self.ended and not self._used:
                return -1
            capacity = len(self._ring)
            count = min(len(view), self._used)
            first = min(count, capacity - self._start)
            view[:first] = self._ring[self._start : self._start + first]
            view[first:count] = self._ring[: count - first]
            self._start = (self._start + count) % capacity
            self._used -= count
            self._signal()
            return count

    def end(self) -> None:
        with self._lock:
            self.ended = True
            if self._owners:
                self._signal()

    def release(self) -> None:
        with self._lock:
            self._owners -= 1
            if self._owners == 0:
                os.close(self.readable.descriptor)
                os.close(self.writable.descriptor)

    def _signal(self) -> None:
        self.readable.put(self._used > 0 or self.ended)
        self.writable.put(self._used < len(self._ring) or self.ended)


class InprocStream:
    """One end of an in-process connection.

    Args:
        incoming, outgoing: the directions; the peer's stream has them the other way round.
        peer_address: for messages.
    """

    transport = "inproc"

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, peer_address: str) -> None:
        self.peer_address = peer_address
        self._incoming = incoming
        self._outgoing = outgoing
        self._shut = False
        self._released = False
        self._lock = threading.Lock()

    def sendmsg(self, views: Sequence[memoryview]) -> int | None:
        """See Stream."""
        self._check_open()
        total = 0
        for view in views:
            count = self._outgoing.write(view)
            if count < 0:
                raise PeerGone(f"{self.peer_address} closed the connection")
            total += count
            if count < len(view):
                break
        return total or None

    def recv_into(self, view: memoryview) -> int | None:
        """See Stream."""
        self._check_open()
        count = self._incoming.read(view)
        if count < 0:
            self._check_open()
            raise PeerGone(f"{self.peer_address} closed the connection")
        return count or None

    def interest(self, *, read: bool, write: bool) -> list[tuple[int, int]]:
        """See Stream."""
        if self._released:
            return [(-1, 0)]
        wanted = []
        if read:
            wanted.append((self._incoming.readable.descriptor, select.POLLIN))
        if write:
            wanted.append((self._outgoing.writable.descriptor, select.POLLIN))
        return wanted

    def wait(self, *, read: bool, write: bool, timeout_s: float) -> bool:
        """See Stream."""
        self._check_open()
        poll = select.poll()
        for descriptor, events in self.interest(read=read, write=write):
            poll.register(descriptor, events)
        return bool(poll.poll(poll_ms(timeout_s)))

    def peer_closed(self) -> bool:
        """See Stream."""
        return self._shut or self._incoming.ended or self._outgoing.ended

    def shutdown(self) -> None:
        """See Stream."""
        self._shut = True
        self._incoming.end()
        self._outgoing.end()

    def close(self) -> None:
        """See Stream."""
        self.shutdown()
        with self._lock:
            if self._released:
                return
            self._released = True
        self._incoming.release()
        self._outgoing.release()

    def _check_open(self) -> None:
        if self._shut:
            raise ConnectionClosed(f"connection to {self.peer_address} was closed by this side")


def stream_pair(
    name: str = "pair", capacity_bytes: int = CAPACITY_BYTES
) -> tuple[InprocStream, InprocStream]:
    """Return two connected streams.

    Args:
        name: shown in the streams' addresses.
        capacity_bytes: what each direction holds before a write would block.
    """
    there, back = _Pipe(capacity_bytes), _Pipe(capacity_bytes)
    address = f"inproc:{name}#{next(_serial)}"
    return InprocStream(back, there, address), InprocStream(there, back, address)


class InprocAcceptor:
    """The listening end of a name; an acceptor like those of sockets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._waiting: deque[Stream] = deque()
        self._arrived = _Signal()
        self._lock = threading.Lock()
        self._closed = False
        with _names_lock:
            if name in _names:
                raise PortInUse(
                    f"inproc name {name!r} is bound in this process; choose another name"
                )
            _names[name] = self

    def fileno(self) -> int:
        """Return the descriptor that is readable while a stream waits."""
        return self._arrived.descriptor

    def accept(self) -> Stream | None:
        """Return the next stream, None if no client waits."""
        with self._lock:
            stream = self._waiting.popleft() if self._waiting else None
            self._arrived.put(bool(self._waiting))
            return stream

    def offer(self, stream: Stream) -> bool:
        """Queue the server's end of a new pair; False when closed."""
        with self._lock:
            if self._closed:
                return False
            self._waiting.append(stream)
            self._arrived.put(True)
            return True

    def close(self) -> None:
        """Free the name; streams that were not accepted are closed."""
        with _names_lock:
            _names.pop(self.name, None)
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting = list(self._waiting)
            os.close(self._arrived.descriptor)
        for stream in waiting:
            stream.close()


def dial_inproc(name: str) -> InprocStream:
    """Connect to a listener of this process.

    Raises:
        PeerGone: no listener has this name.
    """
    with _names_lock:
        acceptor = _names.get(name)
    client, server = stream_pair(name)
    if acceptor is None or not acceptor.offer(server):
        client.close()
        server.close()
        raise PeerGone(f"no listener on inproc:{name} in this process")
    return client


_names: dict[str, InprocAcceptor] = {}
_names_lock = threading.Lock()
