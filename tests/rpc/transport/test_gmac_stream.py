"""integrity="payload": every byte on TCP is authenticated, and less than that is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import subprocess
import sys
import threading

import pytest

from rpc.auth.handshake import Credentials, Role, Session
from rpc.client.connection import connect
from rpc.endpoint import Endpoint
from rpc.errors import AuthError, IntegrityError, PeerGone, RpcError
from rpc.transport.gmac_stream import RECORD_BYTES, SealedStream
from rpc.transport.stream import SocketStream
from tests.support.rpc import WAIT_S, WORKER, bed

pytestmark = pytest.mark.socket

KEY = bytes(32)


@pytest.mark.attack("A08")
@pytest.mark.parametrize("num_bytes", [0, RECORD_BYTES + 1, 2**31, 2**32 - 1])
def test_illegal_lengths_are_refused(num_bytes):
    wire, right = socket.socketpair()
    receiver = SealedStream(SocketStream(right, "right"), Session(WORKER, KEY, KEY))
    with wire, contextlib.closing(receiver):
        wire.sendall(num_bytes.to_bytes(4, "little") + bytes(16))
        with pytest.raises(IntegrityError, match=f"has {num_bytes} bytes"):
            receiver.recv_into(memoryview(bytearray(4096)))


class Flipper:
    """A TCP proxy that changes one byte in the middle of what the client sends."""

    def __init__(self, target: tuple[str, int], at: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._target, self._at = target, at
        self.address = self._server.getsockname()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        client, _ = self._server.accept()
        server = socket.create_connection(self._target)
        back = threading.Thread(target=self._copy, args=(server, client, None), daemon=True)
        back.start()
        self._copy(client, server, self._at)
        back.join(WAIT_S)
        for end in (client, server, self._server):
            end.close()

    def _copy(self, source: socket.socket, sink: socket.socket, at: int | None) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                if at is not None and passed <= at < passed + len(data):
                    index = at - passed
                    data = data[:index] + bytes([data[index] ^ 1]) + data[index + 1 :]
                passed += len(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()

    def join(self) -> None:
        self._threads[0].join(WAIT_S)
        assert not self._threads[0].is_alive()


@pytest.mark.attack("A04")
@pytest.mark.parametrize(
    ("integrity", "boot_id", "is_found"),
    [
        ("auto", "another host's", True),
        ("auto", "", False),
        ("header", "another host's", False),
        ("payload", "", True),
    ],
)
def test_a_changed_byte_between_hosts_is_found_unless_the_user_said_header(
    integrity, boot_id, is_found
):
    data = bytes(500_000)
    with bed("tcp", integrity=integrity) as made:
        proxy = Flipper(made.address, at=300_000)
        endpoint = Endpoint(proxy.address[0], proxy.address[1], boot_id=boot_id)
        outcome: RpcError | bytes
        with connect(endpoint, WORKER, made.credentials, expect=Role.SERVER) as connection:
            try:
                reply = connection.call(b"echo", [data], timeout_s=WAIT_S)
                outcome = bytes(reply.payload)
            except RpcError as error:
                outcome = error
        proxy.join()
        if is_found:
            assert isinstance(outcome, PeerGone)
            assert made.listener.stats().errors == 1
        else:
            assert outcome == data[:299_000] + outcome[299_000:] != data  # type: ignore[index]


@pytest.mark.attack("A06")
@pytest.mark.parametrize(
    ("integrity", "other"), [("header", "payload"), ("payload", "header"), ("auto", "header")]
)
def test_both_sides_must_want_the_same(integrity, other, caplog):
    with bed("tcp", integrity=integrity) as made:
        credentials = dataclasses.replace(made.credentials, integrity=other)
        with pytest.raises(AuthError, match="give all processes of the cluster the same"):
            connect(made.endpoint, WORKER, credentials).close()
    assert f"the client wants integrity='{other}'" in caplog.text


def test_an_unknown_integrity_is_refused():
    with pytest.raises(ValueError, match="'auto', 'header' or 'payload', got 'none'"):
        Credentials("c", bytes(32), "none")  # type: ignore[arg-type]


def test_without_cryptography_only_payload_is_refused(monkeypatch):
    monkeypatch.setattr("rpc.auth.handshake.find_spec", lambda _: None)
    assert Credentials("c", bytes(32)).integrity == "auto"
    with pytest.raises(ValueError, match="needs the package cryptography"):
        Credentials("c", bytes(32), "payload")


@pytest.mark.slow
def test_the_library_is_loaded_only_when_it_is_wanted():
    imports = "import sys, rpc.server.listener, rpc.client.connection"
    code = f"{imports}; print('cryptography' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
