"""Attacks and faults on the control plane, over real TLS on loopback."""

from __future__ import annotations

import queue
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from rpc.auth.certificates import TlsCredentials
from tests.support.control import ControlBed, RecordingHandler
from tests.support.waiting import WAIT_S
from tfos.control import codec, messages
from tfos.control.authority import ClusterAuthority
from tfos.control.client import ControlClient
from tfos.errors import ControlRefused, ControlUnavailable
from tfos.failure import NodeFailure, NodeId
from tfos.tls_channel import channel_credentials

pytestmark = pytest.mark.socket

REFUSED_S = 0.7
"""An accepted call takes 20 ms; a refused one is tried again until its deadline."""
NODE = NodeId("worker", 0)


def _beat() -> messages.Heartbeat:
    return messages.Heartbeat(NODE, 1, "x")


@pytest.mark.attack("A14")
def test_without_a_certificate_no_call_arrives(control):
    channel = grpc.secure_channel(
        control.address,
        grpc.ssl_channel_credentials(root_certificates=control.authority.ca_pem),
        options=[("grpc.ssl_target_name_override", "test.tfos.invalid")],
    )
    done = codec.encode(messages.EventReport(NODE, 1, messages.Done()))
    with channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(codec.path(codec.REPORT))(done, timeout=REFUSED_S)
    assert caught.value.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    assert control.handler.notes == []


@pytest.mark.attack("A14")
def test_without_tls_no_call_arrives(control):
    with grpc.insecure_channel(control.address) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary(codec.path(codec.HEARTBEAT))(codec.encode(_beat()), timeout=REFUSED_S)
    assert control.handler.notes == []


@pytest.mark.attack("A14")
def test_a_certificate_of_another_authority_is_refused_even_for_the_right_name(control):
    forged = ClusterAuthority(control.cluster_id)
    stolen_ca = control.authority.ca_pem
    keys = forged.node(NODE.name)
    client = control.client_with(NODE, TlsCredentials(keys.cert_pem, keys.key_pem, stolen_ca))
    with pytest.raises(ControlUnavailable):
        client.heartbeat(_beat(), timeout_s=REFUSED_S)
    assert control.handler.notes == []


@pytest.mark.attack("A27")
def test_a_node_of_an_old_cluster_on_a_reused_port_is_refused_by_both_sides(control):
    old = ControlBed("old-cluster")
    port = old.port
    old.server.close()
    node = old.client_with(NODE, old.authority.node(NODE.name))
    new = ControlBed("new-cluster", port=port)
    try:
        with pytest.raises(ControlUnavailable):
            node.heartbeat(_beat(), timeout_s=REFUSED_S)
        got: queue.Queue[messages.Order] = queue.Queue()
        node.orders(got.put, lambda reason: None)
        new.server.send(NODE, messages.Stop("not for the old one"))
        fresh = new.client_with(NODE, new.authority.node(NODE.name))
        fresh.heartbeat(_beat())
        assert [kind for kind, _ in new.handler.notes] == ["heartbeat"]
        assert got.empty()
    finally:
        old.close()
        new.close()


