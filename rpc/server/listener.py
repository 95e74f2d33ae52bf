"""RPC listener: binds, lets authenticated peers in, runs a handler for each of their requests.

Covers: binding, the threads of connections, closing all of them.
Does not: unauthenticated connections (authenticator), one connection's loop (connection).
Threads: one authenticator; one per authenticated connection, which runs the handler. Public methods
may be called from any thread, also from a handler.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from rpc.auth.certificates import tls_context
from rpc.auth.handshake import Credentials, Identity, ServerHandshake, Session
from rpc.descriptors import make_room
from rpc.endpoint import Endpoint, boot_id, reached_at
from rpc.errors import ConnectionClosed, SettingsError
from rpc.limits import DEFAULT_LIMITS, Limits
from rpc.server.authenticator import Authenticator
from rpc.server.connection import Handler, ServedConnection
from rpc.server.request import Call
from rpc.transport.inproc import InprocAcceptor
from rpc.transport.listen import Acceptor, SocketAcceptor, UnixAcceptor, bound_tcp
from rpc.transport.memfd import SharedMemoryQuota
from rpc.transport.negotiate import options_for
from rpc.transport.stream import Stream
from rpc.transport.tls_stream import TlsStream

__all__ = ["Call", "Handler", "Listener", "ListenerStats"]

_POLL_S = 0.005

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListenerStats:
    """Totals since `start`."""

    open_connections: int
    """Authenticated connections now."""
    open_handshakes: int
    """Connections in their handshake now; many for long: unknown clients reach the port."""
    accepted: int
    refused: int
    """Connections closed before they were served: no, wrong or late proof, or over a cap."""
    errors: int
    """Calls that a handler failed, and connections closed for broken frames or slowness."""


class Listener:
    """Serves a handler on any of TCP, a Unix socket and an in-process name.

    Bind first, then start; a bound port is kept until `close`. A connection may be idle for ever
    between frames. Inside a frame, the peer has `limits.stall_timeout_s` plus the time that
    `limits.min_bytes_per_s` allows.

    Args:
        handler: runs in the connection's thread for each request, and answers it.
        credentials: the cluster's secret, and TLS files if TCP is encrypted.
        identity: this process.
        limits: what this side accepts.
        on_connect: called with the peer before its first request is read.
        on_disconnect: called with the peer after its connection has ended.
    """

    def __init__(
        self,
        handler: Handler,
        credentials: Credentials,
        identity: Identity,
        *,
        limits: Limits = DEFAULT_LIMITS,
        on_connect: Callable[[Identity], None] | None = None,
        on_disconnect: Callable[[Identity], None] | None = None,
    ) -> None:
        """Check the credentials, and make room for connections as far as allowed.

        Raises:
            AuthError: the TLS files cannot be used.
        """
        if credentials.tls is not None:
            tls_context(credentials.tls, server_side=True)
        self._handler = handler
        self._credentials = credentials
        self._identity = identity
        self._limits = limits
        self._on_connect = on_connect
        self._on_disconnect = on_disconnect
        self._acceptors: list[Acceptor] = []
        self._host, self._port, self._unix_path, self._inproc = "", 0, "", ""
        self._authenticator: Authenticator | None = None
        self._lock = threading.Lock()
        self._served: dict[ServedConnection, threading.Thread] = {}
        self._closed = False
        make_room(limits.max_connections)
        self._quota = SharedMemoryQuota(limits.max_shared_bytes)
        self._closed_errors = 0

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def bind_tcp(self, host: str, port: int = 0) -> None:
        """Bind a TCP port.

        Args:
            host: address to bind.
            port: 0 lets the kernel choose.

        Raises:
            PortInUse: the port is taken; the text names the holder where /proc shows it.
            SettingsError: the address stands for all, and peers can reach none.
        """
        self._check_can_bind()
        told = reached_at(host)
        if not told:
            raise SettingsError(
                f"{host or 'an empty address'} listens on all addresses of this host, which has no "
                "route to choose the one to announce to peers: name the address that peers reach, "
                "or 127.0.0.1 for peers on this host alone"
            )
        sock = bound_tcp(host, port, self._limits)
        self._acceptors.append(SocketAcceptor(sock, self._limits))
        self._host, self._port = told, sock.getsockname()[1]

    def bind_unix(self, directory: str | None = None) -> None:
        """Bind a Unix socket in a new private directory below `directory` or the temporary one."""
        self._check_can_bind()
        acceptor = UnixAcceptor(directory, self._limits)
        self._acceptors.append(acceptor)
        self._unix_path = acceptor.path

    def adopt(self, tcp: socket.socket, unix: socket.socket) -> None:
        """Listen on sockets that were bound elsewhere and outlive this process.

        Args:
            tcp: listening; as `rpc.transport.listen.bound_tcp` makes it.
            unix: listening on a path; the process that bound it removes the path.
        """
        self._check_can_bind()
        self._acceptors += [SocketAcceptor(each, self._limits) for each in (tcp, unix)]
        self._host, self._port = tcp.getsockname()[:2]
        self._unix_path = unix.getsockname()

    def bind_inproc(self, name: str) -> None:
        """Bind a name for clients in this process; they reach the endpoint by this name only."""
        self._check_can_bind()
        self._acceptors.append(InprocAcceptor(name))
        self._inproc = name

    def start(self) -> None:
        """Start to accept connections."""
        self._check_can_bind()
        if not self._acceptors:
            raise ConnectionClosed(
                "nothing is bound; call bind_tcp, bind_unix or bind_inproc first"
            )
        self._authenticator = Authenticator(
            self._acceptors,
            self._begin,
            self._admit,
            self._limits,
        )

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint with every transport that is bound."""
        local = boot_id()
        return Endpoint(self._host, self._port, self._unix_path, local, self._inproc)

    def stats(self) -> ListenerStats:
        """Return a snapshot."""
        with self._lock:
            errors = self._closed_errors + sum(each.errors for each in self._served)
            num_served = len(self._served)
        authenticator = self._authenticator
        return ListenerStats(
            open_connections=num_served,
            open_handshakes=authenticator.num_unauthenticated if authenticator else 0,
            accepted=authenticator.accepted if authenticator else 0,
            refused=authenticator.refused if authenticator else 0,
            errors=errors,
        )

    def finish_calls(self, timeout_s: float) -> bool:
        """Wait until no call is under way; False if some still are when the time is over.

        Call it before `close`, after all waiting handlers were released: `close` would interrupt
        their answers.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if not any(connection.in_call for connection in self._served):
                    return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop listening, end all connections, join their threads. Idempotent.

        A handler that waits should check `Call.peer_gone`. A handler that still runs after
        `timeout_s` is logged and left to its daemon thread.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            self._closed = True
            served = dict(self._served)
        for connection in served:
            connection.shutdown()
        if self._authenticator is not None:
            self._authenticator.close(max(0.0, deadline_s - time.monotonic()))
        for acceptor in self._acceptors:
            acceptor.close()
        for connection, thread in served.items():
            if thread is threading.current_thread():
                continue
            thread.join(max(0.0, deadline_s - time.monotonic()))
            if thread.is_alive():
                _log.warning(
                    "handler for %s still runs %.1f s after close", connection.peer, timeout_s
                )

    def _begin(self, stream: Stream) -> tuple[Stream, ServerHandshake]:
        """Put TLS on a stream of TCP if the credentials have TLS files; begin its handshake."""
        credentials, check_peer = self._credentials, None
        if credentials.tls is not None and stream.transport == "tcp":
            stream = TlsStream(stream, credentials.tls, credentials.cluster_id, server_side=True)
            check_peer = stream.check_peer
        options = options_for(stream.transport, self._limits)
        return stream, ServerHandshake(
            self._identity, credentials, options=options, check_peer=check_peer
        )

    def _admit(self, stream: Stream, session: Session) -> str:
        connection = ServedConnection(stream, session, self._handler, self._limits, self._quota)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"rpc-{session.peer}", daemon=True
        )
        with self._lock:
            if self._closed:
                return "this listener is closing"
            if len(self._served) >= self._limits.max_connections:
                return f"max_connections={self._limits.max_connections} are served"
            self._served[connection] = thread
            try:
                thread.start()
            except RuntimeError as error:
                del self._served[connection]
                return str(error)
        return ""

    def _serve(self, connection: ServedConnection) -> None:
        try:
            _report(self._on_connect, connection.peer)
            connection.serve()
        finally:
            with self._lock:
                self._closed_errors += connection.errors
                del self._served[connection]
            _report(self._on_disconnect, connection.peer)

    def _check_can_bind(self) -> None:
        if self._closed or self._authenticator is not None:
            raise ConnectionClosed("bind and start come once, before each other and before close")


def _report(callback: Callable[[Identity], None] | None, peer: Identity) -> None:
    if callback is None:
        return
    try:
        callback(peer)
    except Exception:  # noqa: BLE001 - a callback's failure must not end this thread early
        _log.exception("on_connect or on_disconnect failed for %s", peer)
