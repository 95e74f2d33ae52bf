"""Every message of every protocol survives its codec, and changed bytes are a message or refused.

Covers: all structs of ps.protocol, feeding.protocol and tfos.control, and what slots and ranks
send, with values that hypothesis draws from their types. Does not: the bytes themselves, who may
say what, the limits of each field (each protocol's own tests).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeding.errors import ChunkError
from feeding.protocol import messages as feed
from ps.errors import PSSettingsError
from ps.protocol import messages as ps
from rpc.errors import ProtocolError
from tests.support.struct_values import declared_in, structs_in, values_of
from tfos.collectives import messages as collectives
from tfos.control import codec
from tfos.control import messages as control
from tfos.many import messages as many


@dataclass(frozen=True)
class Codec:
    """How one kind of message travels, and what refuses other bytes."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    refusal: type[Exception]


def ps_reply(kind: type) -> Codec:
    return Codec(ps.encode, functools.partial(ps.decode_reply, reply=kind), PSSettingsError)


PS_REPLIES = (
    *(ps.Description, ps.Compiled, ps.Ack, ps.Scanned, ps.RowsLoaded),
    *(ps.RendezvousValues, ps.SnapshotMade, ps.Saved),
)
CODECS: dict[type, Codec] = {
    **dict.fromkeys(get_args(ps.Request), Codec(ps.encode, ps.decode_request, PSSettingsError)),
    **{kind: ps_reply(kind) for kind in PS_REPLIES},
    **dict.fromkeys(get_args(feed.Request), Codec(codec.encode, feed.decode_request, ChunkError)),
    feed.FeedStatus: Codec(codec.encode, feed.decode_status, ChunkError),
    feed.Results: Codec(codec.encode, feed.decode_results, ChunkError),
    feed.Recalled: Codec(codec.encode, feed.decode_recalled, ChunkError),
    **{
        kind: Codec(codec.encode, decode, codec.MalformedMessage)
        for kind, decode in {
            control.Register: codec.decode_register,
            control.RegisterReply: codec.decode_register_reply,
            control.Heartbeat: codec.decode_heartbeat,
            control.HeartbeatReply: codec.decode_heartbeat_reply,
            control.EventReport: codec.decode_report,
            control.LogBatch: codec.decode_log,
            control.Subscribe: codec.decode_subscribe,
            control.SequencedOrder: codec.decode_order,
            control.EventAck: codec.decode_ack,
            control.Ask: codec.decode_ask,
            control.Answer: codec.decode_answer,
            many.Draw: many.decode_draw,
            many.SlotBeat: many.decode_beat,
            many.BeatReply: many.decode_beat_reply,
            many.OrderReply: many.decode_order,
        }.items()
    },
    collectives.ArrayFetch: Codec(collectives.encode, collectives.decode, ProtocolError),
}
IDS = {kind: f"{kind.__module__.split('.')[0]}-{kind.__name__}" for kind in CODECS}
every_kind = pytest.mark.parametrize("kind", CODECS, ids=IDS.values())


def test_no_message_is_left_out():
    declared = declared_in(ps) | declared_in(feed) | declared_in(control)
    assert declared - structs_in(CODECS) == set()


@every_kind
@settings(max_examples=10)
@given(data=st.data())
def test_a_message_survives_its_codec(kind: type, data: st.DataObject):
    message = data.draw(values_of(kind))
    found = CODECS[kind].decode(CODECS[kind].encode(message))
    assert type(found) is kind
    assert found == message


@pytest.mark.attack("A07", "A12")
@every_kind
@settings(max_examples=10)
@given(data=st.data())
def test_changed_or_cut_bytes_are_a_message_or_a_typed_refusal(kind: type, data: st.DataObject):
    whole = CODECS[kind].encode(data.draw(values_of(kind)))
    changed = bytearray(whole)
    changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    for body in (bytes(changed), whole[: data.draw(st.integers(0, len(whole) - 1))]):
        try:
            found = CODECS[kind].decode(body)
        except CODECS[kind].refusal:
            continue
        assert type(found) in CODECS
