"""Faults of network and peer as a client or server of the data plane meets them."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest

from rpc.auth.handshake import Credentials, Identity, Role, Session
from rpc.client.connection import Connection, connect, wait_any
from rpc.endpoint import Endpoint
from rpc.errors import (
    BusyError,
    ConnectionClosed,
    DeadlineExceeded,
    LimitExceeded,
    PeerGone,
    ProtocolError,
    RemoteError,
    TransportError,
)
from rpc.limits import Limits
from rpc.server.listener import Listener
from rpc.transport.stream import SocketStream
from rpc.wire.frame import FrameKind, Sealer, encode_error
from tests.support.rpc import (
    SERVER,
    WAIT_S,
    WORKER,
    OutCall,
    RawClient,
    bed,
    call_all,
    little_memory,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

KEY = bytes(range(32))
SERVER_PROGRAM = """
import sys, threading
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.server.listener import Listener
secret = bytes.fromhex(sys.stdin.readline())
def handle(call):
    if call.meta == b"hold":
        threading.Event().wait(60)
    call.discard_rest()
    call.reply(b"ok")
listener = Listener(handle, Credentials("c", secret), Identity(Role.SERVER, 0))
listener.bind_tcp("127.0.0.1")
listener.start()
print(listener.endpoint.port, flush=True)
sys.stdin.read()
listener.close()
"""


class OtherProcess:
    """A server in its own process, to be killed, stopped and starved."""

    def __init__(self, num_descriptors: int | None = None) -> None:
        self.credentials = Credentials("c", os.urandom(32))
        limit = partial(_limit_descriptors, num_descriptors) if num_descriptors else None
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER_PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(self.credentials.secret.hex() + "\n")
        self.process.stdin.flush()
        self.endpoint = Endpoint("127.0.0.1", int(self.process.stdout.readline()))

    def connect(self) -> Connection:
        return connect(self.endpoint, WORKER, self.credentials)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()


SEEN_S = 20.0
"""Far below every deadline of these tests, and room for a busy machine."""


def _limit_descriptors(soft: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    made = OtherProcess()
    yield made
    made.end()


@pytest.fixture
def wire() -> Iterator[tuple[Connection, socket.socket, Sealer]]:
    """A connection, its peer's bare socket, and what seals the peer's frames."""
    left, right = socket.socketpair()
    connection = Connection(SocketStream(left, "server"), Session(SERVER, KEY, KEY))
    yield connection, right, Sealer(KEY)
    connection.close()
    right.close()


def test_a_closed_connection_refuses_a_call_before_a_byte_is_sent(wire):
    connection, peer, _ = wire
    connection.close()
    assert connection.closed
    with pytest.raises(ConnectionClosed, match="is closed; connect again"):
        connection.call(b"x", timeout_s=WAIT_S)
    assert connection.stats().calls == 0
    assert peer.recv(1) == b""


@pytest.mark.parametrize("payload_bytes", [0, 50_000_000])
def test_a_killed_server_is_seen_at_once(other, payload_bytes):
    connection = other.connect()
    killer = threading.Timer(0.05, other.process.kill)
    killer.start()
    began = time.monotonic()
    with pytest.raises(PeerGone):
        connection.call(b"hold", [bytes(payload_bytes)], timeout_s=60.0)
    assert time.monotonic() - began < SEEN_S
    assert connection.closed
    killer.join()
    other.process.wait(WAIT_S)
    with pytest.raises(PeerGone, match="Connection refused"):
        other.connect()


def test_a_frozen_server_is_a_passed_deadline_never_a_hang(other):
    connection = other.connect()
    other.process.send_signal(signal.SIGSTOP)
    # All of its threads: one that still ran could answer.
    assert os.WIFSTOPPED(os.waitpid(other.process.pid, os.WUNTRACED)[1])
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"no reply within 0\.5 s"):
        connection.call(b"", timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match="handshake"):
        connect(other.endpoint, WORKER, other.credentials, timeout_s=0.5)
    assert time.monotonic() - began < SEEN_S
    other.process.send_signal(signal.SIGCONT)
    with other.connect() as again:
        assert again.call(b"", timeout_s=WAIT_S).meta == b"ok"


@pytest.mark.fault("F28")
def test_a_reply_cut_at_every_byte_is_a_gone_peer():
    sealed = Sealer(KEY)
    reply = sealed.seal(FrameKind.REPLY, 1, b"", 5, more=True) + b"01234"
    reply += sealed.seal(FrameKind.REPLY, 1, b"meta", 3) + b"567"
    for cut in range(len(reply) + 1):
        left, right = socket.socketpair()
        connection = Connection(SocketStream(left, "server"), Session(SERVER, KEY, KEY))
        pending = connection.start(b"pull", into=[bytearray(8)], timeout_s=WAIT_S)
        right.sendall(reply[:cut])
        right.close()
        if cut < len(reply):
            with pytest.raises(PeerGone):
                pending.result(WAIT_S)
            assert connection.closed
        else:
            assert pending.result(WAIT_S).meta == b"meta"
        connection.close()


@pytest.mark.fault("F28")
def test_a_request_cut_at_every_byte_is_not_served(caplog):
    with bed() as made:
        length = len(_request(b"echo", b"payload"))
        for cut in range(length):
            with RawClient(made.address) as raw:
                raw.authenticate(made.credentials)
                raw.send((raw.sealed(b"echo", 7) + b"payload")[:cut])
                raw.sock.shutdown(socket.SHUT_WR)
                assert raw.until_closed() == b""
        wait_until(lambda: made.disconnected == [WORKER] * length)
        # The handler may begin once header and meta are there; it never gets a short payload.
        assert made.handled == [b"echo"] * 7


@pytest.mark.fault("F27")
@pytest.mark.parametrize("seed", range(3))
def test_bytes_that_come_in_any_pieces_are_the_same_call(wire, seed):
    connection, peer, sealer = wire
    draw = random.Random(seed)
    for request_id in range(1, 20):
        into = bytearray(draw.randrange(1, 20_000))
        payload = draw.randbytes(len(into))
        split = draw.randrange(len(into) + 1)
        reply = sealer.seal(FrameKind.REPLY, request_id, b"", split, more=True) + payload[:split]
        reply += sealer.seal(FrameKind.REPLY, request_id, b"m", len(into) - split) + payload[split:]
        pending = connection.start(b"pull", into=[into], timeout_s=WAIT_S)
        while reply:
            num_bytes = draw.randrange(1, 9000)
            peer.sendall(reply[:num_bytes])
            reply = reply[num_bytes:]
            assert pending.done() == (not reply)
        assert pending.result(0.0).meta == b"m"
        assert into == payload


@pytest.mark.fault("F27")
def test_a_reply_to_another_request_is_refused(wire):
    connection, peer, sealer = wire
    peer.sendall(sealer.seal(FrameKind.REPLY, 2, b"late", 0))
    with pytest.raises(
        ProtocolError, match="expected a reply to request 1, got REPLY of request 2"
    ):
        connection.call(b"", timeout_s=WAIT_S)
    assert connection.closed


def test_an_error_that_comes_before_the_request_is_sent_is_delivered(wire):
    """The server refuses and closes at once; the reason must not drown in the broken pipe."""
    connection, peer, sealer = wire
    peer.sendall(sealer.seal(FrameKind.ERROR, 1, encode_error("full", "no room"), 0))
    peer.shutdown(socket.SHUT_RD)
    with pytest.raises(RemoteError, match="full: no room"):
        connection.call(b"push", [bytes(50_000_000)], timeout_s=WAIT_S)
    assert connection.closed


def test_a_reply_is_not_to_fill_a_read_only_buffer_and_the_connection_stays(wire):
    connection, peer, sealer = wire
    with pytest.raises(ValueError, match="`into` holds a read-only buffer"):
        connection.call(b"pull", into=[b"12345678"], timeout_s=WAIT_S)
    assert not connection.closed
    peer.sendall(sealer.seal(FrameKind.REPLY, 2, b"meta", 0))
    assert connection.call(b"ask", timeout_s=WAIT_S).meta == b"meta"


def test_a_request_that_is_only_sent_ends_in_its_time_where_the_peer_takes_no_bytes(wire):
    connection, _, _ = wire
    with pytest.raises(DeadlineExceeded, match=r"request not sent to its end within 0\.1 s"):
        connection.start(b"put", [bytes(50_000_000)], timeout_s=0.1)
    assert connection.closed


def test_a_request_that_is_only_sent_tells_at_once_of_a_peer_that_is_gone(wire):
    connection, peer, _ = wire
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerGone):
        connection.start(b"put", [bytes(50_000_000)], timeout_s=WAIT_S)
    assert connection.closed


def test_a_refusal_of_a_request_that_is_only_sent_is_its_result(wire):
    connection, peer, sealer = wire
    peer.sendall(sealer.seal(FrameKind.ERROR, 1, encode_error("full", "no room"), 0))

    def close_once_it_is_read() -> None:
        wait_until(lambda: connection.reader.received_bytes, "the refusal is read")
        peer.close()

    closer = threading.Thread(target=close_once_it_is_read)
    closer.start()
    pending = connection.start(b"put", [bytes(50_000_000)], timeout_s=WAIT_S)
    closer.join()
    with pytest.raises(RemoteError, match="full: no room"):
        pending.result(WAIT_S)


@pytest.mark.fault("F29")
def test_a_slow_client_does_not_disturb_others():
    limits = Limits(stall_timeout_s=0.5)
    with bed(limits=limits) as made, RawClient(made.address) as slow, made.connect() as other:
        slow.authenticate(made.credentials)
        slow.send(slow.sealed(b"echo", 1000) + b"a few bytes")
        for _ in range(20):
            assert other.call(b"echo", [b"x"], timeout_s=WAIT_S).meta == b"done"
        assert slow.until_closed() == b""
        wait_until(lambda: made.listener.stats().errors == 1)


@pytest.mark.fault("F29")
def test_a_client_that_takes_no_reply_is_cut():
    limits = Limits(stall_timeout_s=0.5, send_buffer_bytes=4096)
    with bed(limits=limits) as made, RawClient(made.address) as lazy:
        lazy.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.authenticate(made.credentials)
        lazy.sock.sendall(lazy.sealed(b"echo", 2_000_000))
        lazy.sock.sendall(bytes(2_000_000))
        wait_until(lambda: made.listener.stats().errors >= 1)


@pytest.mark.fault("F29")
def test_an_idle_connection_stays():
    limits = Limits(stall_timeout_s=0.3, handshake_timeout_s=2.0)
    with bed(limits=limits) as made, made.connect() as idle, made.connect() as clock:
        with pytest.raises(DeadlineExceeded):
            clock.call(b"wait", timeout_s=2.3)
        assert idle.call(b"echo", timeout_s=WAIT_S).meta == b"done"


def test_a_restarted_server_is_known_by_its_generation():
    credentials = Credentials.generate()
    endpoint = Endpoint("127.0.0.1", 0)
    connection = None
    for generation in (4, 5):
        restarted = Identity(Role.SERVER, 0, generation)
        with Listener(lambda call: call.reply(b""), credentials, restarted) as listener:
            listener.bind_tcp(endpoint.host, endpoint.port)
            listener.start()
            endpoint = listener.endpoint
            if connection is not None:
                with pytest.raises(PeerGone):
                    connection.call(b"", timeout_s=WAIT_S)
            connection = connect(endpoint, WORKER, credentials)
            assert connection.peer == restarted
    assert connection is not None
    connection.close()


@pytest.mark.fault("F51")
def test_a_request_beyond_the_limit_is_refused_before_it_is_sent():
    limits = Limits(max_payload_bytes=1000, max_meta_bytes=100)
    with bed(limits=limits) as made, made.connect() as connection:
        with pytest.raises(LimitExceeded, match="1001 bytes exceeds max_payload_bytes=1000"):
            connection.call(b"echo", [bytes(1001)], timeout_s=WAIT_S)
        with pytest.raises(LimitExceeded, match="101 bytes exceeds max_meta_bytes=100"):
            connection.call(b"m" * 101, timeout_s=WAIT_S)
        assert connection.call(b"echo", [bytes(1000)], timeout_s=WAIT_S).meta == b"done"


@pytest.mark.fault("F51")
def test_a_request_of_a_peer_with_larger_limits_is_refused_from_its_announced_length(
    caplog: pytest.LogCaptureFixture,
):
    with bed(limits=Limits(max_payload_bytes=1000)) as made:
        with made.connect(limits=Limits()) as connection:
            assert connection.call(b"echo", [bytes(1000)], timeout_s=WAIT_S).meta == b"done"
            large = bytes(64 << 20)
            with little_memory(), pytest.raises(TransportError):
                connection.call(b"echo", [large], timeout_s=WAIT_S)
        assert made.handled == [b"echo"]
        wait_until(lambda: "exceeds max_payload_bytes=1000" in caplog.text, "the limit's name")
        with made.connect() as connection:
            assert connection.call(b"echo", [b"well"], timeout_s=WAIT_S).meta == b"done"


@pytest.mark.fault("F52")
def test_a_server_without_descriptors_serves_again_when_it_has_some():
    starved = OtherProcess(num_descriptors=32)
    try:
        address = (starved.endpoint.host, starved.endpoint.port)
        strangers = [socket.create_connection(address) for _ in range(60)]
        for stranger in strangers:
            stranger.close()
        with starved.connect() as connection:
            assert connection.call(b"", timeout_s=WAIT_S).meta == b"ok"
    finally:
        starved.end()


def test_one_thread_at_a_time_waits_for_a_call():
    with bed() as made, made.connect() as connection, made.connect() as another:
        pending = connection.start(b"wait", timeout_s=WAIT_S)
        other = another.start(b"wait", timeout_s=WAIT_S)
        waiting = threading.Thread(target=pending.result, args=(WAIT_S,))
        waiting.start()
        wait_until(connection.driving.locked)
        with pytest.raises(BusyError, match="another thread is waiting on this call"):
            pending.result(0.0)
        with pytest.raises(BusyError, match="another thread is waiting on one of these calls"):
            wait_any([other, pending], 0.0)
        made.gate.set()
        waiting.join(WAIT_S)
        assert pending.result(0.0).meta == b"waited"
        assert other.result(WAIT_S).meta == b"waited", "it is free after the refusal"


def test_an_answer_that_no_frame_takes_is_the_handlers_failure(caplog):
    with bed(limits=Limits(max_meta_bytes=1024)) as made, made.connect() as connection:
        with pytest.raises(RemoteError, match="internal: ValueError in the handler"):
            connection.call(b"long_meta", timeout_s=WAIT_S)
        assert connection.call(b"echo", timeout_s=WAIT_S).meta == b"done"
    assert "reply meta has 1025 bytes, max_meta_bytes=1024" in caplog.text


def test_one_dead_server_of_several_does_not_hide_the_others_replies(other):
    with bed() as made, made.connect() as well, other.connect() as dying:
        other.process.kill()
        calls = [OutCall(dying, b"hold", [bytes(10_000_000)]), OutCall(well, b"echo", [b"w"])]
        lost, reply = call_all(calls, timeout_s=WAIT_S)
        assert isinstance(lost, PeerGone)
        assert not isinstance(reply, Exception)
        assert bytes(reply.payload) == b"w"


def _request(meta: bytes, payload: bytes) -> bytes:
    return Sealer(KEY).seal(FrameKind.REQUEST, 1, meta, len(payload)) + payload
