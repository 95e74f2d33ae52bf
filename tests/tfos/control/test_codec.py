"""Golden bytes of the control plane, as docs/architecture/protocol.md shows them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.endpoint import Endpoint
from tfos.control import codec, messages
from tfos.failure import NodeId

NODE = NodeId("worker", 1, 1)


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


@pytest.mark.attack("A12")
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(body):
    for decode in (codec.decode_register, codec.decode_report, codec.decode_order):
        try:
            decode(body)
        except codec.MalformedMessage:
            continue


CONTROLS = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0))]


@pytest.mark.attack("A24")
@pytest.mark.attack("A25")
@pytest.mark.attack("A26")
@pytest.mark.parametrize("field", ["host", "unix_path", "boot_id", "inproc"])
def test_a_node_that_says_where_it_is_brings_no_control_characters(field: str):
    """Feeders and workers connect there, and their errors show it."""

    def decoded(text: str, port: int = 1) -> Endpoint:
        fields = {"host": "10.0.0.1", "port": port, field: text}
        said = messages.Listening(Endpoint(**fields))  # type: ignore[arg-type]
        report = codec.decode_report(codec.encode(messages.EventReport(NODE, 1, said)))
        assert isinstance(report.event, messages.Listening)
        return report.event.endpoint

    for good in ("", "node-1.example", "fe80::1%eth0", "10.0.0.1", "/run/user/1/a.sock", "x" * 255):
        assert getattr(decoded(good), field) == good
    for bad in [*(f"node{each}1" for each in CONTROLS), "node\n", "x" * 256]:
        with pytest.raises(codec.MalformedMessage, match=field):
            decoded(bad)
    for port in (-1, 65536):
        with pytest.raises(codec.MalformedMessage, match="port"):
            decoded("", port)
