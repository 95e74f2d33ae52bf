"""Dialling: a host's name may have several addresses, and one that is silent costs little time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from rpc.errors import PeerGone, Unreachable
from rpc.transport import stream
from rpc.transport.stream import dial_tcp

pytestmark = pytest.mark.socket
DEADLINE_S = 10.0


@pytest.fixture
def open_sockets() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def listening(sockets: ExitStack) -> int:
    """Return the port of a socket whose connections the kernel accepts."""
    return int(_listener(sockets).getsockname()[1])


def silent(sockets: ExitStack) -> int:
    """Return a port that answers no further SYN, as behind a firewall that drops them."""
    listener = _listener(sockets, backlog=0)
    port = int(listener.getsockname()[1])
    is_full = False
    while not is_full:
        client = sockets.enter_context(socket.socket())
        client.settimeout(0.2)
        is_full = client.connect_ex(("127.0.0.1", port)) != 0
    return port


def refusing() -> int:
    """Return a port at which nobody listens."""
    with ExitStack() as sockets:
        return listening(sockets)


def _listener(sockets: ExitStack, backlog: int = 8) -> socket.socket:
    listener = sockets.enter_context(socket.socket())
    listener.bind(("127.0.0.1", 0))
    listener.listen(backlog)
    return listener


def dialled(
    monkeypatch: pytest.MonkeyPatch, ports: list[int], deadline_s: float = DEADLINE_S
) -> int:
    """Dial a host whose name has these addresses; return the port that answered."""

    def found(*_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", each)) for each in ports]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    made = dial_tcp("both-families", 1, deadline_s=time.monotonic() + deadline_s)
    made.close()
    return int(made.peer_address.rpartition(":")[2])


def test_an_address_that_is_silent_leaves_time_for_the_next_one(open_sockets, monkeypatch):
    first, second = silent(open_sockets), listening(open_sockets)
    begun_s = time.monotonic()
    assert dialled(monkeypatch, [first, second]) == second
    assert time.monotonic() - begun_s < DEADLINE_S / 2


def test_an_address_that_refuses_costs_no_time_and_the_first_that_answers_is_taken(
    open_sockets, monkeypatch
):
    first, second = listening(open_sockets), listening(open_sockets)
    assert dialled(monkeypatch, [refusing(), first, second]) == first


def test_an_address_that_refuses_ends_no_attempt_at_a_silent_one(open_sockets, monkeypatch):
    slow = silent(open_sockets)
    with pytest.raises(
        Unreachable, match=f"127.0.0.1:{slow} did not accept the connection in time"
    ):
        dialled(monkeypatch, [slow, refusing()], deadline_s=0.5)


def test_a_host_that_refuses_at_every_address_is_gone(monkeypatch):
    last = refusing()
    with pytest.raises(PeerGone, match=f"cannot connect to 127.0.0.1:{last}: Connection refused"):
        dialled(monkeypatch, [refusing(), last])


def test_a_host_that_is_silent_at_every_address_is_unreachable(open_sockets, monkeypatch):
    both = [silent(open_sockets), silent(open_sockets)]
    with pytest.raises(Unreachable) as raised:
        dialled(monkeypatch, both, deadline_s=0.5)
    assert all(str(port) in str(raised.value) for port in both)


def test_a_host_that_is_silent_for_longer_than_the_kernel_waits_is_unreachable(
    open_sockets, monkeypatch
):
    monkeypatch.setattr(stream, "USER_TIMEOUT_MS", 500)
    with pytest.raises(Unreachable, match="did not accept the connection in time"):
        dialled(monkeypatch, [silent(open_sockets)], deadline_s=30.0)
