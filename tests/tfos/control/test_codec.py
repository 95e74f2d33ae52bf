"""Golden bytes of the control plane, as docs/architecture/protocol.md shows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.endpoint import Endpoint
from tfos.control import codec, messages
from tfos.failure import NodeFailure, NodeId

NODE = NodeId("worker", 1, 1)
EVENTS: list[messages.Event] = [
    messages.Listening(Endpoint("h", 1)),
    messages.FlushReached("input", 3, messages.FeedSnapshot("input", 5, 5)),
    messages.TensorBoardUp("http://h:6006"),
    messages.PhaseChanged("main_fun"),
    messages.Failed(NodeFailure(NODE, "h", 5, signal=9)),
    messages.Done(),
]
ORDERS: list[messages.Order] = [
    messages.Start((messages.RosterEntry(NODE, 0, "h", "1", Endpoint("h", 1)),)),
    messages.Flush("input", 3),
    messages.FinishFeed("input"),
    messages.FenceWorker(1, 2, "gone"),
    messages.WorkerDone(1),
    messages.Stop("bye"),
]


def test_a_heartbeat_has_these_bytes():
    beat = messages.Heartbeat(NODE, 7, "main_fun")
    assert codec.encode(beat) == (
        b"\x88\xa4node\x83\xa4role\xa6worker\xa5index\x01\xa7attempt\x01\xa3seq\x07"
        b"\xa5phase\xa8main_fun\xa9child_pid\x00\xa9rss_bytes\x00\xa8progress\x80\xa5feeds\x90"
        b"\xa5stats\xc4\x00"
    )


def test_an_order_has_these_bytes():
    item = messages.SequencedOrder(1, messages.Flush("input", 3))
    assert codec.encode(item) == (
        b"\x82\xa3seq\x01\xa5order\x83\xa4type\xa5Flush\xa4feed\xa5input\xa5epoch\x03"
    )


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_event_survives(event):
    report = messages.EventReport(NODE, event)
    assert codec.decode_report(codec.encode(report)) == report


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: type(order).__name__)
def test_every_order_survives(order):
    item = messages.SequencedOrder(9, order)
    assert codec.decode_order(codec.encode(item)) == item


@pytest.mark.attack("A12")
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(body):
    for decode in (codec.decode_register, codec.decode_report, codec.decode_order):
        try:
            decode(body)
        except codec.MalformedMessage:
            continue


@pytest.mark.attack("A12")
@given(st.data())
def test_a_mutated_or_truncated_message_is_a_message_or_refused(data):
    whole = codec.encode(messages.EventReport(NODE, EVENTS[1]))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    position = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[position] ^= data.draw(st.integers(1, 255))
    for body in (cut, bytes(changed)):
        try:
            assert isinstance(codec.decode_report(body), messages.EventReport)
        except codec.MalformedMessage:
            continue
