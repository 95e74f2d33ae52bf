"""What every transport and the calls over it promise: TCP, TLS, Unix socket, in-process twin."""

from __future__ import annotations

import dataclasses
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from rpc.auth.handshake import Role
from rpc.client.connection import Connection, Reply, wait_any
from rpc.errors import (
    AuthError,
    BusyError,
    ConnectionClosed,
    DeadlineExceeded,
    LimitExceeded,
    PeerGone,
    ProtocolError,
    RemoteError,
)
from rpc.limits import Limits
from rpc.transport.inproc import stream_pair
from rpc.transport.stream import SocketStream, Stream, wait_streams
from tests.support.rpc import (
    SERVER,
    TRANSPORTS,
    WAIT_S,
    WORKER,
    Bed,
    OutCall,
    bed,
    call_all,
    num_descriptors,
    sealed_pair,
    shared_pair,
    tls_pair,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket

SMALL_BUFFERS = Limits(
    send_buffer_bytes=64 * 1024, receive_buffer_bytes=64 * 1024, shared_ring_bytes=64 * 1024
)


def _socket_pair(family: int) -> tuple[SocketStream, SocketStream]:
    if family == socket.AF_UNIX:
        left, right = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            left = socket.create_connection(server.getsockname())
            right, _ = server.accept()
    return SocketStream(left, "left", SMALL_BUFFERS), SocketStream(right, "right", SMALL_BUFFERS)


def _send_fails(stream: Stream) -> bool:
    try:
        stream.sendmsg([memoryview(b"x")])
    except PeerGone:
        return True
    return False


def at_rest() -> tuple[int, int]:
    """Return the descriptors and threads of this process once they stay the same."""
    seen = []

    def is_same() -> bool:
        seen.append((num_descriptors(), threading.active_count()))
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    wait_until(is_same)
    return seen[-1]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(transport: str) -> Iterator[tuple[Stream, Stream]]:
    if transport == "inproc":
        streams: tuple[Stream, Stream] = stream_pair()
    else:
        streams = _socket_pair(socket.AF_INET if "tcp" in transport else socket.AF_UNIX)
        if transport == "shm":
            streams = shared_pair(*streams, SMALL_BUFFERS)
        if transport == "tcp+payload":
            streams = sealed_pair(*streams)
        if transport == "tcp+tls":
            streams = tls_pair(*streams)
    before = num_descriptors()
    yield streams
    for stream in streams:
        stream.close()
        stream.close()
    assert num_descriptors() < before


@pytest.fixture
def served(transport: str) -> Iterator[Bed]:
    with bed(transport) as made:
        yield made


@pytest.fixture
def connection(served: Bed) -> Iterator[Connection]:
    with served.connect() as made:
        yield made


class TestStream:
    def test_names_its_transport(self, pair, transport):
        assert {stream.transport for stream in pair} == {transport}

    def test_carries_bytes_in_order_across_views(self, pair):
        left, right = pair
        assert left.sendmsg([memoryview(b"ab"), memoryview(b"cde")]) == 5
        assert right.wait(read=True, write=False, timeout_s=WAIT_S)
        buffer = memoryview(bytearray(3))
        assert right.recv_into(buffer) == 3
        assert bytes(buffer) == b"abc"
        assert right.recv_into(buffer) == 2
        assert bytes(buffer[:2]) == b"de"

    def test_never_blocks(self, pair):
        left, right = pair
        assert right.recv_into(memoryview(bytearray(1))) is None
        chunk = memoryview(bytes(64 * 1024))
        sent = 0
        while (count := left.sendmsg([chunk])) is not None:
            sent += count
            assert sent < 2**28, "a stream without bound"
        assert not left.wait(read=True, write=True, timeout_s=0.0)

    def test_wait_ends_at_its_time(self, pair):
        began = time.monotonic()
        assert not pair[0].wait(read=True, write=False, timeout_s=0.05)
        assert 0.05 <= time.monotonic() - began < WAIT_S

    def test_becomes_writable_when_the_peer_reads(self, pair):
        left, right = pair
        chunk = memoryview(bytes(64 * 1024))
        while left.sendmsg([chunk]) is not None:
            pass
        sink = memoryview(bytearray(1 << 20))
        while not left.wait(read=False, write=True, timeout_s=0.0):
            if right.recv_into(sink) is None:
                right.wait(read=True, write=False, timeout_s=WAIT_S)
        assert left.sendmsg([chunk]) is not None

    def test_all_bytes_arrive_before_the_end(self, pair):
        left, right = pair
        left.sendmsg([memoryview(b"last words")])
        left.close()
        buffer = memoryview(bytearray(100))
        assert right.wait(read=True, write=False, timeout_s=WAIT_S)
        assert right.recv_into(buffer) == 10
        with pytest.raises(PeerGone):
            right.recv_into(buffer)
        # TCP takes one more send until it learns of the end.
        wait_until(lambda: _send_fails(right), "a failing send")

    def test_peer_closed_is_seen_without_reading(self, pair):
        left, right = pair
        left.sendmsg([memoryview(b"unread")])
        assert not right.peer_closed()
        left.close()
        wait_until(right.peer_closed)

    def test_what_this_side_closed_is_a_closed_error(self, pair):
        left, _ = pair
        left.shutdown()
        assert left.peer_closed()
        with pytest.raises(ConnectionClosed):
            left.recv_into(memoryview(bytearray(1)))
        with pytest.raises(ConnectionClosed):
            left.sendmsg([memoryview(b"x")])

    def test_shutdown_wakes_who_waits(self, pair):
        left, _ = pair
        woken = threading.Event()

        def wait() -> None:
            if left.wait(read=True, write=False, timeout_s=WAIT_S):
                woken.set()

        thread = threading.Thread(target=wait)
        thread.start()
        left.shutdown()
        thread.join(WAIT_S)
        assert woken.is_set()

    def test_several_streams_wait_together(self, pair):
        left, right = pair
        wanted = [(left, True, False), (right, True, False)]
        assert wait_streams(wanted, 0.0) == []
        left.sendmsg([memoryview(b"x")])
        assert wait_streams(wanted, WAIT_S) == [1]
        assert wait_streams([(left, True, True), (right, True, True)], WAIT_S) == [0, 1]


class TestCalls:
    def test_a_call_carries_meta_and_payload_both_ways(self, connection, transport):
        assert connection.transport == transport
        assert connection.peer == SERVER
        reply = connection.call(b"echo", [b"abc", np.arange(3, dtype=np.int16)], timeout_s=WAIT_S)
        assert reply.meta == b"done"
        assert bytes(reply.payload) == b"abc" + np.arange(3, dtype=np.int16).tobytes()

    def test_reply_goes_into_the_callers_buffers(self, connection):
        first, second = bytearray(2), np.zeros(2, np.float32)
        data = np.array([1.5, -2.0], np.float32)
        into = [memoryview(first), memoryview(b""), second]
        reply = connection.call(b"echo", [b"hi", data], into=into, timeout_s=WAIT_S)
        assert not reply.payload
        assert first == b"hi"
        assert second.tolist() == data.tolist()

    def test_empty_call(self, connection):
        reply = connection.call(b"echo", timeout_s=WAIT_S)
        assert (reply.meta, bytes(reply.payload)) == (b"done", b"")

    def test_more_views_than_one_send_takes(self, connection):
        parts = [bytes([index % 256]) * 3 for index in range(5000)]
        reply = connection.call(b"echo", parts, timeout_s=WAIT_S)
        assert bytes(reply.payload) == b"".join(parts)

    @pytest.mark.parametrize("meta_bytes", [0, 8100, 8192, 8193, 65536])
    def test_metas_of_every_size_pass(self, served, meta_bytes):
        meta = b"echo:".ljust(meta_bytes, b"x") if meta_bytes else b""
        with served.connect() as connection:
            if meta:
                payload = [b"after a long meta"]
                assert bytes(connection.call(meta, payload, timeout_s=WAIT_S).payload) == payload[0]
            else:
                with pytest.raises(RemoteError, match="unknown"):
                    connection.call(meta, timeout_s=WAIT_S)
            assert connection.call(b"echo", [b"next"], timeout_s=WAIT_S).payload == b"next"

    def test_reply_in_parts_is_one_payload(self, connection):
        reply = connection.call(b"parts", timeout_s=WAIT_S)
        assert (reply.meta, bytes(reply.payload)) == (b"parts", b"onetwothree")
        into = bytearray(11)
        connection.call(b"parts", into=[memoryview(into)], timeout_s=WAIT_S)
        assert into == b"onetwothree"

    @pytest.mark.slow
    def test_64_mb_each_way_through_small_buffers(self, transport):
        data = np.arange(8_000_000, dtype=np.int64)
        back = np.zeros_like(data)
        with bed(transport, SMALL_BUFFERS) as made, made.connect() as connection:
            into = np.split(back, 50)
            connection.call(b"exchange", np.split(data, 50), into=into, timeout_s=60.0)
        assert np.array_equal(data, back)

    def test_an_unread_request_is_drained(self, connection):
        payload = [bytes(3_000_000)]
        assert connection.call(b"ignore", payload, timeout_s=WAIT_S).meta == b"ignored"
        assert connection.call(b"echo", [b"z"], timeout_s=WAIT_S).payload == b"z"

    @pytest.mark.parametrize(
        ("meta", "payload", "code"),
        [
            (b"fail", b"", "refused"),
            (b"fail", bytes(1_000_000), "refused"),
            (b"fail_midway", bytes(1_000_000), "shape"),
            (b"raise", b"x", "internal"),
            (b"silent", b"x", "internal"),
            (b"overread", b"x", "protocol_error"),
            (b"nonsense", b"", "unknown"),
        ],
    )
    def test_a_refusal_leaves_the_connection_usable(self, connection, meta, payload, code):
        with pytest.raises(RemoteError) as caught:
            connection.call(meta, [payload], timeout_s=WAIT_S)
        assert caught.value.code == code
        assert "secret" not in str(caught.value)
        assert connection.call(b"echo", [b"z"], timeout_s=WAIT_S).payload == b"z"
        assert connection.stats().errors == 1

    def test_a_refusal_carries_details(self, connection):
        with pytest.raises(RemoteError, match="refused: not today") as caught:
            connection.call(b"fail", timeout_s=WAIT_S)
        assert caught.value.details == {"why": "test"}
        with pytest.raises(RemoteError) as caught:
            connection.call(b"fail_midway", timeout_s=WAIT_S, into=[memoryview(bytearray(9))])
        assert (caught.value.message, caught.value.details) == ("midway", {"at": "10"})

    def test_an_answer_comes_once(self, connection):
        assert connection.call(b"twice", timeout_s=WAIT_S).meta == b"first"
        assert connection.call(b"echo", timeout_s=WAIT_S).meta == b"done"

    def test_into_of_another_size_is_refused(self, served):
        for size in (2, 4):
            with served.connect() as connection:
                into = [memoryview(bytearray(size))]
                with pytest.raises(ProtocolError, match=r"3 payload bytes.*hold [24]"):
                    connection.call(b"echo", [b"abc"], into=into, timeout_s=WAIT_S)
                assert connection.closed

    def test_a_reply_beyond_max_reply_bytes_is_refused(self, served):
        with served.connect(limits=Limits(max_reply_bytes=10)) as connection:
            assert connection.call(b"echo", [bytes(10)], timeout_s=WAIT_S).payload == bytes(10)
            with pytest.raises(LimitExceeded, match="11 payload bytes, max_reply_bytes=10"):
                connection.call(b"parts", timeout_s=WAIT_S)
            assert connection.closed

    def test_deadline_closes(self, served, connection):
        with pytest.raises(DeadlineExceeded, match=r"server:0.*request sent, no reply within 0.5"):
            connection.call(b"wait", timeout_s=0.5)
        assert connection.closed
        with pytest.raises(ConnectionClosed):
            connection.call(b"echo", timeout_s=WAIT_S)
        assert served.saw_peer_gone.wait(WAIT_S)

    def test_deadline_while_sending(self, transport):
        overdue = pytest.raises(DeadlineExceeded, match="request not sent to its end")
        with bed(transport, SMALL_BUFFERS) as made, made.connect() as connection, overdue:
            connection.call(b"leave_unread", [bytes(50_000_000)], timeout_s=0.2)

    def test_one_call_at_a_time(self, served, connection):
        pending = connection.start(b"wait", timeout_s=WAIT_S)
        with pytest.raises(BusyError):
            connection.call(b"echo", timeout_s=WAIT_S)
        assert not pending.done()
        assert wait_any([pending], 0.01) == []
        served.gate.set()
        assert wait_any([pending], WAIT_S) == [pending]
        assert pending.done()
        assert pending.result(0.0).meta == b"waited"
        assert connection.call(b"echo", timeout_s=WAIT_S).meta == b"done"

    def test_start_leaves_a_refusal_to_result(self, connection):
        pending = connection.start(b"fail", timeout_s=WAIT_S)
        with pytest.raises(RemoteError):
            pending.result(WAIT_S)
        assert not connection.closed

    def test_closing_from_another_thread_ends_a_call(self, served, connection):
        closer = threading.Thread(target=lambda: (served.waiting.acquire(), connection.close()))
        closer.start()
        with pytest.raises(ConnectionClosed):
            connection.call(b"wait", timeout_s=WAIT_S)
        closer.join(WAIT_S)

    def test_closing_with_a_call_under_way(self, served, connection):
        pending = connection.start(b"wait", timeout_s=WAIT_S)
        connection.close()
        with pytest.raises(ConnectionClosed):
            pending.result(WAIT_S)
        assert wait_any([pending], 0.0) == [pending]

    def test_a_listener_that_closes_ends_calls(self, served, connection):
        pending = connection.start(b"wait", timeout_s=WAIT_S)
        assert served.waiting.acquire(timeout=WAIT_S)
        served.listener.close()
        with pytest.raises(PeerGone):
            pending.result(WAIT_S)
        with pytest.raises(PeerGone):
            served.connect(timeout_s=1.0)

    def test_calls_that_are_finished_before_the_listener_closes_get_their_answers(self, served):
        connections = [served.connect() for _ in range(3)]
        pending = [connection.start(b"wait", timeout_s=WAIT_S) for connection in connections]
        for _ in pending:
            assert served.waiting.acquire(timeout=WAIT_S)
        assert not served.listener.finish_calls(0.01)
        served.gate.set()
        assert served.listener.finish_calls(WAIT_S)
        served.listener.close()
        assert [call.result(WAIT_S).meta for call in pending] == [b"waited"] * 3
        for connection in connections:
            connection.close()

    def test_several_calls_at_once(self, served):
        connections = [served.connect() for _ in range(4)]
        connections[3].close()
        arrays = [np.full(300_000, index, np.float64) for index in range(4)]
        backs = [np.empty_like(array) for array in arrays]
        metas = [b"exchange", b"fail", b"exchange", b"exchange"]
        calls = [
            OutCall(connection, meta, [array], [back])
            for connection, meta, array, back in zip(connections, metas, arrays, backs, strict=True)
        ]
        outcomes = call_all(calls, timeout_s=WAIT_S)
        assert [type(outcome).__name__ for outcome in outcomes] == [
            "Reply",
            "RemoteError",
            "Reply",
            "ConnectionClosed",
        ]
        assert np.array_equal(backs[0], arrays[0])
        assert np.array_equal(backs[2], arrays[2])
        assert call_all([], timeout_s=1.0) == []
        for connection in connections:
            connection.close()

    def test_several_calls_share_one_deadline(self, served):
        with served.connect() as slow, served.connect() as quick:
            calls = [OutCall(slow, b"wait"), OutCall(quick, b"echo", [b"q"])]
            late, reply = call_all(calls, timeout_s=1.0)
            assert isinstance(late, DeadlineExceeded)
            assert "within 1 s" in str(late)
            assert isinstance(reply, Reply)
            assert bytes(reply.payload) == b"q"
            assert slow.closed
            assert not quick.closed

    def test_wait_any_returns_the_first(self, served):
        with served.connect() as slow, served.connect() as quick:
            waits = slow.start(b"wait", timeout_s=WAIT_S)
            echoes = quick.start(b"echo", [b"e"], timeout_s=WAIT_S)
            assert wait_any([waits, echoes], WAIT_S) == [echoes]
            served.gate.set()
            assert waits.result(WAIT_S).meta == b"waited"

    def test_statistics_add_up(self, served, connection):
        for size in (0, 100, 100_000):
            connection.call(b"echo", [bytes(size)], timeout_s=WAIT_S)
        total = 100_100 + 3 * (48 + 4)
        ours = connection.stats()
        assert (ours.calls, ours.errors) == (3, 0)
        assert ours.bytes_sent == ours.bytes_received == total
        connection.close()
        wait_until(lambda: served.listener.stats().open_connections == 0)
        assert served.listener.stats().errors == 0
        assert served.disconnected == [WORKER]

    def test_wrong_token_is_refused_with_a_hint(self, served):
        strangers = dataclasses.replace(served.credentials, secret=b"x" * 32)
        served.credentials, ours = strangers, served.credentials
        with pytest.raises(AuthError, match=f"does not match cluster {ours.cluster_id[:4]}…"):
            served.connect()
        wait_until(lambda: served.listener.stats().refused == 2)
        assert served.listener.stats().open_connections == 0

    def test_unexpected_role_is_refused(self, served):
        with pytest.raises(AuthError, match=r"expected a driver.*found server:0"):
            served.connect(expect=Role.DRIVER)

    def test_nothing_is_left_after_use(self, transport):
        with bed(transport) as warm, warm.connect():
            pass
        descriptors, threads = at_rest()
        for _ in range(5):
            with bed(transport) as made:
                connections = [made.connect() for _ in range(5)]
                connections[0].call(b"echo", [bytes(100_000)], timeout_s=WAIT_S)
                pending = connections[1].start(b"wait", timeout_s=WAIT_S)
                connections[1].close()
                assert pending.done()
                for connection in connections[2:]:
                    connection.close()
            connections[0].close()
        wait_until(lambda: threading.active_count() <= threads, "threads as before")
        wait_until(lambda: num_descriptors() <= descriptors, "descriptors as before")
