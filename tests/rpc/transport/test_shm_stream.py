"""Shared memory between two processes: hostile peers, both ends' deaths, and the ways around it."""

from __future__ import annotations

import array
import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rpc.client.connect import dial
from rpc.client.connection import connect
from rpc.errors import DeadlineExceeded, PeerGone, ProtocolError
from rpc.limits import Limits
from rpc.transport import shm_stream
from rpc.transport.memfd import SharedMemory, cannot_share
from rpc.transport.shm_stream import SharedStream, share
from rpc.transport.stream import SocketStream
from rpc.wire.frame_io import Budget
from tests.support.named_memory import left_since, named
from tests.support.rpc import WAIT_S, WORKER, Bed, bed, error_of, num_descriptors, shared_pair
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.socket, pytest.mark.skipif(bool(cannot_share()), reason=cannot_share())]
RING = 64 * 1024
LIMITS = Limits(shared_ring_bytes=RING)
OFFER = struct.Struct("<4sIQ")


def ends() -> tuple[SocketStream, SocketStream]:
    left, right = socket.socketpair()
    return SocketStream(left, "left"), SocketStream(right, "right")


@pytest.fixture
def pair() -> Iterator[tuple[SharedStream, SharedStream]]:
    streams = shared_pair(*ends(), LIMITS)
    yield streams
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("seed", range(4))
def test_every_byte_comes_once_and_in_order(pair, seed):
    left, right = pair
    draw = random.Random(seed)
    sent = draw.randbytes(6 * RING + draw.randrange(RING))

    def send() -> None:
        view = memoryview(sent)
        while view:
            cut = draw.randrange(1, 2 * RING)
            count = left.sendmsg([view[: cut // 2], view[cut // 2 : cut]])
            if count is None:
                left.wait(read=False, write=True, timeout_s=WAIT_S)
            view = view[count or 0 :]

    sender = threading.Thread(target=send)
    sender.start()
    got = bytearray()
    picks = random.Random(seed + 100)
    deadline = time.monotonic() + WAIT_S
    while len(got) < len(sent):
        assert time.monotonic() < deadline
        part = memoryview(bytearray(picks.randrange(1, 2 * RING)))
        count = right.recv_into(part)
        if count is None:
            right.wait(read=True, write=False, timeout_s=WAIT_S)
        got += part[: count or 0]
    sender.join(WAIT_S)
    assert bytes(got) == sent


@pytest.mark.attack("A08")
@pytest.mark.parametrize("value", [RING + 1, 2**63, 2**64 - 1])
def test_counters_that_lie_end_the_connection(pair, value):
    left, right = pair
    left._our_counters[shm_stream._PUT] = value
    assert isinstance(error_of(lambda: right.recv_into(memoryview(bytearray(9)))), ProtocolError)
    left._our_counters[shm_stream._TAKEN] = value
    assert isinstance(error_of(lambda: right.sendmsg([memoryview(b"x")])), ProtocolError)


def test_a_counter_that_falls_ends_the_connection(pair):
    left, right = pair
    left.sendmsg([memoryview(b"abc")])
    assert right.recv_into(memoryview(bytearray(3))) == 3
    left._our_counters[shm_stream._PUT] = 2
    with pytest.raises(ProtocolError, match="-1 bytes to read"):
        right.recv_into(memoryview(bytearray(9)))


@pytest.mark.attack("A08")
@pytest.mark.parametrize("read", [True, False])
def test_a_lie_told_before_a_wait_is_left_to_the_next_move(pair, read):
    """A wait that raised would leave its call open: only a move of bytes settles it."""
    left, right = pair
    left._our_counters[shm_stream._PUT if read else shm_stream._TAKEN] = 2**63
    assert right.wait(read=read, write=not read, timeout_s=0.0)
    assert right.interest(read=read, write=not read) == (-1, 0)


def test_a_writer_is_woken_who_fills_the_ring_during_a_look(pair, monkeypatch):
    """It saw no room, so it sleeps; the reader saw half a ring, and takes exactly that."""
    left, right = pair
    half = memoryview(bytes(RING // 2))
    copy = shm_stream._copy

    def fill_meanwhile(into: memoryview, data: memoryview) -> None:
        monkeypatch.setattr(shm_stream, "_copy", copy)
        assert left.sendmsg([half]) == len(half)
        assert left.sendmsg([half]) is None
        assert not left.wait(read=False, write=True, timeout_s=0.0)
        copy(into, data)

    assert left.sendmsg([half]) == len(half)
    monkeypatch.setattr(shm_stream, "_copy", fill_meanwhile)
    for _ in range(2):
        assert right.recv_into(memoryview(bytearray(len(half)))) == len(half)
    assert left._doorbell.wait(read=True, write=False, timeout_s=WAIT_S)


def bells(stream: SharedStream) -> int:
    """Take what the peer has rung."""
    taken = memoryview(bytearray(64))
    return stream._doorbell.recv_into(taken) or 0


def test_the_peer_rings_once_for_each_sleep_and_never_while_this_side_is_awake(pair):
    left, right = pair
    for _ in range(3):
        right.sendmsg([memoryview(b"abc")])
    assert bells(left) == 0
    assert left.recv_into(memoryview(bytearray(9))) == 9
    for _ in range(2):
        assert not left.wait(read=True, write=False, timeout_s=0.0)
        for _ in range(3):
            right.sendmsg([memoryview(b"abc")])
        assert bells(left) == 1
        assert left.recv_into(memoryview(bytearray(9))) == 9


def test_a_writer_is_woken_when_half_of_its_ring_is_free(pair):
    left, right = pair
    assert left.sendmsg([memoryview(bytes(RING))]) == RING
    assert not left.wait(read=False, write=True, timeout_s=0.0)
    quarter = memoryview(bytearray(RING // 4))
    for woken in (0, 1, 0):
        assert right.recv_into(quarter) == len(quarter)
        assert bells(left) == woken


def test_who_waits_for_bytes_is_not_woken_by_room(pair):
    """A request that the server takes would wake the client that waits for its answer."""
    left, right = pair
    left.sendmsg([memoryview(b"abc")])
    assert not left.wait(read=True, write=False, timeout_s=0.0)
    assert right.recv_into(memoryview(bytearray(9))) == 3
    assert bells(left) == 0


def test_bytes_that_come_just_before_this_side_says_that_it_sleeps_are_seen(pair, monkeypatch):
    """The peer did not ring for them."""
    left, right = pair
    look = left._may_move

    def look_too_early(*, read: bool, write: bool) -> bool:
        monkeypatch.setattr(left, "_may_move", look)
        moves = look(read=read, write=write)
        right.sendmsg([memoryview(b"x")])
        return moves

    sleep, were_awake = left._poll.wait, list[bool]()

    def noted(*arguments: Any, **looks: Any) -> bool:
        were_awake.append(sleep(*arguments, **looks))
        return were_awake[-1]

    monkeypatch.setattr(left, "_may_move", look_too_early)
    monkeypatch.setattr(left._poll, "wait", noted)
    assert left.wait(read=True, write=False, timeout_s=0.0)
    assert were_awake == [True], "it slept until its time was over"
    assert bells(left) == 0


@pytest.mark.fault("F29")
def test_a_reader_too_slow_to_ring_is_no_stall(pair, monkeypatch):
    """It takes an eighth of the ring in the longest time that the writer waits."""
    left, right = pair
    assert left.sendmsg([memoryview(bytes(RING))]) == RING
    eighth = memoryview(bytearray(RING // 8))
    budget = Budget(LIMITS, RING, "a reply")

    def passes(*arguments: object, announces: Callable[[], bool], **looks: object) -> bool:
        assert not announces()
        assert right.recv_into(eighth) == len(eighth)
        return False

    monkeypatch.setattr(left._poll, "wait", passes)
    assert left.wait(read=False, write=True, timeout_s=0.0)
    assert bells(left) == 0
    assert left.sendmsg([eighth]) == len(eighth)
    monkeypatch.setattr(left._poll, "wait", lambda *arguments, **looks: False)
    with pytest.raises(DeadlineExceeded, match="too slow with a reply"):
        budget.wait(left, read=False, write=True)


class TestFences:
    """Between its store and its load each side has a fence, in which the other side may act.

    Two threads of one interpreter take turns by the GIL, which orders all that they do.
    """

    def test_who_goes_to_sleep_says_so_before_the_fence_and_looks_after_it(self, pair, monkeypatch):
        left, right = pair

        def bytes_come() -> None:
            assert left._our_counters[shm_stream._NEEDS_BYTES] % 2
            right.sendmsg([memoryview(b"x")])

        monkeypatch.setattr(left, "_fence", bytes_come)
        assert left._goes_to_sleep(read=True, write=False)

    def test_who_brings_bytes_counts_them_before_the_fence_and_looks_after_it(
        self, pair, monkeypatch
    ):
        left, right = pair

        def reader_sleeps() -> None:
            assert left._our_counters[shm_stream._PUT] == 1
            right._until_bytes.begin()

        monkeypatch.setattr(left, "_fence", reader_sleeps)
        left.sendmsg([memoryview(b"x")])
        assert bells(right) == 1

    def test_who_makes_room_counts_it_before_the_fence_and_looks_after_it(self, pair, monkeypatch):
        left, right = pair
        left.sendmsg([memoryview(bytes(RING))])

        def writer_sleeps() -> None:
            assert right._our_counters[shm_stream._TAKEN] == RING
            left._until_room.begin()

        monkeypatch.setattr(right, "_fence", writer_sleeps)
        assert right.recv_into(memoryview(bytearray(RING))) == RING
        assert bells(left) == 1

    def test_a_fence_takes_a_lock_which_is_an_atomic_instruction(self, pair, monkeypatch):
        steps: list[str] = []

        class Lock:
            def acquire(self) -> None:
                steps.append("acquire")

            def release(self) -> None:
                steps.append("release")

        monkeypatch.setattr(pair[0], "_lock", Lock())
        pair[0]._fence()
        assert steps == ["acquire", "release"]


def exchange_bytes(stream: SharedStream, *, first: bool, seed: int) -> list[int]:
    """Send a byte and wait for one, in turns; return the turn in which nobody woke this side."""
    draw, lost = random.Random(seed), list[int]()
    byte = memoryview(bytearray(1))
    for turn in range(4000):
        if turn or not first:
            while stream.recv_into(byte) is None:
                if not stream.wait(read=True, write=False, timeout_s=WAIT_S):
                    lost.append(turn)
                    return lost
        pause_until = time.monotonic() + draw.choice([0.0, 0.0, 2e-5, 1e-4, 3e-4])
        while time.monotonic() < pause_until:  # as long as a wait spins, or longer
            os.sched_yield()
        stream.sendmsg([byte])
    return lost


@pytest.mark.slow
def test_no_wake_up_is_lost(pair):
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        ends = [
            threads.submit(exchange_bytes, stream, first=not seed, seed=seed)
            for seed, stream in enumerate(pair)
        ]
        assert [end.result() for end in ends] == [[], []]


@pytest.mark.fault("F29")
def test_bells_without_bytes_are_no_progress(pair):
    left, right = pair
    left._doorbell.sendmsg([memoryview(b"!" * 100)])
    assert right.wait(read=True, write=False, timeout_s=WAIT_S)
    assert right.recv_into(memoryview(bytearray(9))) is None
    assert not right.wait(read=True, write=False, timeout_s=0.0)


def offered(ring_bytes: int, *, seal: bool = True, magic: bytes = b"TFR2", pass_it: bool = True):
    """Return (message, descriptor) of an offer; the caller closes the descriptor."""
    size = 4096 + ring_bytes
    if seal and 0 < size < 1 << 24:
        ours, descriptor = SharedMemory.make("hostile", size)
        ours.close()
    else:
        descriptor = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, min(size, 1 << 24))
    if not pass_it:
        os.close(descriptor)
    return OFFER.pack(magic, 0, ring_bytes), descriptor if pass_it else None


@pytest.mark.attack("A08")
@pytest.mark.parametrize(
    "offer",
    [
        {"ring_bytes": RING, "seal": False},
        {"ring_bytes": 1},
        {"ring_bytes": 2**40},
        {"ring_bytes": 2**64 - 4097},
        {"ring_bytes": RING, "magic": b"TFRP"},
        {"ring_bytes": 0},
    ],
)
def test_a_hostile_offer_is_refused(offer):
    ours, theirs = ends()
    before = num_descriptors()
    message, descriptor = offered(**offer)
    theirs.send_with(message, descriptor)
    with pytest.raises(ProtocolError):
        share(ours, LIMITS, first=True, deadline_s=time.monotonic() + WAIT_S)
    if descriptor is not None:
        os.close(descriptor)
    assert num_descriptors() == before
    ours.close()
    theirs.close()


@pytest.mark.attack("A08")
def test_descriptors_that_nobody_asked_for_are_closed():
    """With the answer, or several with an offer, or with a bell."""
    before = num_descriptors()
    ours, theirs = ends()
    message, descriptor = offered(RING)
    theirs.send_with(message, descriptor)
    theirs._sock.sendmsg(
        [b"\1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
    )
    stream = share(ours, LIMITS, first=False, deadline_s=time.monotonic() + WAIT_S)
    assert stream is not None
    theirs.send_with(b"!", descriptor)
    assert stream.recv_into(memoryview(bytearray(9))) is None
    stream.close()
    theirs.close()
    os.close(descriptor)
    assert num_descriptors() == before


@pytest.mark.parametrize("first", [True, False])
def test_a_peer_that_passes_none_leaves_both_with_the_socket(first):
    ours, theirs = ends()
    theirs.send_with(OFFER.pack(b"TFR2", 0, 0), None)
    if not first:
        theirs.send_with(b"\0", None)
    assert share(ours, LIMITS, first=first, deadline_s=time.monotonic() + WAIT_S) is None
    ours.close()
    theirs.close()


def test_a_silent_peer_is_left_at_the_deadline():
    ours, theirs = ends()
    with pytest.raises(DeadlineExceeded):
        share(ours, LIMITS, first=True, deadline_s=time.monotonic() + 0.05)
    theirs.close()
    with pytest.raises(PeerGone):
        share(ours, LIMITS, first=False, deadline_s=time.monotonic() + WAIT_S)
    ours.close()


def echoes(made: Bed, transport: str) -> None:
    with made.connect() as connection:
        assert connection.transport == transport
        data = os.urandom(3 * RING)
        assert bytes(connection.call(b"echo", [data], timeout_s=WAIT_S).payload) == data


class TestTheWayAround:
    """What one side cannot do, both do without; the log says so."""

    def test_memory_refused(self, monkeypatch, caplog):
        def refuse(name: str, num_bytes: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(SharedMemory, "make", refuse)
        with caplog.at_level(logging.INFO), bed("shm") as made:
            echoes(made, "unix")
        assert "by its Unix socket" in caplog.text
        assert "No space left on device" in caplog.text

    def test_memory_that_cannot_be_mapped(self, monkeypatch):
        def refuse(descriptor: int, num_bytes: int) -> None:
            raise OSError(12, "Cannot allocate memory")

        monkeypatch.setattr(SharedMemory, "take", refuse)
        with bed("shm") as made:
            echoes(made, "unix")

    def test_another_processor(self, monkeypatch, caplog):
        monkeypatch.setattr("rpc.transport.memfd.platform.machine", lambda: "aarch64")
        with caplog.at_level(logging.INFO), bed("shm") as made:
            echoes(made, "unix")
        assert "aarch64 may reorder" in caplog.text

    def test_switched_off_at_either_side(self):
        off = dataclasses.replace(LIMITS, shared_ring_bytes=0)
        with bed("shm", off) as made:
            echoes(made, "unix")
        with bed("shm") as made, made.connect(limits=off) as connection:
            assert connection.transport == "unix"

    def test_beyond_max_shared_bytes(self):
        limits = dataclasses.replace(LIMITS, max_shared_bytes=2 * RING)
        with bed("shm", limits) as made:
            for _ in range(3):  # room that is given back is taken again
                with made.connect() as first:
                    assert first.transport == "shm"
                    echoes(made, "unix")
                wait_until(lambda: made.listener.stats().open_connections == 0)

    def test_a_crowd_does_not_pass_max_shared_bytes(self):
        """All of them shake hands before the first one is served."""
        limits = dataclasses.replace(LIMITS, max_shared_bytes=4 * RING)
        with bed("shm", limits) as made, contextlib.ExitStack() as opened:
            found: list[str] = []
            start = threading.Barrier(12)

            def join() -> None:
                start.wait(WAIT_S)
                connection = opened.enter_context(made.connect())
                found.append(connection.transport)

            crowd = [threading.Thread(target=join) for _ in range(12)]
            for thread in crowd:
                thread.start()
            for thread in crowd:
                thread.join(WAIT_S)
            assert sorted(found) == ["shm"] * 2 + ["unix"] * 10

    def test_those_on_other_ways_take_no_room(self):
        limits = dataclasses.replace(LIMITS, max_shared_bytes=2 * RING)
        off = dataclasses.replace(limits, shared_ring_bytes=0)
        with bed("shm", limits) as made, made.connect(limits=off), made.connect() as connection:
            assert connection.transport == "shm"

    def test_the_way_is_logged(self, caplog):
        with caplog.at_level(logging.INFO), bed("shm") as made:
            echoes(made, "shm")
        assert "is reached through shared memory" in caplog.text


CLIENT = """
import sys, json
from rpc.endpoint import Endpoint
from rpc.client.connection import connect
from rpc.auth.handshake import Credentials, Identity, Role
path, boot, cluster, secret = sys.argv[1:]
endpoint = Endpoint("127.0.0.1", 0, path, boot)
credentials = Credentials(cluster, bytes.fromhex(secret))
connection = connect(endpoint, Identity(Role.WORKER, 3, 1), credentials)
print(connection.transport, flush=True)
connection.call(b"wait", [bytes(100000)], timeout_s=60)
"""


@pytest.mark.fault("F01")
@pytest.mark.attack("A33")
@pytest.mark.slow
def test_a_killed_client_is_seen_at_once_and_leaves_nothing():
    before = named()
    with bed("shm") as made:
        endpoint, credentials = made.endpoint, made.credentials
        arguments = [endpoint.unix_path, endpoint.boot_id, credentials.cluster_id]
        arguments.append(credentials.secret.hex())
        client = subprocess.Popen(
            [sys.executable, "-c", CLIENT, *arguments], stdout=subprocess.PIPE, text=True
        )
        with client:
            assert client.stdout is not None
            assert client.stdout.readline() == "shm\n"
            assert made.waiting.acquire(timeout=WAIT_S)
            descriptors = num_descriptors()
            client.send_signal(signal.SIGKILL)
            client.wait(WAIT_S)
            assert made.saw_peer_gone.wait(WAIT_S)
        wait_until(lambda: made.listener.stats().open_connections == 0)
        wait_until(lambda: num_descriptors() < descriptors)
        echoes(made, "shm")
    assert left_since(before, WAIT_S) == set()


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:tfos-rpc")


def test_connections_that_come_and_go_leave_no_descriptor_and_no_mapping():
    with bed("shm") as made:
        echoes(made, "shm")
        wait_until(lambda: made.listener.stats().open_connections == 0)
        descriptors, segments = num_descriptors(), mapped()
        for _ in range(40):
            echoes(made, "shm")
        wait_until(lambda: made.listener.stats().open_connections == 0)
        wait_until(lambda: num_descriptors() <= descriptors, "descriptors as before")
        assert mapped() == segments


def test_a_stranger_gets_no_memory():
    with bed("shm") as made:
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(made.endpoint.unix_path)
        data, descriptors, _, _ = socket.recv_fds(stream, 4096, 4)
        assert (len(data), descriptors) == (32, [])
        stream.close()


def test_dialling_gives_the_shared_stream():
    with bed("shm") as made:
        deadline = time.monotonic() + WAIT_S
        stream, session = dial(made.endpoint, WORKER, made.credentials, LIMITS, deadline)
        assert isinstance(stream, SharedStream)
        assert session.peer == made.listener._identity
        stream.close()
        with connect(made.endpoint, WORKER, made.credentials) as connection:
            assert connection.transport == "shm"
