"""What AES-GMAC's and TLS's records both promise: no byte is changed, lost, repeated or moved."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rpc.auth.handshake import Session
from rpc.client.connection import Connection
from rpc.errors import DeadlineExceeded, IntegrityError, PeerGone
from rpc.limits import Limits
from rpc.transport.gmac_stream import RECORD_BYTES
from rpc.transport.record_stream import RecordStream
from rpc.transport.stream import SocketStream, Stream
from rpc.wire.frame import FrameKind, Sealer
from rpc.wire.frame_io import FrameChannel
from tests.support.rpc import WAIT_S, WORKER, sealed_pair, tls_pair

pytestmark = pytest.mark.socket

TEXT = b"gradient"
FOUND = "changed, dropped, repeated or inserted"


@dataclass(frozen=True)
class Kind:
    """How the records of one kind look on the wire."""

    pair: Callable[[Any, Any], tuple[RecordStream, RecordStream]]
    overhead: int
    """Bytes of a record beside its text."""
    length_at: range
    """A flipped byte here is another length: what follows may be missing, or fit no tag."""
    live_bytes: int
    """As much as one record holds, or more."""
    is_secret: bool
    flipped: str | None
    """What is said of a flipped byte that is no length; None: it depends on the byte."""


GMAC = Kind(sealed_pair, 20, range(4), RECORD_BYTES, False, FOUND)
TLS = Kind(tls_pair, 5 + 17, range(3, 5), 60_000, True, None)
KINDS = pytest.mark.parametrize("kind", [GMAC, TLS], ids=["gmac", "tls"])
FLIPS = [
    pytest.param(kind, at, id=f"{name}-{at}")
    for name, kind in (("gmac", GMAC), ("tls", TLS))
    for at in range(kind.overhead + len(TEXT))
]


@pytest.fixture
def ends(kind: Kind) -> Iterator[tuple[RecordStream, socket.socket, socket.socket, RecordStream]]:
    """A sender, what it sends on the wire, the wire to a receiver, and the receiver."""
    left, right = socket.socketpair()
    sender, receiver = kind.pair(SocketStream(left, "left"), SocketStream(right, "right"))
    out, wire_out = socket.socketpair()
    wire_in, into = socket.socketpair()
    sender._inner.close()
    receiver._inner.close()
    sender._inner, receiver._inner = SocketStream(out, "left"), SocketStream(into, "right")
    yield sender, wire_out, wire_in, receiver
    for stream in (sender, receiver):
        stream.close()
    for wire in (wire_out, wire_in):
        wire.close()


def sent(kind: Kind, sender: RecordStream, wire: socket.socket, text: bytes) -> bytes:
    """Return what stands on the wire for a text."""
    assert sender.sendmsg([memoryview(text)]) == len(text)
    record = wire.recv(65536)
    assert len(record) == kind.overhead + len(text)
    return record


def received(receiver: Stream, num_bytes: int = 4096) -> bytes:
    part = memoryview(bytearray(num_bytes))
    return bytes(part[: receiver.recv_into(part) or 0])


@KINDS
def test_bytes_that_change_while_they_are_sent_are_no_attack(ends, kind):
    """A server sends its live parameters, which pushes of other workers change meanwhile."""
    sender, wire_out, wire_in, receiver = ends
    sender._inner._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    live = bytearray(kind.live_bytes)
    taken = sender.sendmsg([memoryview(live)])
    assert taken is None  # the record is made, and most of it waits for the receiver
    live[:] = b"\1" * len(live)
    got = b""
    while len(got) < len(live):
        wire_in.sendall(wire_out.recv(65536))
        taken = taken or sender.sendmsg([memoryview(live)])
        got += received(receiver, len(live))
    assert taken == len(live)
    assert got == bytes(len(live))


@pytest.mark.attack("A04")
@pytest.mark.parametrize(("kind", "at"), FLIPS)
def test_every_flipped_byte_is_found(ends, kind, at):
    sender, wire_out, wire_in, receiver = ends
    record = sent(kind, sender, wire_out, TEXT)
    assert (TEXT in record) is not kind.is_secret
    wire_in.sendall(record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :])
    wire_in.shutdown(socket.SHUT_WR)
    if at in kind.length_at:
        with pytest.raises((IntegrityError, PeerGone)):
            received(receiver)
    else:
        with pytest.raises(IntegrityError, match=kind.flipped):
            received(receiver)


@pytest.mark.attack("A03")
@pytest.mark.attack("A04")
@pytest.mark.fault("F27")
@pytest.mark.parametrize(
    "order", [(1,), (0, 0), (0, 2), (1, 0), (2, 1)], ids=["lost", "twice", "gap", "late", "mixed"]
)
@KINDS
def test_records_out_of_order_are_found(ends, kind, order):
    sender, wire_out, wire_in, receiver = ends
    records = [sent(kind, sender, wire_out, text) for text in (b"one", b"two", b"three")]
    for index in order:
        wire_in.sendall(records[index])
    if order[0] == 0:
        assert received(receiver, 3) == b"one"
    with pytest.raises(IntegrityError, match=FOUND):
        received(receiver)


@pytest.mark.fault("F28")
@KINDS
def test_a_record_that_is_cut_gives_out_nothing(ends, kind):
    sender, wire_out, wire_in, receiver = ends
    record = sent(kind, sender, wire_out, TEXT)
    for byte in record[:-1]:
        wire_in.sendall(bytes([byte]))
        assert receiver.recv_into(memoryview(bytearray(9))) is None
        assert receiver.interest(read=True, write=False)[0] >= 0
        assert receiver.is_mid_record
    wire_in.sendall(record[-1:])
    assert received(receiver) == TEXT
    assert not receiver.is_mid_record


@KINDS
def test_a_record_is_known_to_have_begun_wherever_what_arrives_is_cut(ends, kind):
    """A record's head, too, may come in two parts, and behind the end of another record."""
    sender, wire_out, wire_in, receiver = ends
    record = sent(kind, sender, wire_out, TEXT)
    for cut in range(1, kind.overhead + len(TEXT)):
        following = sent(kind, sender, wire_out, TEXT)
        wire_in.sendall(record + following[:cut])
        assert received(receiver, len(TEXT)) == TEXT
        assert receiver.recv_into(memoryview(bytearray(9))) is None
        assert receiver.is_mid_record
        record = following[cut:]
    wire_in.sendall(record)
    assert received(receiver) == TEXT
    assert not receiver.is_mid_record


