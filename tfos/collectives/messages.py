"""Messages between ranks: one request, ArrayFetch. The reply is the bytes, without a meta.

Covers: the fields, their codec.      Does not: send or decide anything.
Threads: any; frozen data.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from rpc.errors import ProtocolError

MAX_HOLD_S = 15.0
"""A request is answered within this time, if only by NOT_YET: silence means that a rank is gone."""
NOT_YET = "not-yet"
"""Code of the refusal of bytes that are not there yet; the peer asks again."""
MAX_TEXT_CHARS = 300
Count = Annotated[int, msgspec.Meta(ge=0)]


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """Which collective call of a run: all ranks make the same ones, in the same order."""

    number: Count
    """Counted from 0 on every rank."""
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
    """What all ranks must agree on, to compare and to read: `allreduce sum of float32[3, 4]`."""

    def __str__(self) -> str:
        return f"{self.text} (collective call {self.number})"


class ArrayFetch(msgspec.Struct, frozen=True, array_like=True):
    """Send bytes `start` to `stop` of a part of what this rank offers in this call."""

    call: CollectiveCall
    part: Annotated[int, msgspec.Meta(ge=0, le=2)]
    """BROUGHT, MADE or LAYOUT; of a layout, always the whole."""
    start: Count
    stop: Count
    last: bool
    """Whether the peer needs nothing more of this rank in this call."""


BROUGHT, MADE, LAYOUT = 0, 1, 2
"""What the rank gave to the call; what it has made for the others; which arrays BROUGHT holds."""

_decoder = msgspec.msgpack.Decoder(ArrayFetch)
encode = msgspec.msgpack.Encoder().encode


def decode(meta: bytes) -> ArrayFetch:
    """Decode a request.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _decoder.decode(meta)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"not a request between ranks: {error}") from error