def test_refused_subscriptions_leave_nothing_in_the_drivers_memory(control):
    """A node's key subscribes as attempts without end; a fenced one also tries again."""
    control.handler.refuse_orders = "it was replaced or fenced"
    node = control.client("worker", 1)
    call = node._channel.unary_stream(codec.path(codec.ORDERS))
    for attempt in range(20):
        subscribe = messages.Subscribe(NodeId("worker", 1, attempt), 0)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(codec.encode(subscribe), timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert control.server._outboxes == {}


class EndedContext:
    """A call whose connection has ended before a thread took it."""

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_common_name": [b"worker:0"]}

    def is_active(self) -> bool:
        return False

    def add_callback(self, _callback: object) -> bool:
        return False


def test_a_subscription_of_a_connection_that_has_ended_does_not_end_the_newer_stream(control):
    got: queue.Queue[messages.Order] = queue.Queue()
    node = control.client_with(NODE, control.authority.node(NODE.name))
    node.orders(got.put, lambda reason: None)
    control.handler.wait_for("opened")
    late = codec.encode(messages.Subscribe(NODE, 0))
    context: Any = EndedContext()
    assert list(control.server._orders(late, context)) == []
    control.server.send(NODE, messages.StopTraining("enough"))
    assert got.get(timeout=WAIT_S) == messages.StopTraining("enough")
    assert [kind for kind, _ in control.handler.notes] == ["opened"]


@pytest.mark.attack("A27")
def test_the_cluster_name_in_the_certificate_is_checked_not_only_the_authority(control):
    """One authority that signed for two names: a node of the other name is turned away."""
    node = control.client_with(NODE, control.authority.node(NODE.name))
    node.heartbeat(_beat())
    strange = ControlClient(
        control.address, "another-cluster", NODE, control.authority.node(NODE.name)
    )
    with strange, pytest.raises(ControlUnavailable):
        strange.heartbeat(_beat(), timeout_s=REFUSED_S)
    assert [kind for kind, _ in control.handler.notes] == ["heartbeat"]  # the node's own


@pytest.mark.attack("A15")
def test_the_drivers_certificate_is_no_nodes_certificate(control):
    client = control.client_with(NODE, control.authority.driver())
    with pytest.raises((ControlRefused, ControlUnavailable)):
        client.heartbeat(_beat(), timeout_s=REFUSED_S)
    assert control.handler.notes == []


@pytest.mark.attack("A07")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\x80\x04\x95garbage.",
        b"cos\nsystem\n(S'touch canary'\ntR.",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 100_000,
        codec.encode(messages.EventAck()),
    ],
)
def test_bytes_that_are_no_message_are_refused_and_run_nothing(control, body, tmp_path):
    keys = control.authority.node(NODE.name)
    credentials = channel_credentials(keys)
    options = [("grpc.ssl_target_name_override", "test.tfos.invalid")]
    with grpc.secure_channel(control.address, credentials, options) as channel:
        for method in (codec.REGISTER, codec.HEARTBEAT, codec.REPORT, codec.LOG):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(codec.path(method))(body, timeout=WAIT_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(codec.path(codec.ORDERS))(body, timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert control.handler.notes == []
    assert not Path("canary").exists()


@pytest.mark.attack("A08")
def test_a_message_over_the_limit_is_refused_before_it_is_parsed(control):
    client = control.client()
    batch = messages.LogBatch(client.node, ("x" * (codec.MAX_MESSAGE_BYTES + 1),))
    with pytest.raises(ControlUnavailable, match="RESOURCE_EXHAUSTED"):
        client.log(batch)
    client.heartbeat(messages.Heartbeat(client.node, 1, "x"))


@pytest.mark.attack("A29")
def test_old_tls_is_refused(control):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", control.port), WAIT_S) as raw,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(raw, server_hostname="x")


@pytest.mark.attack("A17")
def test_keys_show_in_no_repr(control):
    keys = control.authority.node(NODE.name)
    shown = f"{keys!r} {control.authority!r} {vars(control.client())!r}"
    key = keys.key_pem.decode().splitlines()[1]
    assert key not in shown
    assert "PRIVATE" not in shown


@pytest.mark.fault("F26")
def test_a_driver_that_comes_late_gets_the_call_within_the_deadline(control):
    port = control.port
    control.server.close()
    node = control.client("worker", 0)
    late = ControlBed("test", port=port, authority=control.authority)
    try:
        node.register(messages.Register(NODE, "1", "h", 5))
        assert late.handler.wait_for("register")
    finally:
        late.close()


@pytest.mark.fault("F28")
def test_no_order_is_lost_or_doubled_when_the_connection_breaks(control):
    """The driver's listener is replaced under a living client; its outbox is kept by sequence."""
    client = control.client()
    got: queue.Queue[messages.Order] = queue.Queue()
    client.orders(got.put, lambda reason: None)
    control.handler.wait_for("opened")
    control.server.send(NODE, messages.Flush("input", 0))
    assert got.get(timeout=WAIT_S) == messages.Flush("input", 0)
    broken = client._stream
    broken.cancel()
    control.server.send(NODE, messages.Flush("input", 1))
    assert got.get(timeout=WAIT_S) == messages.Flush("input", 1)
    control.handler.wait_for("opened", 2)
    control.server.send(NODE, messages.Flush("input", 2))
    assert got.get(timeout=WAIT_S) == messages.Flush("input", 2)  # the others came once


class BusyHandler(RecordingHandler):
    """A driver whose lock is taken when a stream ends."""

    def __init__(self) -> None:
        super().__init__()
        self.is_free = threading.Event()
        self.streams: list[tuple[str, int]] = []

    def on_stream_opened(self, node: NodeId, number: int) -> str:
        self.streams.append(("opened", number))
        return super().on_stream_opened(node, number)

    def on_stream_closed(self, node: NodeId, number: int) -> None:
        self._note("ending", node)
        self.is_free.wait(WAIT_S)
        self.streams.append(("closed", number))
        super().on_stream_closed(node, number)


@pytest.mark.fault("F28")
def test_a_stream_that_ends_while_the_driver_is_busy_stops_no_call_and_is_told_by_its_number():
    handler = BusyHandler()
    control = ControlBed(handler=handler)
    try:
        client = control.client()
        client.orders(lambda order: None, lambda reason: None)
        handler.wait_for("opened")
        with client._stream_lock:  # the driver may know of the stream before the client has it
            client._stream.cancel()
        handler.wait_for("ending")
        control.client("worker", 1).heartbeat(messages.Heartbeat(NodeId("worker", 1), 1, "x"))
        handler.wait_for("opened", 2)
        handler.is_free.set()
        handler.wait_for("closed")
        assert handler.streams == [("opened", 1), ("opened", 2), ("closed", 1)]
    finally:
        handler.is_free.set()
        control.close()


@pytest.mark.attack("A15")
def test_no_message_in_another_nodes_name_arrives(control):
    """Every call, by a certificate of another role or rank, and by its own name afterwards."""
    failure = NodeFailure(NODE, "h", 7)
    for name in ("ps:0", "chief:0", "worker:1", "driver:0"):
        client = control.client_with(NODE, control.authority.node(name))
        calls = (
            lambda client=client: client.register(messages.Register(NODE, "1", "h", 7)),
            lambda client=client: client.heartbeat(_beat()),
            lambda client=client: client.report(messages.Failed(failure), 1),
            lambda client=client: client.log(messages.LogBatch(NODE, ("x",))),
        )
        for call in calls:
            with pytest.raises(ControlRefused, match=f"the certificate is for '{name}'"):
                call()
        ended: queue.Queue[str] = queue.Queue()
        client.orders(lambda order: None, ended.put)
        assert f"the certificate is for '{name}'" in ended.get(timeout=WAIT_S)
    assert control.handler.notes == []


@pytest.mark.attack("A15")
@pytest.mark.parametrize(
    ("method", "message"),
    [
        (codec.LOG, messages.LogBatch(NODE, ("x",) * (messages.MAX_LOG_LINES + 1))),
        (codec.LOG, messages.LogBatch(NODE, (), -1)),
        (codec.HEARTBEAT, messages.Heartbeat(NODE, 1, "\x1b[2J")),
        (codec.REGISTER, messages.Register(NODE, "1", "h\n", 7)),
        (codec.REPORT, messages.EventReport(NODE, 1, messages.TensorBoardUp("javascript:x"))),
        (codec.REPORT, messages.EventReport(NODE, 1, messages.TensorBoardUp("http://h/\x1b[2J"))),
        (codec.REPORT, messages.EventReport(NODE, 1, messages.PhaseChanged("a" * 5000))),
    ],
)
def test_a_node_that_exceeds_a_limit_is_refused(control, method, message):
    keys = control.authority.node(NODE.name)
    credentials = channel_credentials(keys)
    options = [("grpc.ssl_target_name_override", "test.tfos.invalid")]
    with (
        grpc.secure_channel(control.address, credentials, options) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(codec.path(method))(codec.encode(message), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert control.handler.notes == []
