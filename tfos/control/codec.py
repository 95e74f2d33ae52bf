"""Codec of the control plane: msgpack bodies of the structs in control.messages, and the calls.

Covers: method names, size limit, encode and decode with typed refusal.
Does not: move bytes (tfos.control.server, tfos.control.client).
Threads: encoders and decoders of msgspec may be shared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from rpc.errors import UNREADABLE
from tfos.control import messages
from tfos.errors import ControlError

SERVICE = "tfos.Control"
REGISTER = "Register"
HEARTBEAT = "Heartbeat"
REPORT = "Report"
LOG = "Log"
ORDERS = "Orders"
ASK = "Ask"

MAX_MESSAGE_BYTES = 4 << 20
"""A roster of thousands of nodes fits; gRPC refuses longer bodies before they are parsed."""

Message = TypeVar("Message", bound=msgspec.Struct)

_encoder = msgspec.msgpack.Encoder()


class MalformedMessage(ControlError):
    """The bytes are no message of the expected type."""


def path(method: str) -> str:
    """Return the gRPC path of a method of this service."""
    return f"/{SERVICE}/{method}"


def encode(message: msgspec.Struct) -> bytes:
    """Return the msgpack body of a message."""
    return _encoder.encode(message)


def decoder(kind: type[Message]) -> Callable[[bytes], Message]:
    """Return a function that decodes one type of message.

    Raises:
        MalformedMessage: (the returned function) the bytes are something else.
    """
    typed = msgspec.msgpack.Decoder(kind)

    def decode(body: bytes) -> Message:
        try:
            return typed.decode(body)
        except UNREADABLE as error:
            raise MalformedMessage(f"no {kind.__name__}: {error}") from error

    return decode


decode_register = decoder(messages.Register)
decode_register_reply = decoder(messages.RegisterReply)
decode_heartbeat = decoder(messages.Heartbeat)
decode_heartbeat_reply = decoder(messages.HeartbeatReply)
decode_report = decoder(messages.EventReport)
decode_log = decoder(messages.LogBatch)
decode_subscribe = decoder(messages.Subscribe)
decode_order = decoder(messages.SequencedOrder)
decode_ack = decoder(messages.EventAck)
decode_ask = decoder(messages.Ask)
decode_answer = decoder(messages.Answer)
