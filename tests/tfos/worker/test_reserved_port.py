"""A port that a worker holds for a server of main_fun."""

from __future__ import annotations

import socket

import pytest

from tfos.worker.reserved_port import ReservedPort

pytestmark = pytest.mark.socket


def bind(port: int, *, shared: bool) -> socket.socket:
    made = socket.socket()
    if shared:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        made.bind(("", port))
    except OSError:
        made.close()
        raise
    return made


def test_nobody_takes_a_reserved_port_but_a_server_that_shares_it():
    held = ReservedPort()
    with pytest.raises(OSError, match="in use"):
        bind(held.port, shared=False)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", held.port), timeout=5)
    with bind(held.port, shared=True) as server:
        server.listen()
        for _ in range(20):  # none goes to the socket that only holds the port
            with socket.create_connection(("127.0.0.1", held.port), timeout=5) as client:
                accepted, address = server.accept()
                accepted.close()
                assert address == client.getsockname()
    held.release()


def test_a_released_port_can_be_bound_exclusively():
    held = ReservedPort()
    held.release()
    held.release()
    bind(held.port, shared=False).close()


def test_two_reservations_have_two_ports():
    held = [ReservedPort() for _ in range(50)]
    assert len({each.port for each in held}) == 50
    for each in held:
        each.release()
