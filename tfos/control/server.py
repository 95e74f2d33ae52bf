"""The driver's side of the control plane: an authenticated gRPC server for all nodes.

Covers: permissions of nodes, order streams, decoding with typed refusal.
Does not: listen (tfos.tls_server), decide anything (a ControlHandler does: control.coordinator).
Runs in: the driver's Python.
Threads: every call runs on a daemon thread of this server and ends in the handler, which must
serialise its calls.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, Protocol

import grpc

from rpc.auth.certificates import TlsCredentials
from tfos.control import codec, messages
from tfos.control.identity import OPERATOR_NAME
from tfos.control.outbox import Outbox
from tfos.errors import ControlError, ControlRefused
from tfos.failure import NodeId
from tfos.tls_server import TlsServer, peer_name

_LOG = logging.getLogger(__name__)


class ControlHandler(Protocol):
    """Handler of the server's calls; several threads may call every method at once."""

    def on_register(self, register: messages.Register) -> messages.RegisterReply:
        """Answer a node that announces itself."""

    def on_heartbeat(self, heartbeat: messages.Heartbeat) -> messages.HeartbeatReply:
        """Record a heartbeat."""

    def on_event(self, node: NodeId, event: messages.Event) -> None:
        """Act on a report.

        Args:
            node: who reports, with its attempt.
            event: what has happened.

        Raises:
            ControlRefused: this node may not make it.
        """

    def on_log(self, batch: messages.LogBatch) -> None:
        """Show lines of output."""

    def on_ask(self, ask: messages.Ask) -> bytes:
        """Return the JSON answer to an operator.

        Raises:
            ControlRefused: nobody answers at this driver.
        """

    def on_stream_opened(self, node: NodeId) -> str:
        """Return why this attempt gets no orders; empty if it may have them."""

    def on_stream_closed(self, node: NodeId) -> None:
        """The node's order stream is closed, for any reason."""


class ControlServer:
    """Serves one cluster. Orders are queued per attempt of a node and never lost.

    Args:
        handler: is called for each message.
        credentials: the driver's certificate and the cluster's authority.
        num_nodes: of the cluster; sizes the thread pool.
    """

    def __init__(
        self, handler: ControlHandler, credentials: TlsCredentials, *, num_nodes: int
    ) -> None:
        self._handler = handler
        self._outboxes: dict[NodeId, Outbox] = {}
        self._outboxes_lock = threading.Lock()
        self._server = TlsServer(
            _Methods(self),
            credentials,
            num_peers=num_nodes,
            max_message_bytes=codec.MAX_MESSAGE_BYTES,
        )
        self._closed = False

    def start(self, host: str, port: int = 0) -> int:
        """Bind and serve.

        Args:
            host: address to listen at.
            port: 0: the system chooses.

        Returns:
            The port, which the system chose if `port` was 0.

        Raises:
            ControlError: the address cannot be bound.
        """
        return self._server.start(host, port)

    def send(self, node: NodeId, order: messages.Order) -> None:
        """Queue an order for this attempt of a node; it leaves at once if the node listens.

        Args:
            node: the node, with its attempt.
            order: what it shall do.
        """
        self._outbox(node).put(order)

    def close(self) -> None:
        """End all streams and calls. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with self._outboxes_lock:
            outboxes = list(self._outboxes.values())
        for outbox in outboxes:
            outbox.close()
        self._server.close()

    def _outbox(self, node: NodeId) -> Outbox:
        with self._outboxes_lock:
            return self._outboxes.setdefault(node, Outbox())

    def register(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve Register.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        message = _decode(codec.decode_register, body, context)
        _check_sender(message.node, context)
        return codec.encode(self._handler.on_register(message))

    def heartbeat(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve Heartbeat.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        message = _decode(codec.decode_heartbeat, body, context)
        _check_sender(message.node, context)
        return codec.encode(self._handler.on_heartbeat(message))

    def report(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve Report.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        message = _decode(codec.decode_report, body, context)
        _check_sender(message.node, context)
        try:
            self._handler.on_event(message.node, message.event)
        except ControlRefused as error:
            _LOG.warning("refused a report: %s", error)
            _abort(context, grpc.StatusCode.PERMISSION_DENIED, str(error))
        return codec.encode(messages.EventAck())

    def log(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve Log.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        message = _decode(codec.decode_log, body, context)
        _check_sender(message.node, context)
        self._handler.on_log(message)
        return codec.encode(messages.EventAck())

    def ask(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve Ask.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        message = _decode(codec.decode_ask, body, context)
        if peer_name(context) != OPERATOR_NAME:
            _LOG.warning("refused %r, which asked for %s", peer_name(context), message.what)
            _abort(
                context,
                grpc.StatusCode.PERMISSION_DENIED,
                f"{peer_name(context)!r} may not ask for {message.what}",
            )
        try:
            return codec.encode(messages.Answer(self._handler.on_ask(message)))
        except ControlRefused as error:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def orders(self, body: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve Orders: yields until the node, a newer stream or this server ends it.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        message = _decode(codec.decode_subscribe, body, context)
        _check_sender(message.node, context)
        refusal = self._handler.on_stream_opened(message.node)
        if refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        outbox = self._outbox(message.node)
        number = outbox.open_stream()

        def ended() -> None:
            outbox.wake()
            if outbox.is_current(number):
                self._handler.on_stream_closed(message.node)

        if not context.add_callback(ended):
            ended()
            return
        for item in outbox.stream(number, message.after, context.is_active):
            yield codec.encode(item)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    """Routes method paths to a ControlServer; bodies stay bytes until the sender is known."""

    def __init__(self, server: ControlServer) -> None:
        self._handlers = {
            codec.path(codec.REGISTER): grpc.unary_unary_rpc_method_handler(server.register),
            codec.path(codec.HEARTBEAT): grpc.unary_unary_rpc_method_handler(server.heartbeat),
            codec.path(codec.REPORT): grpc.unary_unary_rpc_method_handler(server.report),
            codec.path(codec.LOG): grpc.unary_unary_rpc_method_handler(server.log),
            codec.path(codec.ASK): grpc.unary_unary_rpc_method_handler(server.ask),
            codec.path(codec.ORDERS): grpc.unary_stream_rpc_method_handler(server.orders),
        }

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a path; None means UNIMPLEMENTED."""
        return self._handlers.get(handler_call_details.method)


def _decode(
    decode: Callable[[bytes], codec.Message], body: bytes, context: grpc.ServicerContext
) -> codec.Message:
    try:
        return decode(body)
    except codec.MalformedMessage as error:
        _LOG.warning("refused a message of %s: %s", peer_name(context), error)
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))


def _check_sender(node: NodeId, context: grpc.ServicerContext) -> None:
    """A node speaks only for itself: its certificate names it."""
    peer = peer_name(context)
    if peer != node.name:
        _LOG.warning("refused a message of %r that claims to be %r", peer, node.name)
        _abort(
            context,
            grpc.StatusCode.PERMISSION_DENIED,
            f"the certificate is for {peer!r}, the message claims to be {node.name!r}",
        )


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, details: str) -> NoReturn:
    context.abort(code, details)
    raise ControlError(details)  # abort() has raised; this line is for the type checker
