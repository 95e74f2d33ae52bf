"""Messages between ranks: one request, ArrayFetch. The reply is the bytes, without a meta.

Covers: the fields, their codec.      Does not: send or decide anything.
Threads: any; frozen data.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from rpc.errors import UNREADABLE, ProtocolError

MAX_HOLD_S = 15.0
"""A request is answered within this time, at least with NOT_YET: silence means that the rank is
gone."""
NOT_YET = "not-yet"
"""Code of the refusal when bytes are not ready yet; the peer asks again."""
MAX_TEXT_CHARS = 300
Count = Annotated[int, msgspec.Meta(ge=0)]


class CollectiveCall(msgspec.Struct, frozen=True, array_like=True):
    """Identifies a collective call of a run: all ranks make the same calls, in the same order."""

    number: Count
    """Counted from 0 on every rank."""
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARS)]
    """What all ranks must agree on, compared as text: `allreduce sum of float32[3, 4]`."""

    def __str__(self) -> str:
        return f"{self.text} (collective call {self.number})"


class ArrayFetch(msgspec.Struct, frozen=True, array_like=True):
    """Request for bytes `start` to `stop` of a part of this rank's offer in this call."""

    call: CollectiveCall
    part: Annotated[int, msgspec.Meta(ge=0, le=2)]
    """BROUGHT, MADE or LAYOUT; LAYOUT is always sent whole."""
    start: Count
    stop: Count
    last: bool
    """Whether the peer needs nothing more from this rank in this call."""


BROUGHT, MADE, LAYOUT = 0, 1, 2
"""The rank's value; what it computed for the others; which arrays BROUGHT holds."""

_decoder = msgspec.msgpack.Decoder(ArrayFetch)
encode = msgspec.msgpack.Encoder().encode


def decode(meta: bytes) -> ArrayFetch:
    """Decode a request.

    Raises:
        ProtocolError: it is not a request.
    """
    try:
        return _decoder.decode(meta)
    except UNREADABLE as error:
        raise ProtocolError(f"not a request between ranks: {error}") from error
