"""The driver's side of the slots' calls: an authenticated gRPC server.

Covers: mutual TLS, who may call, decoding with typed refusal.
Does not: decide anything (a ManyHandler does).
Threads: calls run on daemon threads of the server.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from rpc.auth.certificates import TlsCredentials
from rpc.endpoint import bracketed
from rpc.limits import spare_descriptors
from tfos.control import codec
from tfos.control.server import DaemonThreads, peer_name
from tfos.errors import ControlError
from tfos.many import messages

_SPARE_THREADS = 16
_HANDSHAKE_S = 5.0
_CLOSE_GRACE_S = 0.2


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
        self._threads = DaemonThreads(2 * num_slots + _SPARE_THREADS)
        self._server = grpc.server(
            self._threads,
            handlers=[_Calls(self)],
            options=[
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_S)),
                ("grpc.max_allowed_incoming_connections", 2 * num_slots + spare_descriptors()),
                ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.keepalive_permit_without_calls", 1),
            ],
        )
        self._credentials = grpc.ssl_server_credentials(
            [(credentials.key_pem, credentials.cert_pem)],
            root_certificates=credentials.ca_pem,
            require_client_auth=True,
        )

    def start(self, host: str) -> int:
        """Bind and serve; return the port.

        Raises:
            ControlError: the address cannot be bound.
        """
        try:
            port: int = self._server.add_secure_port(f"{bracketed(host)}:0", self._credentials)
        except RuntimeError as error:
            raise ControlError(
                f"the slots' server cannot listen on {host} ({error}); set spark.driver.bindAddress"
            ) from error
        self._server.start()
        return port

    def close(self) -> None:
        """End all calls. Idempotent."""
        self._server.stop(_CLOSE_GRACE_S).wait(5.0)
        self._threads.shutdown(wait=False)

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
