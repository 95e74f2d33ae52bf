"""HTTP server for one read-only page of text, for metrics scrapers.

Covers: who may read the page, limits on size, time and number of connections; one thread for all.
Does not: know the page's content; TLS, keep-alive, any other method or path.
Threads: one of its own runs everything, `render` too; `close` from any thread.

Without a token the server binds to loopback only, and a request must name a loopback host: this
refuses DNS rebinding, where a browser sends the name of a hostile site. With a token, a request
carries it as `Authorization: Bearer`, which no browser sends on its own.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from rpc.endpoint import is_loopback
from rpc.errors import AuthError
from rpc.limits import DEFAULT_LIMITS
from rpc.transport.listen import bound_tcp

MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 32
"""One more closes the oldest."""
CONNECTION_S = 10.0
"""For request and answer together."""
FRESH_S = 1.0
"""The page is rendered at most once in this time, however many requests come."""
PATH = "/metrics"
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:/@\s]+))(?::[0-9]{1,5})?")
_END = b"\r\n\r\n"
_RECEIVE_BYTES = 4096
_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Readers:
    """Decides who may read the page."""

    token: bytes = field(default=b"", repr=False)
    """Empty: every client that names a loopback host may read."""

    def answer(self, head: bytes) -> tuple[HTTPStatus, str]:
        """Check a request's head, without the empty line at its end.

        Returns:
            The status, and the reason if the request is refused.
        """
        try:
            request, *lines = head.decode("ascii").split("\r\n")
            method, target, version = request.split(" ")
            headers = [_header(line) for line in lines]
        except ValueError:  # no ASCII, or not of that form
            return HTTPStatus.BAD_REQUEST, "not an HTTP/1 request"
        hosts = [value for name, value in headers if name == "host"]
        if not version.startswith("HTTP/1.") or len(hosts) != 1:
            return HTTPStatus.BAD_REQUEST, "HTTP/1.1 with exactly one Host is needed"
        if not self.token and not is_loopback(host_name(hosts[0])):
            return HTTPStatus.FORBIDDEN, "ask by the name localhost or 127.0.0.1"
        if self.token and not self._knows_token(headers):
            return HTTPStatus.UNAUTHORIZED, "Authorization: Bearer with the token is needed"
        if method not in ("GET", "HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "only GET is answered"
        if target.partition("?")[0] != PATH:
            return HTTPStatus.NOT_FOUND, f"only {PATH} is here"
        return HTTPStatus.OK, ""

    def _knows_token(self, headers: list[tuple[str, str]]) -> bool:
        given = [value for name, value in headers if name == "authorization"]
        token = bearer_token(given[0]) if len(given) == 1 else ""
        return hmac.compare_digest(token.encode("ascii"), self.token)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not name or name != name.strip():
        raise ValueError(line)
    return name.lower(), value.strip()


def bearer_token(authorization: str) -> str:
    """Return the token in an Authorization header; empty if it is of another scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def host_name(host: str) -> str:
    """Return the name or address in a Host header, without port and brackets; empty if malformed.

    Args:
        host: the header's value.
    """
    match = _HOST.fullmatch(host)
    return (match[1] or match[2] or "") if match else ""


@dataclass(slots=True)
class _Client:
    sock: socket.socket
    deadline_s: float
    head: bytearray = field(default_factory=bytearray)
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    """Bytes of the answer still to send."""


