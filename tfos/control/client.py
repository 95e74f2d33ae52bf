"""A node's side of the control plane: unary calls with deadlines and the stream of orders.

Covers: mutual TLS to the driver, typed failures, re-subscribing without losing an order.
Does not: decide when to heartbeat or what an order means (tfos.node.supervisor).
Runs in: the supervisor; imports no numpy.
Threads: calls may come from any thread; a thread of the client receives orders.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rpc.auth.certificates import TlsCredentials
from tfos.control import codec, messages
from tfos.control.identity import tls_name
from tfos.control.messages import CALL_TIMEOUT_S, REGISTER_TIMEOUT_S
from tfos.errors import ControlUnavailable
from tfos.failure import NodeId
from tfos.tls_channel import REFUSALS, ask, channel_credentials, grpc, reason_of

Reply = TypeVar("Reply")

_RESUBSCRIBE_S = 0.2
_KEEPALIVE_MS = 10_000


class ControlClient:
    """One node's connection to its driver.

    Every call raises ControlUnavailable when no reply arrived in time (retry) and
    ControlRefused when the driver refuses this node (exit).

    Args:
        address: `host:port` of the driver's control server.
        cluster_id: the cluster that the server's certificate must name.
        node: this attempt of the node.
        credentials: certificate and key of the node.
    """

    def __init__(
        self,
        address: str,
        cluster_id: str,
        node: NodeId,
        credentials: TlsCredentials,
    ) -> None:
        self.node = node
        self._address = address
        self._closed = threading.Event()
        self._stream: Any = None
        self._stream_lock = threading.Lock()
        self._orders_thread: threading.Thread | None = None
        self._channel = grpc.secure_channel(
            address,
            channel_credentials(credentials),
            options=channel_options(tls_name(cluster_id)),
        )

    def register(
        self, register: messages.Register, *, timeout_s: float = REGISTER_TIMEOUT_S
    ) -> messages.RegisterReply:
        """Announce this attempt of the node; waits for the driver to become reachable.

        Args:
            register: the node, its attempt, host and process.
            timeout_s: seconds until ControlUnavailable.
        """
        return self._call(codec.REGISTER, register, codec.decode_register_reply, timeout_s)

    def heartbeat(
        self, heartbeat: messages.Heartbeat, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> messages.HeartbeatReply:
        """Send a heartbeat; the reply to a replaced attempt says that it is fenced.

        Args:
            heartbeat: phase, progress and counters.
            timeout_s: seconds until ControlUnavailable.
        """
        return self._call(codec.HEARTBEAT, heartbeat, codec.decode_heartbeat_reply, timeout_s)

    def report(self, event: messages.Event, seq: int, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Report an event.

        Args:
            event: what has happened.
            seq: its number among the events of this attempt, from 1; the same when sent again.
            timeout_s: seconds until ControlUnavailable.
        """
        report = messages.EventReport(self.node, seq, event)
        self._call(codec.REPORT, report, codec.decode_ack, timeout_s)

    def log(self, batch: messages.LogBatch, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Send lines of output; the caller may drop them on failure.

        Args:
            batch: lines of output.
            timeout_s: seconds until ControlUnavailable.
        """
        self._call(codec.LOG, batch, codec.decode_ack, timeout_s)

    def ask(self, ask: messages.Ask, *, timeout_s: float = CALL_TIMEOUT_S) -> bytes:
        """Return the driver's JSON answer to an operator; no node's certificate may ask.

        Args:
            ask: the question or request.
            timeout_s: seconds until ControlUnavailable.
        """
        return self._call(codec.ASK, ask, codec.decode_answer, timeout_s).body

    def orders(
        self,
        on_order: Callable[[messages.Order], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Start receiving orders on a separate thread.

        Args:
            on_order: called for each order, in order, each exactly once.
            on_end: called once with the reason when the driver refused this attempt or ended the
                stream. Not called after `close()`. After a broken connection the client subscribes
                again until it is closed.
        """
        self._orders_thread = threading.Thread(
            target=self._receive, args=(on_order, on_end), name="tfos-orders", daemon=True
        )
        self._orders_thread.start()

    def close(self) -> None:
        """Stop receiving and drop the connection. Idempotent; may run on the orders thread."""
        self._closed.set()
        with self._stream_lock:
            if self._stream is not None:
                self._stream.cancel()
        thread = self._orders_thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(CALL_TIMEOUT_S)
        self._channel.close()

    def _call(
        self,
        method: str,
        message: msgspec.Struct,
        decode: Callable[[bytes], Reply],
        timeout_s: float,
    ) -> Reply:
        if self._closed.is_set():
            raise ControlUnavailable(f"{method}: this client is closed")
        where = f"{method} of {self.node.name} to the driver at {self._address}"
        return decode(
            ask(self._channel, codec.path(method), codec.encode(message), timeout_s, where)
        )

    def _receive(
        self, on_order: Callable[[messages.Order], None], on_end: Callable[[str], None]
    ) -> None:
        seen = 0
        while not self._closed.is_set():
            try:
                for body in self._subscribe(seen):
                    item = codec.decode_order(body)
                    if item.seq <= seen:
                        continue
                    seen = item.seq
                    on_order(item.order)
            except grpc.RpcError as error:
                if error.code() in REFUSALS:
                    self._end(on_end, reason_of(error))
                    return
                self._closed.wait(_RESUBSCRIBE_S)
            except (ValueError, codec.MalformedMessage) as error:
                self._end(on_end, str(error))
                return
            else:
                self._end(on_end, "the driver ended the stream of orders")
                return

    def _subscribe(self, after: int) -> Any:
        # No deadline: it lives as long as the node. Keep-alive pings find a dead connection and
        # the driver's lease, renewed by heartbeats, bounds the whole.
        request = codec.encode(messages.Subscribe(self.node, after))
        with self._stream_lock:
            if self._closed.is_set():
                return ()
            self._stream = self._channel.unary_stream(codec.path(codec.ORDERS))(
                request, wait_for_ready=True
            )
            return self._stream

    def _end(self, on_end: Callable[[str], None], reason: str) -> None:
        if not self._closed.is_set():
            on_end(reason)

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(grpc.RpcError):
            self.close()


def channel_options(target_name: str) -> list[tuple[str, Any]]:
    """Return the settings of a channel to the driver; `target_name` as of `tls_name`."""
    return [
        ("grpc.ssl_target_name_override", target_name),
        ("grpc.default_authority", target_name),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", codec.MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", codec.MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # How long one attempt to connect may take. A driver whose nodes all connect at once needs
        # seconds for their handshakes; shorter attempts would start again and never end.
        ("grpc.min_reconnect_backoff_ms", int(1000 * REGISTER_TIMEOUT_S)),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
