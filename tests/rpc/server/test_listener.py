"""Binding, ending and guarding a listener; choosing the way to it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import stat
import threading
import time
from pathlib import Path
from typing import ClassVar, Self

import pytest

from rpc.auth.handshake import Credentials, Identity, ServerHandshake
from rpc.client.connection import connect
from rpc.endpoint import Endpoint, boot_id, reached_at
from rpc.errors import (
    ConnectionClosed,
    DeadlineExceeded,
    PeerGone,
    PortInUse,
    RpcError,
    SettingsError,
    TransportError,
)
from rpc.limits import Limits
from rpc.server.authenticator import Authenticator
from rpc.server.listener import Call, Listener
from tests.support.rpc import SERVER, WAIT_S, WORKER, RawClient, bed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.socket


@pytest.fixture
def listener():
    made = Listener(lambda call: call.reply(b"ok"), Credentials.generate(), SERVER)
    yield made
    made.close()


@pytest.mark.fault("F52")
def test_a_taken_port_names_its_holder():
    says = rf"127.0.0.1:\d+ is held by pid {os.getpid()} \(.+, user .+\); choose another port"
    with bed() as holder, pytest.raises(PortInUse, match=says):
        Listener(holder.handle, holder.credentials, SERVER).bind_tcp(*holder.address)


def test_a_port_is_held_from_bind_on(listener):
    listener.bind_tcp("127.0.0.1")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", listener.endpoint.port))


def test_a_client_that_comes_before_start_is_served_after_it(listener):
    listener.bind_tcp("127.0.0.1")
    with RawClient((listener.endpoint.host, listener.endpoint.port)) as early:
        listener.start()
        assert len(early.receive(32)) == 32


def test_an_address_of_another_host_is_refused(listener):
    with pytest.raises(OSError, match=r"192\.0\.2\.1:0: .*assign requested address; name an"):
        listener.bind_tcp("192.0.2.1")


def test_a_host_that_is_not_resolved_is_named(listener, monkeypatch):
    def getaddrinfo(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with pytest.raises(OSError, match=r"at no\.invalid:7: Name or service not known; name an"):
        listener.bind_tcp("no.invalid", 7)


def test_where_no_descriptor_is_left_no_address_is_blamed(listener, monkeypatch):
    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", no_socket)
    with pytest.raises(OSError, match=r"Too many open files$"):
        listener.bind_tcp("127.0.0.1")


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_is_none_is_refused(listener, port):
    with pytest.raises(SettingsError, match=f"port {port} is not valid: choose one in 0..65535"):
        listener.bind_tcp("127.0.0.1", port)


class RoutedSocket:
    """Stands for a datagram socket of a host that has a route in these families only."""

    routes: ClassVar[dict[int, str]] = {}

    def __init__(self, family: int, kind: int) -> None:
        assert kind == socket.SOCK_DGRAM
        self.family = family

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if self.family not in self.routes:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")

    def getsockname(self) -> tuple[str, int]:
        return self.routes[self.family], 9


V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize(
    ("bound", "routes", "told"),
    [
        ("0.0.0.0", {V4: "10.0.0.5", V6: "fd00::5"}, "10.0.0.5"),
        ("", {V4: "10.0.0.5"}, "10.0.0.5"),
        ("::", {V6: "fd00::5"}, "fd00::5"),
        ("::", {V4: "10.0.0.5", V6: "fd00::5"}, "fd00::5"),
        ("::", {V4: "10.0.0.5"}, "10.0.0.5"),
        ("::", {V4: "10.0.0.5", V6: "fe80::5"}, "10.0.0.5"),
    ],
)
def test_a_wildcard_address_is_advertised_as_one_that_works(
    listener, monkeypatch, bound, routes, told
):
    monkeypatch.setattr(RoutedSocket, "routes", routes)
    monkeypatch.setattr("rpc.endpoint.socket.socket", RoutedSocket)
    assert reached_at(bound) == told


@pytest.mark.parametrize(
    ("bound", "routes"),
    [("0.0.0.0", {}), ("0.0.0.0", {V6: "fd00::5"}), ("::", {}), ("::", {V6: "fe80::5"})],
)
def test_a_wildcard_address_without_a_route_is_refused_instead_of_telling_loopback(
    listener, monkeypatch, bound, routes
):
    """Peers on other hosts would connect to themselves."""
    with monkeypatch.context() as patched:
        patched.setattr(RoutedSocket, "routes", routes)
        patched.setattr("rpc.endpoint.socket.socket", RoutedSocket)
        # A host without a default route may have an address by its name.
        patched.setattr("rpc.endpoint.socket.gethostbyname", lambda name: "10.1.2.3")
        assert reached_at(bound) == "10.1.2.3"
        patched.setattr("rpc.endpoint.socket.gethostbyname", lambda name: "127.0.1.1")
        assert not reached_at(bound)
        with pytest.raises(SettingsError, match=r"no route .* name the address that peers reach"):
            listener.bind_tcp(bound)
    listener.bind_tcp("127.0.0.1")  # nothing was bound


@pytest.mark.attack("A16")
def test_the_unix_socket_stands_in_a_private_directory_that_goes_away(listener, tmp_path):
    listener.bind_unix(str(tmp_path))
    path = Path(listener.endpoint.unix_path)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert len(os.fsencode(path)) < 108
    listener.start()
    listener.close()
    assert list(tmp_path.iterdir()) == []


def test_a_holder_whose_name_is_cut_inside_a_letter_is_named_all_the_same():
    """The kernel keeps 15 bytes of a name."""
    name = Path("/proc/self/comm")
    own = name.read_bytes()
    name.write_bytes("rechnerprozeßß".encode())
    try:
        with bed() as holder, pytest.raises(PortInUse, match=r"pid \d+ \(rechnerprozeß�, user"):
            Listener(holder.handle, holder.credentials, SERVER).bind_tcp(*holder.address)
    finally:
        name.write_bytes(own)


def test_a_unix_directory_that_is_too_deep_is_refused(listener, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    with pytest.raises(OSError, match="at most 107 bytes; name a shorter directory"):
        listener.bind_unix(str(deep))
    assert list(deep.iterdir()) == []


def test_an_inproc_name_is_bound_once(listener):
    listener.bind_inproc("only-one")
    second = Listener(lambda call: None, Credentials.generate(), SERVER)
    with pytest.raises(PortInUse, match="'only-one' is bound"):
        second.bind_inproc("only-one")
    listener.close()
    second.bind_inproc("only-one")
    second.close()


def test_bind_and_start_have_an_order(listener):
    with pytest.raises(ConnectionClosed, match="nothing is bound"):
        listener.start()
    listener.bind_inproc("ordered")
    listener.start()
    with pytest.raises(ConnectionClosed):
        listener.start()
    with pytest.raises(ConnectionClosed):
        listener.bind_tcp("127.0.0.1")


def test_close_is_idempotent_in_every_state():
    for begin in (
        lambda one: None,
        lambda one: one.bind_tcp("127.0.0.1"),
        lambda one: (one.bind_unix(), one.bind_inproc("closing"), one.start()),
    ):
        one = Listener(lambda call: None, Credentials.generate(), SERVER)
        begin(one)
        one.close()
        one.close()


def test_a_client_sees_without_a_call_that_the_listener_has_closed():
    with bed() as server, server.connect() as client:
        assert not client.peer_closed()
        server.listener.close()
        wait_until(client.peer_closed)
        client.close()
        assert client.peer_closed()


def test_a_listener_may_be_closed_by_its_own_handler():
    closed = threading.Event()
    credentials = Credentials.generate()

    def handle(call: Call) -> None:
        call.reply(b"closing")
        served.close()
        closed.set()

    served = Listener(handle, credentials, SERVER)
    served.bind_tcp("127.0.0.1")
    served.start()
    with connect(served.endpoint, WORKER, credentials) as connection:
        assert connection.call(b"", timeout_s=WAIT_S).meta == b"closing"
        assert closed.wait(WAIT_S)


def test_a_handler_that_does_not_end_is_named_and_left(caplog):
    release, began = threading.Event(), threading.Event()
    credentials = Credentials.generate()

    def handle(call: Call) -> None:
        began.set()
        release.wait(WAIT_S)

    listener = Listener(handle, credentials, SERVER)
    listener.bind_tcp("127.0.0.1")
    listener.start()
    with connect(listener.endpoint, WORKER, credentials) as connection:
        pending = connection.start(b"", timeout_s=WAIT_S)
        assert began.wait(WAIT_S)
        listener.close(timeout_s=0.05)
        with pytest.raises(PeerGone):
            pending.result(WAIT_S)
    release.set()
    assert "handler for worker:3 still runs" in caplog.text
    wait_until(lambda: listener.stats().open_connections == 0)


def test_a_failing_disconnect_callback_is_logged(caplog):
    def fail(peer: Identity) -> None:
        raise LookupError(f"unknown {peer}")

    credentials = Credentials.generate()
    with Listener(lambda call: call.reply(b""), credentials, SERVER, on_disconnect=fail) as one:
        one.bind_tcp("127.0.0.1")
        one.start()
        connect(one.endpoint, WORKER, credentials).close()
        wait_until(lambda: "on_disconnect failed for worker:3" in caplog.text)


def test_a_failing_handler_is_logged_here_and_not_there(caplog):
    with bed() as made, made.connect() as connection:
        pending = connection.start(b"raise", timeout_s=WAIT_S)
        with pytest.raises(Exception, match="internal: ZeroDivisionError in the handler"):
            pending.result(WAIT_S)
    assert "secret inner detail" in caplog.text
    assert "handler failed on a call of worker:3" in caplog.text


class TestTheWay:
    def test_unix_is_chosen_on_the_same_host(self, listener):
        listener.bind_tcp("127.0.0.1")
        listener.bind_unix()
        listener.start()
        here = listener.endpoint
        assert here.boot_id == boot_id()
        elsewhere = Endpoint(here.host, here.port, here.unix_path, "another boot")
        gone = Endpoint(here.host, here.port, here.unix_path + "-gone", boot_id())
        for endpoint, transport in ((here, "shm"), (elsewhere, "tcp+payload"), (gone, "tcp")):
            with connect(endpoint, WORKER, listener._credentials) as connection:
                assert connection.transport == transport

    def test_nobody_there(self):
        with socket.socket() as bound:  # a bound port that does not listen refuses
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            for endpoint in (
                Endpoint("127.0.0.1", port),
                Endpoint("", 0, "/nonexistent/s", boot_id()),
                Endpoint("", 0, inproc="nobody"),
            ):
                with pytest.raises(PeerGone, match=r"cannot connect|no listener"):
                    connect(endpoint, WORKER, Credentials.generate())

    @pytest.mark.fault("F52")
    def test_an_unknown_host(self):
        with pytest.raises(PeerGone, match=r"'no-such-host.invalid' cannot be resolved"):
            connect(Endpoint("no-such-host.invalid", 1), WORKER, Credentials.generate())

    def test_a_server_that_says_nothing(self):
        with socket.create_server(("127.0.0.1", 0)) as mute:
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="did not finish the handshake in time"):
                connect(
                    Endpoint(*mute.getsockname()), WORKER, Credentials.generate(), timeout_s=0.1
                )
            assert time.monotonic() - began < WAIT_S

    @pytest.mark.fault("F52")
    def test_no_descriptor_left_is_typed(self, monkeypatch):
        def exhausted(*args: object) -> socket.socket:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr("rpc.transport.stream.socket.socket", exhausted)
        with pytest.raises(TransportError, match="Too many open files"):
            connect(Endpoint("127.0.0.1", 1), WORKER, Credentials.generate())

    def test_a_server_that_dies_after_the_proof_is_gone_not_foreign(self):
        """It looks like a refusal; the second attempt finds nobody."""
        server = socket.create_server(("127.0.0.1", 0))
        endpoint = Endpoint(*server.getsockname())

        def die() -> None:
            peer, _ = server.accept()
            peer.sendall(bytes(32))
            peer.recv(1000)
            server.close()
            peer.close()

        thread = threading.Thread(target=die)
        thread.start()
        with pytest.raises(PeerGone):
            connect(endpoint, WORKER, Credentials.generate())
        thread.join(WAIT_S)


class TestTheDoor:
    @pytest.mark.parametrize("place", ["_accept", "_begin_handshake", "_admit", "feed"])
    def test_one_failure_of_any_kind_shuts_out_nobody_else(self, place, monkeypatch, caplog):
        owner: object = ServerHandshake if place == "feed" else Authenticator
        failed: list[str] = []

        with bed() as made:
            if place == "_admit":
                owner = made.listener._authenticator
            works = getattr(owner, place)

            def fails_once(*arguments):
                if failed:
                    return works(*arguments)
                failed.append(place)
                raise RuntimeError("out of threads")

            monkeypatch.setattr(owner, place, fails_once)
            stranger = RawClient(made.address)
            with stranger, contextlib.suppress(RpcError), made.connect(timeout_s=1.0):
                pass
            with made.connect() as connection:
                assert connection.call(b"echo", timeout_s=WAIT_S).meta == b"done"
        assert failed
        assert "RuntimeError" in caplog.text

    def test_256_clients_come_in_at_once(self):
        with bed() as made:
            failures: list[Exception] = []

            def come() -> None:
                try:
                    for _ in range(32):
                        with made.connect(timeout_s=WAIT_S) as connection:
                            connection.call(b"echo", timeout_s=WAIT_S)
                except Exception as error:  # noqa: BLE001 - reported below
                    failures.append(error)

            threads = [threading.Thread(target=come) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert not failures
            assert made.listener.stats().accepted == 256

    def test_256_connections_stay_open_together(self):
        with bed() as made:
            connections = [made.connect() for _ in range(256)]
            wait_until(lambda: made.listener.stats().open_connections == 256)
            assert connections[-1].call(b"echo", timeout_s=WAIT_S).meta == b"done"
            assert connections[0].call(b"echo", timeout_s=WAIT_S).meta == b"done"
            for connection in connections:
                connection.close()
            wait_until(lambda: made.listener.stats().open_connections == 0)

    @pytest.mark.attack("A13")
    @pytest.mark.parametrize(
        ("in_all", "per_peer", "spare"), [(16, 8, 1000), (8, 16, 1000), (1000, 1000, 16)]
    )
    def test_silent_strangers_give_way_to_honest_clients(
        self, in_all, per_peer, spare, caplog, monkeypatch
    ):
        monkeypatch.setattr("rpc.server.authenticator.spare_descriptors", lambda: spare)
        limits = Limits(
            max_handshakes=in_all, max_handshakes_per_peer=per_peer, handshake_timeout_s=60.0
        )
        with bed(limits=limits) as made:
            strangers = [RawClient(made.address) for _ in range(60)]
            with made.connect() as connection:
                assert connection.call(b"echo", timeout_s=WAIT_S).meta == b"done"
            stats = made.listener.stats()
            assert stats.refused >= 60 - 8
            assert stats.open_handshakes <= 8
            for stranger in strangers:
                stranger.sock.close()
        assert len(caplog.records) <= 2

    @pytest.mark.attack("A13")
    def test_strangers_of_many_addresses_leave_descriptors_to_others(self, monkeypatch):
        monkeypatch.setattr("rpc.server.authenticator.spare_descriptors", lambda: 8)
        with bed() as made:
            strangers = [
                socket.create_connection(made.address, WAIT_S, (f"127.0.0.{2 + number % 4}", 0))
                for number in range(16)
            ]
            wait_until(lambda: made.listener.stats().accepted == 16)
            assert made.listener.stats().open_handshakes <= 8
            for stranger in strangers:
                stranger.close()

    def test_too_many_connections_are_refused(self):
        with bed(limits=Limits(max_connections=2)) as made:
            with made.connect(), made.connect():
                wait_until(lambda: made.listener.stats().open_connections == 2)
                with made.connect() as third, pytest.raises(PeerGone):
                    third.call(b"echo", timeout_s=WAIT_S)
            wait_until(lambda: made.listener.stats().open_connections == 0)
            with made.connect() as again:
                assert again.call(b"echo", timeout_s=WAIT_S).meta == b"done"

    def test_refusals_are_logged_once_per_interval(self, caplog):
        with bed() as made:
            for _ in range(20):
                with RawClient(made.address) as stranger:
                    stranger.send(b"GET / HTTP/1.1\r\n\r\n")
                    stranger.until_closed()
            wait_until(lambda: made.listener.stats().refused == 20)
        [record] = [r for r in caplog.records if r.levelno == logging.WARNING]
        assert "refused connection from 127.0.0.1:" in record.getMessage()
        assert "does not speak this protocol" in record.getMessage()


@pytest.mark.parametrize(
    ("endpoint", "is_near"),
    [
        (Endpoint("10.0.0.5", 1, boot_id=boot_id()), True),
        (Endpoint("127.0.0.1", 1, boot_id="another host's"), False),
        (Endpoint("127.0.0.1", 1), True),
        (Endpoint("::1", 1), True),
        (Endpoint("localhost", 1), True),
        (Endpoint("10.0.0.5", 1), False),
        (Endpoint("ps.example", 1), False),
        (Endpoint("", 0, inproc="here"), True),
    ],
)
def test_an_endpoint_is_near_by_its_boot_id_or_else_by_loopback(endpoint, is_near):
    assert endpoint.is_near is is_near
