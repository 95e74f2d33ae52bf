"""The frame's bytes, its MAC and counter, and every field that may be wrong."""

from __future__ import annotations

import contextlib
import re
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import (
    IntegrityError,
    LimitExceeded,
    ProtocolError,
    RemoteError,
    VersionMismatch,
)
from rpc.limits import Limits
from rpc.wire.frame import (
    HEADER_BYTES,
    META_LEN_AT,
    Frame,
    FrameKind,
    Opener,
    Sealer,
    decode_error,
    encode_error,
)

KEY = bytes(range(32))
GOLDEN = {
    "request": (
        "54465250010100000100000000000000040000000000000005000000000000006c8bde791ab33cb0"
        "2584fddcd7a7f4cc6d657461"
    ),
    "part": (
        "5446525001020100ffffffffffffffff00000000000000000000000002000000ff658179b506deda"
        "4618fd15ccb6c28b"
    ),
    "error": (
        "544652500103000007000000000000000f000000000000000000000000000000de386f5c71366c47"
        "83fd3025b357c97693a57368617065a26e6f81a161a162"
    ),
}


def sealed(sealer: Sealer) -> dict[str, bytes]:
    return {
        "request": sealer.seal(FrameKind.REQUEST, 1, b"meta", 5),
        "part": sealer.seal(FrameKind.REPLY, 2**64 - 1, b"", 2**33, more=True),
        "error": sealer.seal(FrameKind.ERROR, 7, encode_error("shape", "no", {"a": "b"}), 0),
    }


def opened(opener: Opener, data: bytes) -> Frame:
    header = data[:HEADER_BYTES]
    (meta_bytes,) = META_LEN_AT.unpack_from(header)
    return opener.open(header, data[HEADER_BYTES : HEADER_BYTES + meta_bytes])


def forged(at: int, value: bytes) -> bytes:
    """A frame with other bytes in its header, under a right MAC: from a peer that has the key."""
    fields = bytearray(sealed(Sealer(KEY))["request"][:32])
    fields[at : at + len(value)] = value
    covered = bytes(8) + bytes(fields) + b"meta"
    return bytes(fields) + blake2b(covered, digest_size=16, key=KEY).digest() + b"meta"


def test_golden_bytes():
    assert {name: data.hex() for name, data in sealed(Sealer(KEY)).items()} == GOLDEN


def test_the_documented_golden_bytes_are_these():
    text = Path("docs/architecture/protocol.md").read_text()
    shown = re.sub(r"\s", "", text)
    assert GOLDEN["request"] in shown


def test_what_is_sealed_is_opened():
    opener = Opener(KEY, Limits())
    frames = {name: opened(opener, data) for name, data in sealed(Sealer(KEY)).items()}
    assert frames["request"] == Frame(FrameKind.REQUEST, False, 1, b"meta", 5)
    assert frames["part"] == Frame(FrameKind.REPLY, True, 2**64 - 1, b"", 2**33)
    error = decode_error(frames["error"].meta)
    assert (error.code, error.message, error.details) == ("shape", "no", {"a": "b"})


@given(
    st.sampled_from(FrameKind),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=300),
    st.integers(0, Limits().max_payload_bytes),
)
def test_round_trip(kind, request_id, meta, payload_bytes):
    payload_bytes = 0 if kind == FrameKind.ERROR else payload_bytes
    data = Sealer(KEY).seal(kind, request_id, meta, payload_bytes)
    sent = Frame(kind, False, request_id, meta, payload_bytes)
    assert opened(Opener(KEY, Limits()), data) == sent


@pytest.mark.attack("A04")
@pytest.mark.parametrize("name", GOLDEN)
def test_each_flipped_bit_is_refused(name):
    for at in range(len(GOLDEN[name]) // 2):
        for bit in range(8):
            opener = Opener(KEY, Limits())
            if name != "request":
                opened(opener, sealed(Sealer(KEY))["request"])
            sealer = Sealer(KEY)
            data = bytearray(sealed(sealer)[name])
            data[at] ^= 1 << bit
            if 16 <= at < 20:  # the meta's length, needed before the MAC can be checked
                with pytest.raises(ProtocolError):
                    opened(opener, bytes(data) + bytes(65536))
            else:
                with pytest.raises(IntegrityError):
                    opened(opener, bytes(data))


@pytest.mark.attack("A03")
@pytest.mark.fault("F27")
def test_replayed_dropped_and_swapped_frames_are_refused():
    sealer = Sealer(KEY)
    frames = [sealer.seal(FrameKind.REQUEST, index, b"m", 0) for index in range(3)]
    for order in ([0, 0], [1], [0, 2], [2], [0, 1, 0]):
        opener = Opener(KEY, Limits())
        for index in order[:-1]:
            opened(opener, frames[index])
        with pytest.raises(IntegrityError, match="wrong MAC"):
            opened(opener, frames[order[-1]])


def test_another_key_is_refused():
    with pytest.raises(IntegrityError):
        opened(Opener(bytes(32), Limits()), sealed(Sealer(KEY))["request"])


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (0, b"TFRX", ProtocolError),
        (4, b"\x02", VersionMismatch),
        (5, b"\x00", ProtocolError),
        (5, b"\x04", ProtocolError),
        (6, b"\x01\x00", ProtocolError),  # a request in several frames
        (6, b"\x02\x00", ProtocolError),
        (5, b"\x02\x00\x80", ProtocolError),
        (5, b"\x03", ProtocolError),  # an error with payload
        (20, b"\x01\x00\x00\x00", ProtocolError),
        (24, b"\xff" * 8, LimitExceeded),
        (24, (2**63).to_bytes(8, "little"), LimitExceeded),
        (24, (Limits().max_payload_bytes + 1).to_bytes(8, "little"), LimitExceeded),
    ],
)
def test_illegal_fields_under_a_right_mac(at, value, error):
    with pytest.raises(error) as caught:
        opened(Opener(KEY, Limits()), forged(at, value))
    assert type(caught.value) is error


@given(st.binary(max_size=200))
def test_an_error_body_is_decoded_or_refused(meta):
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode_error(meta), RemoteError)


def test_a_long_error_fits_a_frame():
    details = {f"{index} key" * 100: "x" * 10_000 for index in range(1000)}
    meta = encode_error("c" * 1000, "\N{SNOWMAN}" * 100_000, details)
    assert len(meta) <= Limits().max_meta_bytes
    error = decode_error(meta)
    assert error.message.startswith("\N{SNOWMAN}")
    assert len(error.details) == 32


def test_an_error_with_lone_surrogates_can_be_sent():
    assert decode_error(encode_error("code", "bad \udc80 name")).message == "bad ? name"


def test_deeply_nested_meta_is_refused_typed():
    for start in (b"", b"\x93\xa1a\xa1b", b"\x94\xa1a\xa1b\x80"):
        with pytest.raises(ProtocolError):
            decode_error(start + b"\x91" * 60_000)
