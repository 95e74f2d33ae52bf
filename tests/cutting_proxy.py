"""A TCP proxy that cuts a connection after an exact number of bytes, and notes that it did."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import Literal

from rpc.address import Endpoint

Direction = Literal["up", "down"]
"""`up`: from the client to the server; `down`: the replies."""


@dataclass
class Cut:
    """Cut after this many further bytes in this direction; 0 cuts at the first byte that comes."""

    direction: Direction
    after_bytes: int
    fired: threading.Event = field(default_factory=threading.Event)


class CuttingProxy:
    """Forwards to one server; `plan` arms the next cuts, one connection each, in order."""

    def __init__(self, target: Endpoint) -> None:
        self._target = (target.host, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[socket.socket, tuple[socket.socket, Direction]] = {}
        self._cuts: list[Cut] = []
        self._lock = threading.Lock()
        self._closing = False
        self.connections = 0
        self._thread = threading.Thread(target=self._run, name="cutting-proxy", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        host, port = self._listener.getsockname()[:2]
        return Endpoint(host, port)

    def plan(self, *cuts: tuple[Direction, int]) -> list[Cut]:
        """Arm cuts; bytes count from now, over all connections."""
        armed = [Cut(direction, after_bytes) for direction, after_bytes in cuts]
        with self._lock:
            self._cuts = list(armed)
        return armed

    def retarget(self, target: Endpoint) -> None:
        """Forward new connections to another server, and cut those that there are."""
        self._target = (target.host, target.port)
        for sock in list(self._peers):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closing = True
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname()[:2], 1.0).close()
        self._thread.join(5.0)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(1.0):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._peers:
                    self._forward(key.fileobj)
        while self._peers:
            self._drop(next(iter(self._peers)))
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._closing:
            client.close()
            return
        try:
            server = socket.create_connection(self._target, 2.0)
        except OSError:
            client.close()
            return
        self.connections += 1
        directions: tuple[Direction, Direction] = ("up", "down")
        for sock, peer, direction in zip(
            (client, server), (server, client), directions, strict=True
        ):
            sock.settimeout(5.0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[sock] = (peer, direction)
            self._selector.register(sock, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        peer, direction = self._peers[sock]
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(sock)
            return
        passed, is_cut = self._admit(direction, data)
        try:
            peer.sendall(passed)
        except OSError:
            is_cut = True
        if is_cut:
            self._drop(sock)

    def _admit(self, direction: Direction, data: bytes) -> tuple[bytes, bool]:
        with self._lock:
            cut = self._cuts[0] if self._cuts else None
            if cut is None or cut.direction != direction:
                return data, False
            if cut.after_bytes >= len(data):
                cut.after_bytes -= len(data)
                return data, False
            self._cuts.pop(0)
            cut.fired.set()
            return data[: cut.after_bytes], True

    def _drop(self, sock: socket.socket) -> None:
        for end in (sock, self._peers[sock][0]):
            if self._peers.pop(end, None) is not None:
                self._selector.unregister(end)
                end.close()
