"""Strangers' connections take a bounded share of a process's descriptors, on every listening port.

Each server runs in a process with few descriptors, and a stranger opens more connections than that.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.support.control import ControlBed
from tests.support.waiting import WAIT_S
from tfos import tls_server
from tfos.control import messages

pytestmark = [pytest.mark.socket, pytest.mark.slow]

HELLO = b"\x16\x03\x01\x30\x00\x01\x00\x2f\xfc\x03\x03" + bytes(12_000)
"""A record of TLS and in it a ClientHello, legal as far as it has come: garbage is cut at once."""
DESCRIPTORS = 256
STRANGERS = 2 * DESCRIPTORS
GARBAGE = (
    b"GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n",
    b"\x00\xff" * 50,
    b"\x16\x03\x01\x00\x05hello",
)
MOST_LINES = 10
"""One in 5 s of the data plane, and what gRPC says of many connections at once."""
PROGRAM = f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))  # no fork of pytest
def control():
    from tests.support.control import ControlBed
    return ControlBed().port
def many_nodes():  # as many as this limit has room for
    from tests.support.control import ControlBed
    return ControlBed(num_nodes=100).port
def listener():
    from rpc.auth.handshake import Credentials, Identity, Role
    from rpc.server.listener import Listener
    made = Listener(print, Credentials.generate(), Identity(Role.SERVER, 0))
    made.bind_tcp("127.0.0.1")
    made.start()
    return made.endpoint.port
def page():
    from rpc.http_page import HttpPage
    return HttpPage(lambda: b"", "text/plain").start("127.0.0.1", 0)
def job_page():
    from tests.support.watched_job import WatchedJob
    from tfos.watch.page_server import JobPage
    page = JobPage(WatchedJob().job, lambda: b"")
    page.start("127.0.0.1", 0)
    return page.url.split(":")[2].split("/")[0]
print(globals()[sys.argv[1]](), flush=True)
for _ in sys.stdin:
    opened = []
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for each in opened:
            os.close(each)
    print(len(opened), flush=True)
os._exit(0)
"""


@contextlib.contextmanager
def serving(
    kind: str, log: int | IO[bytes] = subprocess.DEVNULL
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run one kind of server with few descriptors; yields its process and its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,  # gRPC says that descriptors ran out
        text=True,
    )
    with process:
        assert process.stdout
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def free_descriptors(process: subprocess.Popen[str]) -> int:
    """Return how many files the process can open now."""
    assert process.stdin
    assert process.stdout
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def num_closed(strangers: list[socket.socket]) -> int:
    """Return how many connections the server has closed."""
    poll = select.poll()
    for each in strangers:
        poll.register(each, select.POLLRDHUP)
    return len(poll.poll(0))


@pytest.mark.attack("A13")
@pytest.mark.parametrize("kind", ["control", "listener", "page"])
def test_idle_strangers_leave_a_process_half_of_its_descriptors(kind):
    with serving(kind) as (process, port), contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            for _ in range(STRANGERS)
        ]
        deadline_s = time.monotonic() + WAIT_S
        refused = 0
        while refused < STRANGERS - DESCRIPTORS // 2:
            assert time.monotonic() < deadline_s, f"{refused} of {STRANGERS} refused"
            assert free_descriptors(process) > DESCRIPTORS // 2
            refused = num_closed(strangers)


@pytest.mark.attack("A13")
def test_room_for_many_nodes_leaves_the_driver_descriptors_when_strangers_fill_it():
    with serving("many_nodes") as (process, port), contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
            for _ in range(STRANGERS)
        ]
        deadline_s = time.monotonic() + WAIT_S
        least = DESCRIPTORS
        while num_closed(strangers) < STRANGERS - DESCRIPTORS and time.monotonic() < deadline_s:
            least = min(least, free_descriptors(process))
        least = min(least, free_descriptors(process))
        assert num_closed(strangers) >= STRANGERS - DESCRIPTORS
    assert least > DESCRIPTORS // 8


@pytest.mark.attack("A13")
def test_a_dripping_handshake_is_cut_and_nodes_register_again(monkeypatch):
    monkeypatch.setattr(tls_server, "_HANDSHAKE_S", 0.3)
    monkeypatch.setattr(tls_server, "spare_descriptors", lambda: 4)
    control = ControlBed()
    try:
        with contextlib.ExitStack() as stack:
            # More than the cap: all of them are held, or closed at once.
            slow = [
                stack.enter_context(socket.create_connection(("127.0.0.1", control.port), WAIT_S))
                for _ in range(24)
            ]
            deadline_s = time.monotonic() + WAIT_S
            sent = 0
            while num_closed(slow) < len(slow):
                assert time.monotonic() < deadline_s, "a stranger keeps its connection"
                for each in slow:
                    with contextlib.suppress(OSError):
                        each.send(HELLO[sent : sent + 1])
                sent += 1
                select.select([], [], [], 0.02)
            client = control.client()
            client.heartbeat(messages.Heartbeat(client.node, 1, "x"))
    finally:
        control.close()


@pytest.mark.attack("A01")
@pytest.mark.parametrize("kind", ["control", "listener", "page", "job_page"])
def test_strangers_do_not_fill_the_disk_with_a_log(kind, tmp_path: Path):
    log = tmp_path / "log"
    with log.open("wb") as file, serving(kind, file) as (_, port):
        for number in range(STRANGERS):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), WAIT_S) as stranger,
            ):
                stranger.sendall(GARBAGE[number % len(GARBAGE)])
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(4096):
                    pass
    assert log.read_bytes().count(b"\n") <= MOST_LINES, log.read_text()[-1000:]
