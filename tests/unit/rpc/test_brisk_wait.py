"""A wait that follows a short one is watched before it sleeps; what it returns stays the same."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rpc.transport import SocketStream
from tests.rpc_bed import WAIT_S


@pytest.fixture
def ends() -> Iterator[tuple[SocketStream, socket.socket]]:
    left, right = socket.socketpair()
    stream = SocketStream(left, "left")
    yield stream, right
    stream.close()
    right.close()


def after_a_short_wait(stream: SocketStream, peer: socket.socket) -> None:
    """Bring the stream to where its next wait is watched."""
    deadline = time.monotonic() + WAIT_S
    while not stream._brisk:  # a wait for what is there already is short, unless preempted
        assert time.monotonic() < deadline
        peer.send(b"x")
        assert stream.wait(read=True, write=False, timeout_s=WAIT_S)
        assert stream.recv_into(memoryview(bytearray(1))) == 1


def test_a_watched_wait_sees_what_comes_during_it_or_later(ends):
    stream, peer = ends
    for delay_s in (0.0, 0.02):
        after_a_short_wait(stream, peer)
        sender = threading.Timer(delay_s, peer.send, [b"y"])
        sender.start()
        assert stream.wait(read=True, write=False, timeout_s=WAIT_S)
        sender.join(WAIT_S)
        assert stream.recv_into(memoryview(bytearray(1))) == 1


@pytest.mark.parametrize("timeout_s", [0.0, 0.00001, 0.03])
def test_a_watched_wait_keeps_its_time(ends, timeout_s):
    stream, peer = ends
    after_a_short_wait(stream, peer)
    begun = time.monotonic()
    assert not stream.wait(read=True, write=False, timeout_s=timeout_s)
    assert time.monotonic() - begun >= timeout_s


def test_after_a_long_wait_nothing_is_watched(ends):
    stream, peer = ends
    after_a_short_wait(stream, peer)
    assert not stream.wait(read=True, write=False, timeout_s=0.01)
    assert not stream._brisk


def test_a_watched_wait_ends_when_the_stream_is_shut_down(ends):
    stream, peer = ends
    after_a_short_wait(stream, peer)
    closer = threading.Timer(0.02, stream.shutdown)
    closer.start()
    assert stream.wait(read=True, write=False, timeout_s=WAIT_S)
    closer.join(WAIT_S)
