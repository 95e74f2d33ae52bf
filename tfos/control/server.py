"""The driver's side of the control plane: an authenticated gRPC server for all nodes.

Covers: the table of calls, who may make which, order streams.
Does not: listen and refuse (tfos.tls_server), decide anything (a ControlHandler does:
control.coordinator).
Runs in: the driver's Python.
Threads: every call runs on a daemon thread of this server and ends in the handler, which must
serialise its calls.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from rpc.auth.certificates import TlsCredentials
from tfos.control import codec, messages
from tfos.control.identity import OPERATOR_NAME, STREAMS_NAME
from tfos.control.outbox import OrdersForgotten, Outbox
from tfos.failure import NodeId
from tfos.tls_channel import grpc
from tfos.tls_server import TlsServer, received, unary


class ControlHandler(Protocol):
    """Handler of the server's calls; several threads may call every method at once."""

    def on_register(self, register: messages.Register) -> messages.RegisterReply:
        """Answer a node that announces itself."""

    def on_heartbeat(self, heartbeat: messages.Heartbeat) -> messages.HeartbeatReply:
        """Record a heartbeat."""

    def on_report(self, report: messages.EventReport) -> None:
        """Act on an event, which may come again.

        Raises:
            ControlRefused: this node may not report it.
        """

    def on_log(self, batch: messages.LogBatch) -> None:
        """Show lines of output."""

    def on_ask(self, ask: messages.Ask) -> bytes:
        """Return the JSON answer to an operator.

        Raises:
            ControlRefused: this driver does not answer.
        """

    def on_stream_opened(self, node: NodeId, number: int) -> str:
        """Return why this attempt gets no orders; empty if it may have them.

        Args:
            node: the node that subscribes, with its attempt.
            number: its stream's number; a higher one replaces it.
        """

    def on_stream_closed(self, node: NodeId, number: int) -> None:
        """The node's order stream is closed, for any reason; it may have a newer one.

        Args:
            node: the node whose stream it was, with its attempt.
            number: the stream's number.
        """


class ControlServer:
    """Serves one cluster. Orders are queued per attempt of a node and never lost.

    Args:
        handler: is called for each message.
        credentials: the driver's certificate and the cluster's authority.
        num_nodes: number of nodes of the cluster; sizes the thread pool.
    """

    def __init__(
        self, handler: ControlHandler, credentials: TlsCredentials, *, num_nodes: int
    ) -> None:
        self._handler = handler
        self._outboxes: dict[NodeId, Outbox] = {}
        self._outboxes_lock = threading.Lock()
        self._stream_numbers = itertools.count(1)
        self._server = TlsServer(
            self._calls(handler),
            credentials,
            num_peers=num_nodes,
            max_message_bytes=codec.MAX_MESSAGE_BYTES,
        )
        self._closed = False

    def start(self, host: str, ports: Sequence[int]) -> int:
        """See TlsServer.start."""
        return self._server.start(host, ports)

    def send(self, node: NodeId, order: messages.Order) -> None:
        """Queue an order for this attempt of a node; it leaves at once if the node listens.

        Args:
            node: the node, with its attempt.
            order: what it must do.
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

    def _calls(self, handler: ControlHandler) -> dict[str, Any]:
        """Return the call of each path: how it is read, who may make it, what answers it."""
        return {
            codec.path(codec.REGISTER): unary(
                codec.decode_register, _is_itself, _answered(handler.on_register)
            ),
            codec.path(codec.HEARTBEAT): unary(
                codec.decode_heartbeat, _is_itself, _answered(handler.on_heartbeat)
            ),
            codec.path(codec.REPORT): unary(
                codec.decode_report, _is_itself, _done(handler.on_report)
            ),
            codec.path(codec.LOG): unary(codec.decode_log, _is_itself, _done(handler.on_log)),
            codec.path(codec.ASK): unary(
                codec.decode_ask,
                _may_ask,
                _answered(lambda ask: messages.Answer(handler.on_ask(ask))),
                refused=grpc.StatusCode.FAILED_PRECONDITION,
            ),
            codec.path(codec.ORDERS): grpc.unary_stream_rpc_method_handler(self._orders),
        }

    def _orders(self, body: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield orders until the node, a newer stream or this server ends it."""
        message = received(codec.decode_subscribe, _is_itself, body, context)
        if not context.is_active():  # it waited for a thread; its node may have a newer stream
            return
        number = next(self._stream_numbers)
        refusal = self._handler.on_stream_opened(message.node, number)
        if refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        outbox = self._outbox(message.node)  # not before: a refused attempt must leave none
        outbox.open_stream(number)

        def ended() -> None:
            outbox.wake()
            # gRPC calls this on its only thread for events, and the handler may have to wait.
            self._server.run_soon(lambda: self._handler.on_stream_closed(message.node, number))

        if not context.add_callback(ended):
            ended()
            return
        self._forget_older(message.node)
        try:
            for item in outbox.stream(number, message.after, context.is_active):
                yield codec.encode(item)
        except OrdersForgotten as error:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, str(error))

    def _forget_older(self, newest: NodeId) -> None:
        """Drop the outboxes of older attempts of a node; a stream that is open ends when empty."""
        with self._outboxes_lock:
            older = [
                node
                for node in self._outboxes
                if node.name == newest.name and node.attempt < newest.attempt
            ]
            dropped = [self._outboxes.pop(node) for node in older]
        for outbox in dropped:
            outbox.close()


def _answered(answer: Callable[[Any], msgspec.Struct]) -> Callable[[Any], bytes]:
    return lambda message: codec.encode(answer(message))


def _done(act: Callable[[Any], None]) -> Callable[[Any], bytes]:
    def serve(message: Any) -> bytes:
        act(message)
        return codec.encode(messages.EventAck())

    return serve


class _OfNode(Protocol):
    """A message that says who sends it."""

    @property
    def node(self) -> NodeId:
        """The node, with its attempt."""


def _is_itself(peer: str, message: _OfNode) -> str:
    """A node speaks only for itself: its certificate names it."""
    if peer != message.node.name:
        return f"the certificate is for {peer!r}, the message claims to be {message.node.name!r}"
    return ""


def _may_ask(peer: str, ask: messages.Ask) -> str:
    may = peer == OPERATOR_NAME or (peer == STREAMS_NAME and ask.what == "end_streams")
    return "" if may else f"{peer!r} may not ask for {ask.what}"
