"""What ranks send each other: bytes that are no request are refused by a typed error."""

from __future__ import annotations

import msgspec
import pytest

from rpc.errors import ProtocolError
from tfos.collectives import messages

CALL = msgspec.msgpack.encode([0, "barrier"])


@pytest.mark.attack("A12")
@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\x95" + CALL + b"\x03\x00\x00\xc2",
        b"\x95\x92\x00\xa2\xff\xfe\x00\x00\x00\xc2",
        b"\x96" + CALL + b"\x00\x00\x00\xc2" + b"\x91" * 60_000 + b"\x00",
    ],
    ids=["nothing", "no such part", "no UTF-8", "deep nesting"],
)
def test_bytes_that_are_no_request_are_refused(meta):
    with pytest.raises(ProtocolError, match="not a request between ranks"):
        messages.decode(meta)
