"""Authenticator: accepts connections and runs the server's side of all handshakes in one thread.

Covers: accepting, handshakes, caps and deadlines of unauthenticated connections, a log of refusals.
Does not: serve (connection), own the served connections (listener).
Threads: one of its own, which runs everything here except `close` and the counters' readers.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rpc.auth.handshake import ServerHandshake, Session
from rpc.errors import RpcError
from rpc.limits import Limits, spare_descriptors
from rpc.transport.listen import Acceptor
from rpc.transport.stream import Stream
from rpc.transport.tls_stream import TlsStream

_log = logging.getLogger(__name__)

_LOG_INTERVAL_S = 5.0
_ACCEPT_PAUSE_S = 0.1
_ACCEPTS_PER_TURN = 64


@dataclass(slots=True, eq=False)
class _Unauthenticated:
    stream: Stream
    handshake: ServerHandshake
    deadline_s: float
    peer: str
    descriptor: int
    received: bytearray = field(default_factory=bytearray)
    is_greeted: bool = False


class Authenticator:
    """Accepts from all acceptors; passes a stream to `admit` once its peer has proved itself.

    Args:
        acceptors: listening sockets and in-process names.
        begin: returns a new stream, with TLS if it is to have it, and the server's side of its
            handshake.
        admit: takes an authenticated stream; returns why it refuses it, or an empty text.
        limits: caps and deadlines.
    """

    def __init__(
        self,
        acceptors: Sequence[Acceptor],
        begin: Callable[[Stream], tuple[Stream, ServerHandshake]],
        admit: Callable[[Stream, Session], str],
        limits: Limits,
    ) -> None:
        self.accepted = 0
        self.refused = 0
        self._acceptors = acceptors
        self._begin = begin
        self._admit = admit
        self._limits = limits
        spare = spare_descriptors()
        self._max_handshakes = min(limits.max_handshakes, spare)
        self._max_handshakes_per_peer = min(limits.max_handshakes_per_peer, max(1, spare // 2))
        self._refusals = _RefusalLog()
        self._selector = selectors.DefaultSelector()
        self._unauthenticated: dict[int, _Unauthenticated] = {}  # by descriptor, oldest first
        self._per_peer: collections.Counter[str] = collections.Counter()
        self._accept_again_at = 0.0
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._listen()
        self._thread = threading.Thread(target=self._run, name="rpc-authenticator", daemon=True)
        self._thread.start()

    @property
    def num_unauthenticated(self) -> int:
        """Connections whose handshake is not complete."""
        return len(self._unauthenticated)

    def close(self, timeout_s: float) -> None:
        """Close the acceptors and all unauthenticated connections; join the thread."""
        self._closing = True
        with self._wake_lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._serve_ready()
                except Exception:  # noqa: BLE001 - without this thread nobody comes in any more
                    _log.exception("accepting connections failed; trying again")
                    self._pause_accepting()
        finally:
            for acceptor in self._acceptors:
                acceptor.close()
            for pending in list(self._unauthenticated.values()):
                self._remove(pending)
                pending.stream.close()
            self._selector.close()
            with self._wake_lock:
                os.close(self._wake)
                self._wake = -1

    def _serve_ready(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if isinstance(key.data, _Unauthenticated):
                # It may have been evicted earlier in this turn.
                if self._unauthenticated.get(key.data.descriptor) is key.data:
                    self._continue_handshake(key.data)
            elif key.data is not None:
                self._accept(key.data)
        now = time.monotonic()
        for pending in list(self._unauthenticated.values()):
            if pending.deadline_s > now:
                break
            self._refuse(pending, f"no proof within {self._limits.handshake_timeout_s:g} s")
        if self._accept_again_at and self._accept_again_at <= now:
            self._accept_again_at = 0.0
            self._listen()

    def _wait_s(self) -> float | None:
        moments = [pending.deadline_s for pending in self._unauthenticated.values()][:1]
        if self._accept_again_at:
            moments.append(self._accept_again_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _listen(self) -> None:
        for acceptor in self._acceptors:
            self._selector.register(acceptor, selectors.EVENT_READ, acceptor)

    def _pause_accepting(self) -> None:
        if not self._accept_again_at:
            for acceptor in self._acceptors:
                self._selector.unregister(acceptor)
        self._accept_again_at = time.monotonic() + _ACCEPT_PAUSE_S

    def _accept(self, acceptor: Acceptor) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                stream = acceptor.accept()
            except OSError as error:
                # Out of descriptors or memory: the queue stays readable, so pause for a moment.
                self._refusals.log("a connection", f"cannot accept: {error.strerror}")
                self._evict_oldest(None)
                self._pause_accepting()
                return
            if stream is None:
                return
            try:
                self._begin_handshake(stream)
            except Exception:
                stream.close()
                raise

    def _begin_handshake(self, stream: Stream) -> None:
        self.accepted += 1
        peer = stream.peer_address.rpartition(":")[0] or stream.peer_address
        if self._per_peer[peer] >= self._max_handshakes_per_peer:
            self._evict_oldest(peer)
        if len(self._unauthenticated) >= self._max_handshakes:
            self._evict_oldest(None)
        stream, handshake = self._begin(stream)
        descriptor, _ = stream.interest(read=True, write=False)
        deadline_s = time.monotonic() + self._limits.handshake_timeout_s
        pending = _Unauthenticated(stream, handshake, deadline_s, peer, descriptor)
        self._unauthenticated[descriptor] = pending
        self._per_peer[peer] += 1
        self._selector.register(descriptor, selectors.EVENT_READ, pending)
        if not isinstance(stream, TlsStream):  # with TLS the client sends first
            self._continue_handshake(pending)

    def _continue_handshake(self, pending: _Unauthenticated) -> None:
        handshake, stream = pending.handshake, pending.stream
        try:
            self._exchange(pending)
        except RpcError as error:
            self._refuse(pending, str(error))
            return
        except Exception as error:  # noqa: BLE001 - it is this connection's end, not the others'
            _log.exception("the handshake with %s failed", stream.peer_address)
            self._refuse(pending, f"{type(error).__name__}: {error}")
            return
        if handshake.session is None:
            if handshake.refusal is not None:
                self._refuse(pending, str(handshake.refusal))
            return
        self._remove(pending)
        try:
            refusal = self._admit(stream, handshake.session)
        except Exception as error:  # noqa: BLE001 - as above
            _log.exception("%s cannot be served", stream.peer_address)
            refusal = f"{type(error).__name__}: {error}"
        if refusal:
            self.refused += 1
            self._refusals.log(stream.peer_address, refusal)
            stream.close()

    def _exchange(self, pending: _Unauthenticated) -> None:
        """Send and receive what can be now."""
        handshake, stream = pending.handshake, pending.stream
        if not pending.is_greeted:
            if isinstance(stream, TlsStream) and not stream.shake_hands():
                return
            self._send(stream, handshake.greeting)
            pending.is_greeted = True
        while handshake.session is None and handshake.refusal is None:
            chunk = bytearray(handshake.wanted - len(pending.received))
            count = stream.recv_into(memoryview(chunk))
            if count is None:
                return
            pending.received += chunk[:count]
            if len(pending.received) < handshake.wanted:
                continue
            message = bytes(pending.received)
            pending.received.clear()
            answer = handshake.feed(message)
            if answer:
                self._send(stream, answer)

    def _send(self, stream: Stream, data: bytes) -> None:
        if stream.sendmsg([memoryview(data)]) != len(data):
            raise RpcError("its receive buffer is too small for a handshake")

    def _evict_oldest(self, peer: str | None) -> None:
        for pending in self._unauthenticated.values():
            if peer is None or pending.peer == peer:
                self._refuse(pending, "too many connections without proof; the oldest gives way")
                return

    def _refuse(self, pending: _Unauthenticated, reason: str) -> None:
        self.refused += 1
        self._remove(pending)
        self._refusals.log(pending.stream.peer_address, reason)
        pending.stream.close()

    def _remove(self, pending: _Unauthenticated) -> None:
        del self._unauthenticated[pending.descriptor]
        self._per_peer[pending.peer] -= 1
        if not self._per_peer[pending.peer]:
            del self._per_peer[pending.peer]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(pending.descriptor)


class _RefusalLog:
    """Logs at most one refusal per interval, with the number of suppressed ones."""

    def __init__(self) -> None:
        self._next_at = 0.0
        self._suppressed = 0

    def log(self, peer_address: str, reason: str) -> None:
        now = time.monotonic()
        if now < self._next_at:
            self._suppressed += 1
            return
        also = f" ({self._suppressed} more since the last such line)" if self._suppressed else ""
        _log.warning("refused connection from %s: %s%s", peer_address, reason, also)
        self._next_at = now + _LOG_INTERVAL_S
        self._suppressed = 0
