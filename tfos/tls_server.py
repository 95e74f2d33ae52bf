"""gRPC server that lets in peers with a certificate of one authority only.

Covers: mutual TLS, the caps on connections and messages, its threads.
Does not: know any call (tfos.control.server, tfos.many.server).
Runs in: the driver's Python.
Threads: each call runs on a daemon thread. An executor of `concurrent.futures` would make the
interpreter wait at exit for streams that last as long as their nodes.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import grpc

from rpc.auth.certificates import TlsCredentials
from rpc.descriptors import make_room
from rpc.endpoint import bracketed
from rpc.limits import spare_descriptors
from tfos.errors import ControlError

_SPARE_THREADS = 16
"""Short calls served at the same time, in addition to one long call per peer."""
_CONNECTIONS_PER_PEER = 2
"""A peer has one, and briefly two when it connects again."""
_CLOSE_GRACE_S = 0.2
_HANDSHAKE_S = 5.0
"""From accepting a connection to the end of its TLS handshake, as on the data plane. gRPC's own
default is 120 s: a stranger would hold a descriptor of the driver for that long."""
_HANDSHAKE_PER_PEER_S = 0.01
"""Added for each peer: all of them may connect at once, and their handshakes share the cores."""


class TlsServer:
    """Serves calls.

    Args:
        calls: finds the function of a call by its path.
        credentials: this server's certificate and the authority of its peers.
        num_peers: how many there are; each may wait in a call.
        max_message_bytes: of a request or reply.

    Raises:
        SettingsError: this process may not open as many files.
    """

    def __init__(
        self,
        calls: grpc.GenericRpcHandler,
        credentials: TlsCredentials,
        *,
        num_peers: int,
        max_message_bytes: int,
    ) -> None:
        what = f"the driver's server of {num_peers} nodes"
        make_room(_CONNECTIONS_PER_PEER * num_peers, at_least=num_peers, server=what)
        self._threads = DaemonThreads(2 * num_peers + _SPARE_THREADS)
        handshake_s = _HANDSHAKE_S + _HANDSHAKE_PER_PEER_S * num_peers
        self._server = grpc.server(
            self._threads,
            handlers=[calls],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", int(1000 * handshake_s)),
                # gRPC counts peers and strangers together and closes what is over the cap.
                (
                    "grpc.max_allowed_incoming_connections",
                    _CONNECTIONS_PER_PEER * num_peers + spare_descriptors(),
                ),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._credentials = grpc.ssl_server_credentials(
            [(credentials.key_pem, credentials.cert_pem)],
            root_certificates=credentials.ca_pem,
            require_client_auth=True,
        )

    def start(self, host: str, port: int = 0) -> int:
        """Bind and serve; return the port.

        Args:
            host: address to listen at.
            port: 0: the system chooses.

        Raises:
            ControlError: the address cannot be bound.
        """
        try:
            bound: int = self._server.add_secure_port(
                f"{bracketed(host)}:{port}", self._credentials
            )
        except RuntimeError as error:
            raise ControlError(
                f"the control server cannot listen on {host}:{port} ({error}); "
                "set spark.driver.bindAddress or free the port"
            ) from error
        self._server.start()
        return bound

    def close(self) -> None:
        """End all calls."""
        self._server.stop(_CLOSE_GRACE_S).wait(5.0)
        self._threads.shutdown(wait=False)


def peer_name(context: grpc.ServicerContext) -> str:
    """Return the common name of the peer's certificate."""
    names = context.auth_context().get("x509_common_name", [])
    return names[0].decode("utf-8", "replace") if names else ""


class DaemonThreads(futures.Executor):
    """Runs calls on up to `max_threads` daemon threads, started as they are needed."""

    _numbers = itertools.count(1)

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._name = f"tfos-control-{next(self._numbers)}"
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._changed = threading.Condition()
        self._waiting = 0
        self._started = 0
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Queue a call; start a thread if none is free for it."""
        future: futures.Future[Any] = futures.Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001  # a future carries it to the caller
                future.set_exception(error)

        with self._changed:
            self._work.append(work)
            start = len(self._work) > self._waiting and self._started < self._max_threads
            self._started += start
            self._changed.notify()
        if start:
            self._start()
        return future

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # Python 3.12 starts none while the interpreter exits
            with self._changed:
                self._started -= 1
                if self._started or not self._work:
                    return  # one that runs takes it
                work = self._work.popleft()
            work()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._waiting += 1
                while not self._work and not self._closed:
                    self._changed.wait()
                self._waiting -= 1
                if not self._work:
                    return
                work = self._work.popleft()
            work()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let idle threads end; running calls end with their connections."""
        del wait, cancel_futures
        with self._changed:
            self._closed = True
            self._changed.notify_all()
