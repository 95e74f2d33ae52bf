"""A wait that follows a short one is watched before it sleeps; what it returns stays the same."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from rpc.transport.spin_wait import MAX_SHORT_WAITS, SHORT_WAIT_S, SLOW_POLL_S, SpinThenPoll
from rpc.transport.stream import SocketStream
from tests.support.rpc import WAIT_S


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
    poll = stream._poll
    # A wait for what is there already is short, unless preempted.
    while poll._num_short < poll.short_waits_before_spin:
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
    assert stream._poll._num_short == 0


def test_a_watched_wait_ends_when_the_stream_is_shut_down(ends):
    stream, peer = ends
    after_a_short_wait(stream, peer)
    closer = threading.Timer(0.02, stream.shutdown)
    closer.start()
    assert stream.wait(read=True, write=False, timeout_s=WAIT_S)
    closer.join(WAIT_S)


class Core:
    """What a poll meets: looks and yields that take their time, and one event after a delay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.look_s = self.yield_s = 1e-6
        self.event_at_s = 0.0
        self.num_looks = self.num_sleeps = 0
        self.tested = SpinThenPoll()
        self.tested._poll = self  # type: ignore[assignment]
        monkeypatch.setattr("rpc.transport.spin_wait.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("rpc.transport.spin_wait.os.sched_yield", self.give_way)

    def register(self, descriptor: int, events: int) -> None:
        assert descriptor == 5

    def give_way(self) -> None:
        self.now_s += self.yield_s

    def poll(self, timeout_ms: int) -> list[tuple[int, int]]:
        if timeout_ms == 0:
            self.num_looks += 1
            self.now_s += self.look_s
        else:
            self.num_sleeps += 1
            self.now_s = max(self.now_s, min(self.event_at_s, self.now_s + timeout_ms / 1e3))
        return [(5, 1)] if self.now_s >= self.event_at_s else []

    def wait(self, event_in_s: float) -> tuple[int, int]:
        """Wait for an event; return how often it was looked for, and slept for."""
        self.event_at_s = self.now_s + event_in_s
        before = self.num_looks, self.num_sleeps
        assert self.tested.wait(5, 1, 60.0)
        return self.num_looks - before[0], self.num_sleeps - before[1]


def test_a_wait_after_a_short_one_is_watched_and_no_other(monkeypatch):
    core = Core(monkeypatch)
    assert core.wait(50e-6) == (0, 1)
    looks, sleeps = core.wait(50e-6)
    assert (looks > 20, sleeps) == (True, 0)
    looks, sleeps = core.wait(0.1)
    assert core.num_looks < 2 * SHORT_WAIT_S / core.look_s
    assert sleeps == 1
    assert core.wait(50e-6) == (0, 1)


@pytest.mark.parametrize("slow", ["look_s", "yield_s"])
def test_who_shares_core_or_interpreter_sleeps(monkeypatch, slow):
    """One slow look ends a watch, and the next watch is ever further away."""
    core = Core(monkeypatch)
    setattr(core, slow, 100 * SLOW_POLL_S)
    for _ in range(20 * MAX_SHORT_WAITS):
        core.wait(50e-6)
    assert core.tested.short_waits_before_spin == MAX_SHORT_WAITS
    assert core.num_looks <= 10 + 20


def test_watching_comes_back_with_a_core_of_its_own(monkeypatch):
    core = Core(monkeypatch)
    core.tested.short_waits_before_spin = MAX_SHORT_WAITS
    for _ in range(2 * MAX_SHORT_WAITS):
        core.wait(50e-6)
    assert core.tested.short_waits_before_spin == 1
    assert core.wait(50e-6)[1] == 0


def test_a_watch_that_was_slow_keeps_what_it_found(monkeypatch):
    core = Core(monkeypatch)
    core.wait(0.0)
    core.look_s = 2 * SLOW_POLL_S
    assert core.wait(0.0) == (1, 0)
    assert core.tested.short_waits_before_spin == 2
