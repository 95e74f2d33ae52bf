"""gRPC server that lets in peers with a certificate of one authority only.

Covers: mutual TLS, the caps on connections and messages, its threads; finding a call by its path,
decoding and permission with typed refusal.
Does not: know any call: tfos.control.server and tfos.many.server have the tables.
Runs in: the driver's Python.
Threads: each call runs on a daemon thread. An executor of `concurrent.futures` would make the
interpreter wait at exit for streams that last as long as their nodes.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NoReturn, TypeVar

from rpc.auth.certificates import TlsCredentials
from rpc.descriptors import make_room, num_free
from rpc.endpoint import bracketed
from rpc.limits import spare_descriptors
from tfos.errors import ControlError, ControlRefused
from tfos.tls_channel import grpc

Message = TypeVar("Message")
May = Callable[[str, Message], str]
"""Returns why the peer of this name may not send this message; empty: it may."""

_SPARE_THREADS = 16
"""Short calls served at the same time, in addition to one long call per peer."""
_CONNECTIONS_PER_PEER = 2
"""A peer has one, and briefly two when it connects again."""
_CLOSE_GRACE_S = 0.2
_HANDSHAKE_S = 5.0
"""Seconds from accepting a connection to the end of its TLS handshake, as on the data plane. gRPC's
default is 120 s: a stranger would hold a descriptor of the driver for that long."""
_HANDSHAKE_PER_PEER_S = 0.01
"""Added for each peer: all of them may connect at once, and their handshakes share the cores."""
_LOG = logging.getLogger(__name__)


class TlsServer:
    """Serves calls.

    Args:
        calls: the calls by their paths, each from `unary` or gRPC's own.
        credentials: this server's certificate and the authority of its peers.
        num_peers: how many there are; each may wait in a call.
        max_message_bytes: largest size of a request or reply.

    Raises:
        SettingsError: this process may not open as many files.
    """

    def __init__(
        self,
        calls: Mapping[str, Any],
        credentials: TlsCredentials,
        *,
        num_peers: int,
        max_message_bytes: int,
    ) -> None:
        what = f"the driver's server of {num_peers} nodes"
        make_room(_CONNECTIONS_PER_PEER * num_peers, at_least=num_peers, server=what)
        self._threads = DaemonThreads(2 * num_peers + _SPARE_THREADS)
        # gRPC counts peers and strangers together, and closes what is over the cap.
        spare = spare_descriptors()
        most = min(_CONNECTIONS_PER_PEER * num_peers + spare, num_free() - spare)
        handshake_s = _HANDSHAKE_S + _HANDSHAKE_PER_PEER_S * num_peers
        self._server = grpc.server(
            self._threads,
            handlers=[_Routes(calls)],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", int(1000 * handshake_s)),
                ("grpc.max_allowed_incoming_connections", most),
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

    def start(self, host: str, ports: Sequence[int] = (0,)) -> int:
        """Serve at the first port that is free; return it.

        Args:
            host: address to listen at.
            ports: one or more, to try in this order; 0 is one of the system's choice.

        Raises:
            ControlError: none of them can be bound.
        """
        for port in ports:
            address = f"{bracketed(host)}:{port}"
            try:
                bound: int = self._server.add_secure_port(address, self._credentials)
            except RuntimeError as error:
                if port == ports[-1]:
                    raise ControlError(
                        f"the control server cannot listen on {address} ({error}); set "
                        "spark.driver.bindAddress to an address of this host, or free the port, "
                        "or set TFOS_SERVER_PORT to a free one or a range"
                    ) from error
            else:
                self._server.start()
                return bound
        raise ControlError("the control server has no port to listen on")

    def run_soon(self, act: Callable[[], None]) -> None:
        """Call a function on one of the threads that serve calls; its exception is logged."""

        def acted() -> None:
            try:
                act()
            except Exception:  # noqa: BLE001 - nobody takes it from a future
                _LOG.exception("a call beside the peers' calls failed")

        self._threads.submit(acted)

    def close(self) -> None:
        """End all calls."""
        try:
            self._server.stop(_CLOSE_GRACE_S).wait(5.0)
        except RuntimeError:  # Python 3.12 starts no thread at exit; the grace needs one
            _LOG.debug("the server ends with this process", exc_info=True)
        self._threads.shutdown(wait=False)


class _Routes(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    def __init__(self, calls: Mapping[str, Any]) -> None:
        self._calls = calls

    def service(self, handler_call_details: Any) -> Any:
        """Return the call of a path; None means UNIMPLEMENTED."""
        return self._calls.get(handler_call_details.method)


def unary(
    decode: Callable[[bytes], Message],
    may: May[Message],
    answer: Callable[[Message], bytes],
    *,
    refused: grpc.StatusCode = grpc.StatusCode.PERMISSION_DENIED,
) -> Any:
    """Return a call of one request and one reply.

    Args:
        decode: returns the request; raises ControlError for invalid bytes.
        may: says who may send it.
        answer: returns the encoded reply; may raise ControlRefused.
        refused: what the peer is told if it may not.
    """

    def serve(body: bytes, context: grpc.ServicerContext) -> bytes:
        message = received(decode, may, body, context)
        try:
            return answer(message)
        except ControlRefused as error:
            _refuse(context, refused, str(error))

    return grpc.unary_unary_rpc_method_handler(serve)


def received(
    decode: Callable[[bytes], Message],
    may: May[Message],
    body: bytes,
    context: grpc.ServicerContext,
) -> Message:
    """Return a request, or end its call: INVALID_ARGUMENT, PERMISSION_DENIED.

    Args:
        decode: see `unary`.
        may: says who may send it.
        body: the encoded request.
        context: the call's context; has the peer's certificate.
    """
    try:
        message = decode(body)
    except ControlError as error:
        _refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
    if why := may(peer_name(context), message):
        _refuse(context, grpc.StatusCode.PERMISSION_DENIED, why)
    return message


def _refuse(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    _LOG.warning("refused a call of %r: %s", peer_name(context), details)
    context.abort(code, details)
    raise ControlError(details)  # abort() has raised; this line is for the type checker


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
                    return  # a running thread takes it
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
