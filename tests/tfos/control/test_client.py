"""Client and server of the control plane over real mutual TLS."""

from __future__ import annotations

import queue
import socket
import time

import pytest

from tests.support.waiting import WAIT_S, wait_until
from tfos.control import messages, outbox
from tfos.control.authority import ClusterAuthority
from tfos.control.client import ControlClient
from tfos.errors import ControlFailed, ControlUnavailable
from tfos.failure import NodeId


def _register(node: NodeId) -> messages.Register:
    return messages.Register(node=node, executor_id="1", host="h", pid=5)


def test_unary_calls_arrive_with_their_sender(control):
    client = control.client("worker", 1)
    assert client.register(_register(client.node)).accepted
    client.heartbeat(messages.Heartbeat(client.node, 1, "main_fun", progress={"loss": 0.5}))
    client.report(messages.FlushReached("input", 3), 1)
    client.log(messages.LogBatch(client.node, ("a line",)))
    assert [name for name, _ in control.handler.notes] == ["register", "heartbeat", "event", "log"]
    assert control.handler.notes[2][1] == (client.node, messages.FlushReached("input", 3))


def test_orders_arrive_once_and_in_order_also_those_sent_before_the_stream(control):
    client = control.client()
    sent = [messages.Flush("input", epoch) for epoch in range(5)]
    control.server.send(client.node, sent[0])
    control.server.send(client.node, sent[1])
    got: queue.Queue[messages.Order] = queue.Queue()
    client.orders(got.put, lambda reason: None)
    for order in sent[2:]:
        control.server.send(client.node, order)
    assert [got.get(timeout=WAIT_S) for _ in sent] == sent


def test_an_order_arrives_at_once(control):
    client = control.client()
    got: queue.Queue[messages.Order] = queue.Queue()
    client.orders(got.put, lambda reason: None)
    control.handler.wait_for("opened")
    started = time.monotonic()
    control.server.send(client.node, messages.Stop("test"))
    assert got.get(timeout=WAIT_S) == messages.Stop("test")
    assert time.monotonic() - started < outbox._CHECK_S  # so it was no look at it by chance


def test_the_driver_hears_at_once_that_a_node_is_gone(control):
    client = control.client("worker", 2)
    client.orders(lambda order: None, lambda reason: None)
    control.handler.wait_for("opened")
    client.close()
    assert control.handler.wait_for("closed") == [client.node]


def test_an_attempt_that_gets_no_orders_is_told_why(control):
    control.handler.refuse_orders = "replaced by attempt 1"
    client = control.client()
    ended: queue.Queue[str] = queue.Queue()
    client.orders(lambda order: None, ended.put)
    assert "replaced by attempt 1" in ended.get(timeout=WAIT_S)


def test_a_closed_server_ends_the_orders(control):
    client = control.client()
    ended: queue.Queue[str] = queue.Queue()
    got: queue.Queue[messages.Order] = queue.Queue()
    client.orders(got.put, ended.put)
    control.handler.wait_for("opened")
    control.server.send(client.node, messages.Stop("bye"))
    control.server.close()
    assert got.get(timeout=WAIT_S) == messages.Stop("bye")
    assert "ended the stream" in ended.get(timeout=WAIT_S)


def test_a_node_that_asks_for_orders_which_are_kept_no_more_is_told_so(control, monkeypatch):
    monkeypatch.setattr(outbox, "KEPT_ORDERS", 2)
    client = control.client()
    for epoch in range(6):
        control.server.send(client.node, messages.Flush("input", epoch))
    ended: queue.Queue[str] = queue.Queue()
    client.orders(lambda order: None, ended.put)
    assert "OUT_OF_RANGE: orders before 3 are no longer kept" in ended.get(timeout=WAIT_S)


def test_a_newer_attempt_ends_the_orders_of_the_older_one(control):
    old, new = control.client(attempt=0), control.client(attempt=1)
    ended: queue.Queue[str] = queue.Queue()
    got: queue.Queue[messages.Order] = queue.Queue()
    old.orders(got.put, ended.put)
    control.handler.wait_for("opened")
    control.server.send(old.node, messages.Stop("replaced by a newer attempt"))
    new.orders(lambda order: None, lambda reason: None)
    control.handler.wait_for("opened", 2)
    assert got.get(timeout=WAIT_S) == messages.Stop("replaced by a newer attempt")
    assert "ended the stream" in ended.get(timeout=WAIT_S)
    wait_until(lambda: list(control.server._outboxes) == [new.node], "one outbox", WAIT_S)


def test_a_call_that_the_driver_cannot_handle_is_told_with_its_text(control, monkeypatch):
    def broken(_kind: str, _value: object) -> None:
        raise ValueError("a defect of the driver")

    monkeypatch.setattr(control.handler, "_note", broken)
    with pytest.raises(ControlFailed, match=r"UNKNOWN: .*a defect of the driver"):
        control.client().report(messages.Done(), 1)


def test_attempts_have_their_own_orders(control):
    old, new = control.client(attempt=0), control.client(attempt=1)
    control.server.send(old.node, messages.Stop("old"))
    control.server.send(new.node, messages.Flush("input", 0))
    got: queue.Queue[messages.Order] = queue.Queue()
    new.orders(got.put, lambda reason: None)
    assert got.get(timeout=WAIT_S) == messages.Flush("input", 0)


def test_a_call_without_a_driver_is_unavailable_within_its_deadline(control):
    client = control.client()
    control.server.close()
    started = time.monotonic()
    with pytest.raises(ControlUnavailable, match=r"DEADLINE|UNAVAILABLE"):
        client.heartbeat(messages.Heartbeat(client.node, 1, "x"), timeout_s=0.5)
    assert time.monotonic() - started < messages.CALL_TIMEOUT_S


def test_a_node_that_meets_something_else_at_the_drivers_address_says_what(control):
    authority = control.authority
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    strange = ClusterAuthority(control.cluster_id)
    for at, keys, why in (
        (address, authority.node("worker:0"), "Connection refused"),
        (control.address, strange.node("worker:0"), "handshake failed"),
    ):
        with (
            ControlClient(at, control.cluster_id, NodeId("worker", 0, 0), keys) as client,
            pytest.raises(ControlUnavailable, match=f"DEADLINE_EXCEEDED: .*{why}"),
        ):
            client.heartbeat(messages.Heartbeat(client.node, 1, "x"), timeout_s=1.0)


def test_more_streams_than_spare_threads_do_not_starve_calls(control):
    clients = [control.client("worker", index) for index in range(8)]
    for client in clients:
        client.orders(lambda order: None, lambda reason: None)
    control.handler.wait_for("opened", len(clients))
    for client in clients:
        client.heartbeat(messages.Heartbeat(client.node, 1, "x"))


@pytest.mark.long
def test_a_node_that_says_nothing_for_a_while_keeps_its_stream(control, monkeypatch):
    """Its keep-alive pings are no misuse: the third one used to cut the connection."""
    monkeypatch.setattr("tfos.control.client._KEEPALIVE_MS", 5500)
    client = control.client()
    client.orders(lambda order: None, lambda reason: None)
    control.handler.wait_for("opened")
    with control.handler.changed:
        cut = control.handler.changed.wait_for(
            lambda: "closed" in dict(control.handler.notes), 5 * 5.5
        )
    assert not cut, control.handler.notes
