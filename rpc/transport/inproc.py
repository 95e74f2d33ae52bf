"""In-process connections: a socket pair under a name that only this process knows.

Covers: the names of this process's listeners, connecting to them.
Does not: the stream (stream); the handshake and frames on top are those of every transport.
Threads: any. Lock order: `_names_lock`, then an acceptor's lock.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import weakref
from collections import deque

from rpc.errors import PeerGone, PortInUse
from rpc.limits import Limits
from rpc.transport.stream import SocketStream, Stream

CAPACITY_BYTES = 64 * 1024
"""The kernel's buffer of one direction; small, so that tests see the stalls of a full socket."""

_serial = itertools.count(1)


def stream_pair(
    name: str = "pair", capacity_bytes: int = CAPACITY_BYTES
) -> tuple[SocketStream, SocketStream]:
    """Return two connected streams.

    Args:
        name: shown in the streams' addresses.
        capacity_bytes: the buffer of each direction, which the kernel rounds up.
    """
    limits = Limits(send_buffer_bytes=capacity_bytes)
    address = f"inproc:{name}#{next(_serial)}"
    left, right = (_stream(each, address, limits) for each in socket.socketpair())
    return left, right


def _stream(sock: socket.socket, address: str, limits: Limits) -> SocketStream:
    """Return an end that closes with its last user: a model without a cluster has no close()."""
    stream = SocketStream(sock, address, limits, transport="inproc")
    weakref.finalize(stream, sock.close).atexit = False
    return stream


class InprocAcceptor:
    """The listening end of a name; an acceptor like those of sockets."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._waiting: deque[Stream] = deque()
        self._arrived = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._closed = False
        with _names_lock:
            if name in _names:
                raise PortInUse(
                    f"inproc name {name!r} is bound in this process; choose another name"
                )
            _names[name] = self

    def fileno(self) -> int:
        """Return the descriptor that is readable from a stream on until `accept` finds none."""
        return self._arrived

    def accept(self) -> Stream | None:
        """Return the next stream, None if no client waits."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            # Not once per stream: an interrupt may fall between a stream and its event.
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._arrived)
            return None

    def offer(self, stream: Stream) -> bool:
        """Queue the server's end of a new pair; False when closed."""
        with self._lock:
            if self._closed:
                return False
            self._waiting.append(stream)
            os.eventfd_write(self._arrived, 1)
            return True

    def close(self) -> None:
        """Free the name; streams that were not accepted are closed. Idempotent."""
        with _names_lock:
            if _names.get(self.name) is self:  # else another one has the name since
                del _names[self.name]
        with self._lock:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            os.close(self._arrived)
        for stream in waiting:
            stream.close()


def dial_inproc(name: str) -> SocketStream:
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
