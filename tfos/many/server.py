"""The driver's side of the slots' calls: an authenticated gRPC server.

Covers: who may call, decoding with typed refusal.
Does not: listen (tfos.tls_server), decide anything (a ManyHandler does).
Threads: calls run on daemon threads of the server.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from rpc.auth.certificates import TlsCredentials
from tfos.control import codec
from tfos.many import messages
from tfos.tls_server import TlsServer, peer_name


class ManyHandler(Protocol):
    """Answers slots; several threads may call at once."""

    def on_draw(self, draw: messages.Draw) -> messages.Order:
        """Answer an idle slot, after a wait if there may be something soon."""

    def on_beat(self, beat: messages.SlotBeat) -> messages.BeatReply:
        """Answer a slot that lives."""


class ManyServer:
    """Serves one run.

    Args:
        handler: is called for each message.
        credentials: the driver's certificate and the run's authority.
        num_slots: of the run; each may wait in a call.
    """

    def __init__(
        self, handler: ManyHandler, credentials: TlsCredentials, *, num_slots: int
    ) -> None:
        self._handler = handler
        self._server = TlsServer(
            _Calls(self),
            credentials,
            num_peers=num_slots,
            max_message_bytes=codec.MAX_MESSAGE_BYTES,
        )

    def start(self, host: str) -> int:
        """Bind and serve; return the port.

        Raises:
            ControlError: the address cannot be bound.
        """
        return self._server.start(host)

    def close(self) -> None:
        """End all calls. Idempotent."""
        self._server.close()

    def draw(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve Draw.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        _check(context)
        order = self._handler.on_draw(_decoded(messages.decode_draw, body, context))
        return codec.encode(messages.OrderReply(order))

    def beat(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        """Serve SlotBeat.

        Args:
            body: the encoded request.
            context: of the call; has the peer's certificate.
        """
        _check(context)
        return codec.encode(self._handler.on_beat(_decoded(messages.decode_beat, body, context)))


class _Calls(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc ships no types
    def __init__(self, server: ManyServer) -> None:
        self._handlers = {
            messages.DRAW: grpc.unary_unary_rpc_method_handler(server.draw),
            messages.BEAT: grpc.unary_unary_rpc_method_handler(server.beat),
        }

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a path; None means UNIMPLEMENTED."""
        return self._handlers.get(handler_call_details.method)


def _check(context: grpc.ServicerContext) -> None:
    if (name := peer_name(context)) != messages.CLIENT_NAME:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the certificate is for {name!r}")


def _decoded(decode: Any, body: bytes, context: grpc.ServicerContext) -> Any:
    try:
        return decode(body)
    except codec.MalformedMessage as error:
        return context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
