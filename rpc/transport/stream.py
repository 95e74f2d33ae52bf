"""Streams: non-blocking bytes over TCP or a Unix socket, which can be polled together.

Covers: the Stream protocol (shm_stream and record_stream implement it too), SocketStream, every
socket option, waiting on several streams.
Does not: frames (wire.frame_io), authentication (auth.handshake), listening (listen).
Threads: one thread uses a stream at a time; `shutdown` and `peer_closed` may be called from any
thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from rpc.endpoint import bracketed
from rpc.errors import ConnectionClosed, PeerGone, TransportError, Unreachable
from rpc.limits import DEFAULT_LIMITS, Limits
from rpc.transport.spin_wait import SpinThenPoll, poll_ms

IOV_MAX = 1024
"""Views that one `sendmsg` takes."""

_CLOSED_EVENTS = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL

USER_TIMEOUT_MS = 20_000
"""How long sent bytes may stay unacknowledged, or unread by a peer whose buffers are full."""
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 3
KEEPALIVE_PROBES = 3
NEXT_ADDRESS_S = 0.25
"""After which silence of one address of a host the next one is tried too (RFC 8305, section 5)."""


class Stream(Protocol):
    """An ordered, reliable byte stream to one peer. No call blocks but `wait`."""

    transport: str
    peer_address: str

    @property
    def is_mid_record(self) -> bool:
        """Whether a record has begun to arrive and is not complete; False where there are none."""
        ...

    def sendmsg(self, views: Sequence[memoryview]) -> int | None:
        """Send from at most IOV_MAX views; return the bytes taken, None if it would block.

        Raises:
            PeerGone: the peer closed or reset the stream.
            ConnectionClosed: this side closed it.
        """
        ...

    def recv_into(self, view: memoryview) -> int | None:
        """Receive at least one byte into a view that is not empty; None if it would block.

        Raises:
            PeerGone: end of file or reset.
            ConnectionClosed: this side closed it.
        """
        ...

    def interest(self, *, read: bool, write: bool) -> tuple[int, int]:
        """Return what to poll before the next attempt.

        Args:
            read: wait for bytes to receive.
            write: wait for room to send.

        Returns:
            File descriptor and poll events; a descriptor of -1 means that the stream is ready.
        """
        ...

    def wait(self, *, read: bool, write: bool, timeout_s: float) -> bool:
        """Wait until reading or writing may succeed.

        Args:
            read: wait for bytes to receive.
            write: wait for room to send.
            timeout_s: longest wait; infinity waits for ever.

        Returns:
            False if `timeout_s` passed first.
        """
        ...

    def peer_closed(self) -> bool:
        """Return, without reading, whether the peer closed or this side was shut down."""
        ...

    def shutdown(self) -> None:
        """End both directions and wake a waiting thread; the owner still has to `close`."""
        ...

    def close(self) -> None:
        """Shut down and release the descriptors; idempotent."""
        ...


class SocketStream:
    """A connected TCP or Unix socket.

    Args:
        sock: connected; the stream owns it.
        peer_address: for messages.
        limits: sizes of the socket's buffers, in bytes.
        transport: its name; None: "unix" or "tcp", by the socket's family.
    """

    is_mid_record = False

    def __init__(
        self,
        sock: socket.socket,
        peer_address: str,
        limits: Limits = DEFAULT_LIMITS,
        *,
        transport: str | None = None,
    ) -> None:
        self.transport = transport or ("unix" if sock.family == socket.AF_UNIX else "tcp")
        self.peer_address = peer_address
        self._sock = sock
        self._lock = threading.Lock()
        self._shut = False
        self._poll = SpinThenPoll()
        sock.setblocking(False)
        configure(sock, limits)

    def sendmsg(self, views: Sequence[memoryview]) -> int | None:
        """See Stream."""
        try:
            return self._sock.sendmsg(views, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error

    def recv_into(self, view: memoryview) -> int | None:
        """See Stream."""
        try:
            count = self._sock.recv_into(view)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        if count == 0:
            raise self._lost(None)
        return count

    @property
    def is_shut(self) -> bool:
        """Whether this side ended it."""
        return self._shut

    def send_with(self, data: bytes, descriptor: int | None) -> None:
        """Send a short message, with a descriptor, over an otherwise empty Unix socket.

        Args:
            data: the message, small enough for the socket's buffer.
            descriptor: passed beside the message; None: none.

        Raises:
            TransportError: as sendmsg, or the message does not fit at once.
        """
        rights = [descriptor] if descriptor is not None else []
        try:
            sent = socket.send_fds(self._sock, [data], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._lost(error) from error
        if sent != len(data):
            raise TransportError(f"{self.peer_address} took {sent} of {len(data)} bytes")

    def receive_with(self, num_bytes: int) -> tuple[bytes, int | None] | None:
        """Receive at most this many bytes and a descriptor; None if it would block.

        The descriptor is the caller's to close.
        """
        try:
            data, found, _, _ = socket.recv_fds(self._sock, num_bytes, 1, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except OSError as error:
            raise self._lost(error) from error
        for extra in found[1:]:
            os.close(extra)
        if not data:
            for descriptor in found[:1]:
                os.close(descriptor)
            raise self._lost(None)
        return data, found[0] if found else None

    def interest(self, *, read: bool, write: bool) -> tuple[int, int]:
        """See Stream."""
        return self._sock.fileno(), _events(read, write)

    def wait(self, *, read: bool, write: bool, timeout_s: float) -> bool:
        """See Stream."""
        descriptor = self._sock.fileno()
        if descriptor < 0:
            raise self._lost(None)
        events = (select.POLLIN if read else 0) | (select.POLLOUT if write else 0)
        return self._poll.wait(descriptor, events, timeout_s)

    def peer_closed(self) -> bool:
        """See Stream."""
        # A shutdown has ended, so nothing can be sent any more, such as why a wait has ended. And
        # no other thread frees the descriptor meanwhile.
        with self._lock:
            if self._shut:
                return True
            poll = select.poll()
            poll.register(self._sock.fileno(), select.POLLRDHUP)
            return any(events & _CLOSED_EVENTS for _, events in poll.poll(0))

    def shutdown(self) -> None:
        """See Stream."""
        with self._lock:
            if not self._shut:
                self._shut = True
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See Stream."""
        self.shutdown()
        with self._lock:
            self._sock.close()

    def _lost(self, error: OSError | None) -> TransportError | ConnectionClosed:
        if self._shut:
            return ConnectionClosed(f"connection to {self.peer_address} was closed by this side")
        if error is None:
            return PeerGone(f"{self.peer_address} closed the connection")
        return PeerGone(f"connection to {self.peer_address} broke: {error.strerror or error}")


