"""A port that a worker holds for a server of main_fun."""

from __future__ import annotations

import socket

import pytest

from tfos.errors import SettingsError
from tfos.native.reserved_port import ReservedPort, wanted_port

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


def test_a_port_that_the_environment_names_is_reserved_once():
    any_port = ReservedPort()
    asked = any_port.port
    any_port.release()
    assert wanted_port({}) == 0
    held = ReservedPort(wanted_port({"TENSORFLOW_PORT": str(asked)}))
    assert held.port == asked
    with pytest.raises(SettingsError, match=f"TENSORFLOW_PORT={asked}: the port is taken"):
        ReservedPort(asked)
    with bind(asked, shared=True) as server:
        server.listen()
    held.release()


@pytest.mark.parametrize("text", ["x", "70000", "-1"])
def test_what_is_no_port_is_refused(text):
    with pytest.raises(SettingsError, match="is not a port"):
        wanted_port({"TENSORFLOW_PORT": text})