@pytest.fixture
def session() -> Session:
    return Session(WORKER, bytes(32), bytes(32))


@pytest.mark.attack("A04")
@pytest.mark.fault("F29")
@KINDS
def test_a_server_waits_for_a_record_that_has_begun_as_for_a_frame(ends, kind, session):
    """Its length may have grown on the way: what is waited for never comes."""
    sender, wire_out, wire_in, receiver = ends
    frame = Sealer(session.receive_key).seal(FrameKind.REQUEST, 1, b"meta", 0)
    wire_in.sendall(sent(kind, sender, wire_out, frame)[:-1])
    channel = FrameChannel(receiver, session, Limits(stall_timeout_s=0.05))
    with pytest.raises(DeadlineExceeded, match="too slow with the rest of a frame's header"):
        channel.receive_frame()


@pytest.mark.attack("A04")
@pytest.mark.fault("F29")
@KINDS
def test_a_client_waits_for_a_record_that_has_begun_as_for_a_frame(ends, kind, session):
    sender, wire_out, wire_in, receiver = ends
    frame = Sealer(session.receive_key).seal(FrameKind.REPLY, 1, b"meta", 0)
    wire_in.sendall(sent(kind, sender, wire_out, frame)[:-1])
    connection = Connection(receiver, session, Limits(stall_timeout_s=0.05))
    with contextlib.closing(connection), pytest.raises(PeerGone, match="stopped inside a frame"):
        connection.call(b"ask", timeout_s=WAIT_S)