def wait_streams(wanted: Sequence[tuple[Stream, bool, bool]], timeout_s: float) -> list[int]:
    """Wait on several streams at once.

    Args:
        wanted: per stream: the stream, whether to wait for reading, whether for writing.
        timeout_s: longest wait; 0 only polls.

    Returns:
        Sorted indexes of the streams that are ready.
    """
    poll = select.poll()
    owner: dict[int, int] = {}
    ready: set[int] = set()
    for index, (stream, read, write) in enumerate(wanted):
        descriptor, events = stream.interest(read=read, write=write)
        if descriptor < 0:
            ready.add(index)
            continue
        poll.register(descriptor, events)
        owner[descriptor] = index
    found = poll.poll(0 if ready else poll_ms(timeout_s))
    return sorted(ready.union(owner[descriptor] for descriptor, _ in found))


def configure(sock: socket.socket, limits: Limits) -> None:
    """Set every option of a socket. No other function sets socket options.

    Args:
        sock: connected or accepted.
        limits: sizes of the socket's buffers, in bytes.
    """
    if limits.send_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, limits.send_buffer_bytes)
    if limits.receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, limits.receive_buffer_bytes)
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # The kernel's defaults find a vanished host after about 15 minutes.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def dial_tcp(
    host: str, port: int, *, deadline_s: float, limits: Limits = DEFAULT_LIMITS
) -> SocketStream:
    """Connect to the first address of a host that answers.

    An address that is silent holds up the next one by NEXT_ADDRESS_S only: a firewall may drop the
    packets of one family.

    Args:
        host: name or address.
        port: TCP port.
        deadline_s: in seconds of time.monotonic.
        limits: sizes of the socket's buffers.

    Raises:
        PeerGone: the name has no address, or none of them accepts.
        Unreachable: none answered in time.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise PeerGone(f"host {host!r} cannot be resolved: {error}") from error
    failure: TransportError = PeerGone(f"host {host!r} has no address")
    begun: dict[int, tuple[socket.socket, str]] = {}
    try:
        while found or begun:
            try:
                if found:
                    family, kind, _, _, address = found.pop(0)
                    sock = _connecting(_open(family, kind), address, limits)
                    begun[sock.fileno()] = sock, address_text(address)
                next_s = time.monotonic() + NEXT_ADDRESS_S if found else deadline_s
                ready = _first_ready(begun, min(deadline_s, next_s))
                if ready is not None:
                    return _connected(*begun.pop(ready), limits)
            except TransportError as error:
                failure = error
                continue
            if not found:
                silent = " and ".join(where for _, where in begun.values())
                raise Unreachable(f"{silent} did not accept the connection in time")
        raise failure
    finally:
        for sock, _ in begun.values():
            sock.close()


def dial_unix(path: str, *, limits: Limits) -> SocketStream:
    """Connect to a Unix socket without waiting.

    Args:
        path: path of the socket.
        limits: sizes of the socket's buffers.

    Raises:
        PeerGone: no process listens there, or its queue is full.
    """
    sock = _open(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(path)
        return SocketStream(sock, path, limits)
    except BlockingIOError:
        sock.close()
        raise PeerGone(f"cannot connect to {path}: its queue is full") from None
    except OSError as error:
        sock.close()
        raise _refused(path, error) from error


def address_text(address: object) -> str:
    """Return host:port of a socket address, or the path of a Unix one."""
    if isinstance(address, tuple):
        return f"{bracketed(address[0])}:{address[1]}"
    return str(address)


def _open(family: int, kind: int) -> socket.socket:
    try:
        return socket.socket(family, kind)
    except OSError as error:
        raise TransportError(
            f"cannot open a socket: {error.strerror}; close connections or raise `ulimit -n`"
        ) from error


def _connecting(sock: socket.socket, address: tuple[Any, ...], limits: Limits) -> socket.socket:
    """Begin to connect; whether it succeeds is known once the socket can be written."""
    try:
        sock.setblocking(False)
        configure(sock, limits)
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
        return sock
    except OSError as error:
        sock.close()
        raise _refused(address_text(address), error) from error


def _first_ready(begun: dict[int, tuple[socket.socket, str]], until_s: float) -> int | None:
    """Return the descriptor of a connection that succeeded or failed; None: not in time."""
    poll = select.poll()
    for descriptor in begun:
        poll.register(descriptor, select.POLLOUT)
    found = poll.poll(poll_ms(until_s - time.monotonic()))
    return found[0][0] if found else None


def _connected(sock: socket.socket, where: str, limits: Limits) -> SocketStream:
    try:
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        return SocketStream(sock, where, limits)
    except OSError as error:
        sock.close()
        raise _refused(where, error) from error


def _refused(where: str, error: OSError) -> TransportError:
    if error.errno == errno.ETIMEDOUT:  # USER_TIMEOUT_MS was over before the caller's deadline
        return Unreachable(f"{where} did not accept the connection in time")
    return PeerGone(f"cannot connect to {where}: {error.strerror or error}")


def _events(read: bool, write: bool) -> int:
    return (select.POLLIN if read else 0) | (select.POLLOUT if write else 0)