class HttpPage:
    """Serves one page until it is closed.

    Args:
        render: returns the page, UTF-8.
        content_type: the page's MIME type.
        token: a client that presents it may read; empty: local clients may, without a token.
    """

    def __init__(self, render: Callable[[], bytes], content_type: str, *, token: str = "") -> None:
        self._render = render
        self._content_type = content_type
        self._readers = Readers(token.encode("ascii"))
        self._page = b""
        self._made_s = float("-inf")
        self._clients: dict[int, _Client] = {}  # by descriptor, oldest first
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="metrics-page", daemon=True)
        self._close_lock = threading.Lock()

    def start(self, host: str, port: int) -> int:
        """Listen and serve; returns the port.

        Args:
            host: address to bind; without a token a loopback address.
            port: 0 lets the kernel choose.

        Raises:
            AuthError: other hosts could read the page, and there is no token.
            PortInUse: the text names the holder where it can be seen.
        """
        if not self._readers.token and not is_loopback(host):
            raise AuthError(
                f"metrics on {host} could be read by other hosts; give a token, or listen on "
                "127.0.0.1"
            )
        listener = bound_tcp(host, port, DEFAULT_LIMITS)
        listener.setblocking(False)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return int(listener.getsockname()[1])

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop listening and close all connections. Idempotent."""
        with self._close_lock:
            if self._closing.is_set():
                return
            self._closing.set()
            os.eventfd_write(self._wake, 1)
        if self._listener is None:
            self._release()
        else:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._serve_ready()
        finally:
            self._release()

    def _release(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        with self._close_lock:
            self._closing.set()
            os.close(self._wake)

    def _serve_ready(self) -> None:
        first = next(iter(self._clients.values()), None)
        wait_s = None if first is None else max(0.0, first.deadline_s - time.monotonic())
        for key, _ in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                self._accept()
            elif (client := self._clients.get(key.fd)) is not None and client is key.data:
                # Otherwise it was evicted in this turn, and its descriptor may be reused by now.
                self._serve(client)
        now_s = time.monotonic()
        for client in list(self._clients.values()):
            if client.deadline_s > now_s:
                break
            self._drop(client)

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors: the queue stays readable
            _log.warning("the metrics page cannot accept: %s", error)
            self._evict_oldest()
            self._closing.wait(_PAUSE_S)
            return
        if len(self._clients) >= MAX_CONNECTIONS:
            self._evict_oldest()
        sock.setblocking(False)
        client = _Client(sock, time.monotonic() + CONNECTION_S)
        self._clients[sock.fileno()] = client
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _serve(self, client: _Client) -> None:
        try:
            if not client.rest and not self._receive(client):
                return
            sent = client.sock.send(client.rest)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)
            return
        client.rest = client.rest[sent:]
        if not client.rest:
            self._drop(client)

    def _receive(self, client: _Client) -> bool:
        """Read more of the request; returns whether an answer is ready."""
        data = client.sock.recv(_RECEIVE_BYTES)
        if not data:
            self._drop(client)
            return False
        client.head += data
        head, end, _ = client.head.partition(_END)
        if len(head) > MAX_HEAD_BYTES:
            status, reason = (
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                "the request's head is too long",
            )
        elif not end:
            return False
        else:
            status, reason = self._readers.answer(bytes(head))
        client.rest = memoryview(self._response(status, reason, is_head=head[:5] == b"HEAD "))
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        return True

    def _response(self, status: HTTPStatus, reason: str, *, is_head: bool) -> bytes:
        content_type, body = "text/plain; charset=utf-8", f"{reason}\n".encode()
        if status is HTTPStatus.OK:
            try:
                content_type, body = self._content_type, self._fresh_page()
            except Exception:  # noqa: BLE001 - the page must not end the thread that serves it
                _log.exception("the metrics page cannot be made")
                status, body = HTTPStatus.INTERNAL_SERVER_ERROR, b"see the server's log\n"
        lines = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        if status is HTTPStatus.UNAUTHORIZED:
            lines.append("WWW-Authenticate: Bearer")
        head = "\r\n".join(lines).encode("ascii") + _END
        return head if is_head else head + body

    def _fresh_page(self) -> bytes:
        if time.monotonic() - self._made_s >= FRESH_S:
            self._page = self._render()
            self._made_s = time.monotonic()
        return self._page

    def _evict_oldest(self) -> None:
        for client in self._clients.values():
            self._drop(client)
            return

    def _drop(self, client: _Client) -> None:
        del self._clients[client.sock.fileno()]
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()
