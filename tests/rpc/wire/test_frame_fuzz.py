"""The decoder under fire: cut, mutated and forged bytes end typed, closed, without memory taken.

Each case plays a recorded client to a reader, as a server's connection does. A case is a function
of its seed, which a failure prints.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.auth.handshake import Session
from rpc.errors import DeadlineExceeded, IntegrityError, PeerGone, ProtocolError, RpcError
from rpc.limits import Limits
from rpc.server.connection import ServedConnection
from rpc.transport.inproc import stream_pair
from rpc.transport.memfd import SharedMemoryQuota
from rpc.transport.stream import Stream
from rpc.wire import frame
from rpc.wire.frame import HEADER_BYTES, Frame, FrameKind, Opener, Sealer
from rpc.wire.frame_io import FrameChannel, FrameReader
from tests.support.rpc import WORKER, little_memory, num_descriptors

pytestmark = pytest.mark.socket

KEY = bytes(range(32))
LIMITS = Limits(max_meta_bytes=4096, max_payload_bytes=2**20, stall_timeout_s=0.05)
CASES = 2_000
LONG_CASES = 1_000_000


def recording(seed: int) -> tuple[bytes, list[Frame]]:
    """Bytes of a few requests, and what they mean."""
    draw = random.Random(seed)
    sealer = Sealer(KEY)
    data, frames = b"", []
    for request_id in range(1, draw.randint(2, 4)):
        meta, payload = draw.randbytes(draw.randint(0, 60)), draw.randbytes(draw.randint(0, 90))
        data += sealer.seal(FrameKind.REQUEST, request_id, meta, len(payload)) + payload
        frames.append(Frame(FrameKind.REQUEST, False, request_id, meta, len(payload)))
    return data, frames


def play(data: bytes) -> tuple[list[Frame], RpcError]:
    """Read frames until the bytes end; return those that were accepted and the error at the end."""
    client, server = stream_pair(capacity_bytes=8 * 1024)
    reader = FrameReader(server, Opener(KEY, LIMITS))
    accepted = []
    client.sendmsg([memoryview(data)])
    client.close()
    try:
        while True:
            got = reader.next_frame()
            assert got is not None, "the end of the stream was not seen"
            accepted.append(got)
            left = got.payload_bytes
            while left:
                scratch = memoryview(bytearray(min(left, 4096)))
                left -= reader.read_payload(scratch) or 0
    except RpcError as error:
        # Its traceback leads to the caller's frame, which holds the error: garbage of a million
        # cases would wait for the collector and count as memory that was taken.
        return accepted, error.with_traceback(None)
    finally:
        server.close()


def mutated(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        span = draw.randint(1, 20)
        match draw.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                changed[at : at + span] = draw.randbytes(span)
            case 2:
                del changed[at : at + span]
            case 3:
                changed[at:at] = draw.randbytes(span)
            case 4:
                changed[at:at] = changed[max(0, at - span) : at]
            case _:
                del changed[at:]
    return bytes(changed)


def check_case(seed: int) -> None:
    data, frames = recording(seed)
    accepted, error = play(mutated(data, random.Random(seed)))
    assert isinstance(error, PeerGone | ProtocolError), f"seed {seed}: {error!r}"
    assert accepted == frames[: len(accepted)], f"seed {seed}: accepted {accepted}"


@pytest.mark.attack("A12")
def test_mutated_bytes_end_typed_and_no_changed_frame_is_accepted():
    check_case(0)
    descriptors = num_descriptors()
    with little_memory():
        for seed in range(CASES):
            check_case(seed)
    assert num_descriptors() == descriptors


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.attack("A12")
def test_a_million_mutations():
    descriptors = num_descriptors()
    with little_memory():
        for seed in range(CASES, CASES + LONG_CASES):
            check_case(seed)
    assert num_descriptors() == descriptors


@pytest.mark.attack("A12")
@pytest.mark.fault("F28")
def test_the_stream_may_end_at_every_byte():
    data, frames = recording(7)
    ends = []
    at = 0
    for one in frames:
        at += HEADER_BYTES + len(one.meta)
        ends.append(at)
        at += one.payload_bytes
    for cut in range(len(data) + 1):
        accepted, error = play(data[:cut])
        assert isinstance(error, PeerGone)
        assert accepted == frames[: sum(end <= cut for end in ends)]


@pytest.mark.attack("A12")
@settings(max_examples=200)
@given(st.binary(max_size=500))
def test_random_bytes_are_refused(data):
    accepted, error = play(data)
    assert accepted == []
    assert isinstance(error, PeerGone | ProtocolError)


def forged(fields: tuple[int, ...], meta: bytes) -> bytes:
    """A frame from a peer that has the key and leaves the protocol."""
    head = frame._FIELDS.pack(frame.MAGIC, *fields)
    return head + blake2b(bytes(8) + head + meta, digest_size=16, key=KEY).digest() + meta


_u64 = st.integers(0, 2**64 - 1) | st.sampled_from([2**31, 2**32, 2**63, 2**64 - 1, 0, 1])


@pytest.mark.attack("A08")
@pytest.mark.attack("A12")
@settings(max_examples=300)
@given(
    st.integers(0, 2) | st.integers(0, 255),
    st.integers(0, 4) | st.integers(0, 255),
    st.integers(0, 3) | st.integers(0, 2**16 - 1),
    _u64,
    st.integers(0, 2**32 - 1) | st.integers(0, 40),
    st.integers(0, 1) | st.integers(0, 2**32 - 1),
    _u64,
    st.binary(max_size=40),
)
def test_any_header_of_a_peer_with_the_key_is_legal_or_refused(
    version, kind, flags, request_id, meta_len, reserved, payload_bytes, meta
):
    fields = (version, kind, flags, request_id, meta_len, reserved, payload_bytes)
    with little_memory():
        accepted, error = play(forged(fields, meta))
    assert isinstance(error, PeerGone | ProtocolError)
    for one in accepted:
        assert (version, reserved, flags & ~1) == (1, 0, 0)
        assert one.payload_bytes == payload_bytes <= LIMITS.max_payload_bytes
        assert len(one.meta) == meta_len <= LIMITS.max_meta_bytes


@pytest.mark.attack("A12")
def test_a_served_connection_survives_no_nonsense_and_leaks_nothing():
    """The same fire at a whole served connection: it ends, and the handler saw only true metas."""
    descriptors = num_descriptors()
    for seed in range(300):
        data, frames = recording(seed)
        seen: list[bytes] = []
        client, connection = _served(seen)
        client.sendmsg([memoryview(mutated(data, random.Random(seed)))])
        client.close()
        connection.serve()
        assert seen == [one.meta for one in frames[: len(seen)]], f"seed {seed}"
    assert num_descriptors() == descriptors


@pytest.mark.fault("F29")
@pytest.mark.parametrize("begin", [b"T", b"TFRP", bytes(47), b"meta", b"payload"])
def test_a_frame_that_stops_halfway_is_cut_at_its_deadline(begin, caplog):
    seen: list[bytes] = []
    client, connection = _served(seen)
    head = Sealer(KEY).seal(FrameKind.REQUEST, 1, b"four", 100)
    data = {b"meta": head[:-1], b"payload": head + bytes(99)}.get(begin, begin)
    client.sendmsg([memoryview(data)])
    connection.serve()
    assert client.peer_closed()
    client.close()
    assert "too slow" in caplog.text


@pytest.mark.attack("A08")
@pytest.mark.parametrize("meta_len", [4097, 2**31, 2**32 - 1])
def test_a_meta_beyond_the_limit_is_refused_before_any_of_it_comes(meta_len):
    client, server = stream_pair(capacity_bytes=8 * 1024)
    header = bytearray(Sealer(KEY).seal(FrameKind.REQUEST, 1, b"", 0))
    header[16:20] = meta_len.to_bytes(4, "little")
    client.sendmsg([memoryview(header)])
    with pytest.raises(IntegrityError, match=rf"meta of {meta_len} bytes.*max_meta_bytes=4096"):
        FrameReader(server, Opener(KEY, LIMITS)).next_frame()
    client.close()
    server.close()


@pytest.mark.fault("F29")
def test_a_drip_is_cut_though_each_byte_comes_in_time(monkeypatch):
    """Only waiting counts, on a clock that moves while the channel waits; one byte a second."""
    client, server = stream_pair()
    clock = [0.0]

    def wait(*, read: bool, write: bool, timeout_s: float) -> bool:
        clock[0] += 1.0
        assert clock[0] <= 40.0, "it still waits"
        client.sendmsg([memoryview(b"T")])
        return True

    monkeypatch.setattr("rpc.wire.frame_io.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(server, "wait", wait)
    channel = FrameChannel(server, Session(WORKER, KEY, KEY), Limits(stall_timeout_s=30.0))
    with pytest.raises(DeadlineExceeded, match="too slow with the rest of a frame's header"):
        channel.receive_frame()
    assert 30.0 <= clock[0] <= 32.0
    client.close()
    server.close()


def _served(seen: list[bytes]) -> tuple[Stream, ServedConnection]:
    client, server = stream_pair(capacity_bytes=8 * 1024)

    def handle(call):
        seen.append(call.meta)
        call.reply(b"")

    session = Session(WORKER, KEY, KEY)
    return client, ServedConnection(server, session, handle, LIMITS, SharedMemoryQuota(0))


def test_the_recording_itself_is_accepted():
    data, frames = recording(1)
    assert play(data)[0] == frames
