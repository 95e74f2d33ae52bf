"""The page for scrapers: who may read it, and that nobody keeps others from it."""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc import http_page
from rpc.errors import AuthError
from rpc.http_page import HttpPage, Readers
from tests.support.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.socket

TOKEN = "t0ken-of-this-cluster"


@contextlib.contextmanager
def served(text: bytes = b"numbers 1\n", token: str = "") -> Iterator[int]:
    page = HttpPage(lambda: text, "text/plain", token=token)
    try:
        yield page.start("127.0.0.1", 0)
    finally:
        page.close()


def get(port: int, path: str = "/metrics", method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as sock:
        sock.sendall(request)
        return b"".join(iter(lambda: sock.recv(4096), b""))


def test_a_scraper_reads_the_page():
    with served(b"x" * 3_000_000) as port:
        assert get(port) == (200, b"x" * 3_000_000)
        assert get(port, "/metrics?format=text")[0] == 200
        assert get(port, method="HEAD") == (200, b"")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n", 400),
        (b"\xff\xfe /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 TLS \r\n\r\n", 400),
        (b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /metrics/../x HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 9000 + b"\r\n\r\n", 431),
    ],
)
def test_other_requests_are_refused(request_: bytes, status: int):
    with served() as port:
        assert raw(port, request_).split(b" ")[1] == str(status).encode()
        assert get(port)[0] == 200


@pytest.mark.attack("A12")
@given(st.binary(max_size=300), st.booleans())
def test_any_bytes_are_answered(head: bytes, has_token: bool):
    for request in (head, b"GET /metrics HTTP/1.1\r\n" + head):
        status, reason = Readers(TOKEN.encode() if has_token else b"").answer(request)
        assert status >= 400
        assert reason


@pytest.mark.attack("A22")
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9100", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:9100", 200),
        ("evil.example", 403),
        ("evil.example:9100", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
        ("10.0.0.1", 403),
        ("[::1", 403),
        ("[::1].evil.example", 403),
        ("[::1]evil.example:80", 403),
        ("[127.0.0.1]", 200),
        ("127.0.0.1:80:80", 403),
        ("localhost:80@evil.example", 403),
        ("localhost:", 403),
        ("", 403),
    ],
)
def test_a_rebound_browser_reads_nothing(host: str, status: int):
    head = f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nOrigin: http://evil.example".encode()
    assert Readers().answer(head)[0] == status


@pytest.mark.attack("A02")
@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer  {TOKEN}", 200),
        (f"Basic {TOKEN}", 401),
        (TOKEN, 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer", 401),
        ("", 401),
    ],
)
def test_a_token_opens_the_page_and_nothing_else_does(authorization: str, status: int):
    lines = ["GET /metrics HTTP/1.1", "Host: ps-0.example:9100", f"Authorization: {authorization}"]
    readers = Readers(TOKEN.encode())
    assert readers.answer("\r\n".join(lines).encode())[0] == status
    assert readers.answer("\r\n".join([*lines, lines[-1]]).encode())[0] == 401
    assert TOKEN not in repr(readers)


def test_who_has_no_token_does_not_learn_which_paths_there_are():
    with served(token=TOKEN) as port:
        assert get(port)[0] == get(port, "/secret")[0] == get(port, method="POST")[0] == 401
        assert get(port, Authorization=f"Bearer {TOKEN}") == (200, b"numbers 1\n")


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_without_a_token_only_this_host_may_read(host: str):
    page = HttpPage(lambda: b"", "text/plain")
    with pytest.raises(AuthError, match="give a token"):
        page.start(host, 0)
    page.close()


@pytest.mark.attack("A13")
def test_no_more_connections_are_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr(http_page, "CONNECTION_S", 10 * WAIT_S)  # only the limit closes them
    page = HttpPage(lambda: b"numbers 1\n", "text/plain")
    port = page.start("127.0.0.1", 0)
    try:
        with contextlib.ExitStack() as stack:
            silent = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
                for _ in range(http_page.MAX_CONNECTIONS + 5)
            ]
            assert get(port)[0] == 200  # after them: all are accepted by now
            assert len(page._clients) <= http_page.MAX_CONNECTIONS
            for sock in silent[:5]:
                assert sock.recv(1) == b""  # the oldest gave way
    finally:
        page.close()


@pytest.mark.attack("A13")
def test_silent_connections_cost_no_thread_and_keep_nobody_out():
    with served() as port, contextlib.ExitStack() as stack:
        before = threading.active_count()
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S))
            for _ in range(3 * http_page.MAX_CONNECTIONS)
        ]
        silent[-1].sendall(b"GET /metrics HT")
        assert get(port)[0] == 200
        assert threading.active_count() <= before
        assert silent[0].recv(1) == b""  # the oldest gave way


@pytest.mark.attack("A13")
def test_a_slow_request_is_cut(monkeypatch):
    monkeypatch.setattr(http_page, "CONNECTION_S", 0.05)
    with served() as port:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as slow:
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert select.select([slow], [], [], WAIT_S)[0], "still open"
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(100) == b""
        monkeypatch.setattr(http_page, "CONNECTION_S", WAIT_S)
        assert get(port)[0] == 200


def test_a_reader_that_does_not_read_is_cut():
    page = HttpPage(lambda: b"x" * (16 << 20), "text/plain")
    port = page.start("127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as deaf:
            deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert deaf.recv(8) == b"HTTP/1.1"
            for client in list(page._clients.values()):
                client.deadline_s = time.monotonic()
            assert get(port, "/")[0] == 404  # and with it, somebody looks at deadlines
            wait_until(lambda: not page._clients, "it is cut")
            received = 0
            with contextlib.suppress(ConnectionResetError):
                while data := deaf.recv(1 << 20):
                    received += len(data)
            assert received < 16 << 20
    finally:
        page.close()


def test_the_page_is_not_made_for_every_reader(monkeypatch):
    made: list[int] = []

    def render() -> bytes:
        made.append(1)
        return str(len(made)).encode()

    page = HttpPage(render, "text/plain")
    port = page.start("127.0.0.1", 0)
    try:
        monkeypatch.setattr(http_page, "FRESH_S", WAIT_S)
        assert [get(port)[1] for _ in range(3)] == [b"1"] * 3
        monkeypatch.setattr(http_page, "FRESH_S", 0.0)
        assert get(port)[1] == b"2"
    finally:
        page.close()


def test_a_page_that_cannot_be_made_is_made_the_next_time(caplog):
    failures = [ValueError("secret detail")]

    def render() -> bytes:
        if failures:
            raise failures.pop()
        return b"fine"

    page = HttpPage(render, "text/plain")
    port = page.start("127.0.0.1", 0)
    try:
        status, body = get(port)
        assert status == 500
        assert b"secret" not in body
        assert get(port) == (200, b"fine")
    finally:
        page.close()
    page.close()
    assert "cannot be made" in caplog.text
