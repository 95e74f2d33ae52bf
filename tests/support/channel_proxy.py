"""A TCP proxy that harms connections at an exact byte, and notes that it did.

kind        what it does, from its byte on, to one direction of one connection
cut         the connection ends
drop        bytes vanish for `lasts_s` while both ends think it lives, then it ends
delay       nothing passes for `lasts_s`
drip        the next `num_bytes` pass one by one
duplicate   the next `num_bytes` pass twice; it ends after `lasts_s`, as with the next two
reorder     the next `num_bytes` and as many behind them change places
truncate    the next `num_bytes` are left out
repeat      the next whole frame passes twice; not with integrity="payload", which has no frames
flip        the highest bit of the next byte changes
"""

from __future__ import annotations

import contextlib
import math
import random
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rpc.endpoint import Endpoint
from rpc.wire.frame import HEADER_BYTES

Direction = Literal["up", "down"]
"""`up`: from the client to the server; `down`: the replies."""
Kind = Literal["cut", "drop", "delay", "drip", "duplicate", "reorder", "truncate", "repeat", "flip"]
KEEPS_BYTES: tuple[Kind, ...] = ("cut", "drop", "delay", "drip", "repeat")
"""What does not change payload bytes, which only integrity="payload" protects."""
ALL: tuple[Kind, ...] = ("cut", "drop", "delay", "drip", "duplicate", "reorder", "truncate")
ENDS: tuple[Kind, ...] = ("cut", "drop", "duplicate", "reorder", "truncate")
"""After what the connection ends: a reader of changed lengths would wait for bytes until its own
deadline for a stalled peer."""
DRIP_S = 0.0005
_NONCE_BYTES, _TAG_BYTES, _HELLO_BYTES = 32, 32, 8


@dataclass
class Fault:
    """Strike after this many further bytes in this direction; 0: at the first byte that comes."""

    direction: Direction
    after_bytes: int
    kind: Kind = "cut"
    num_bytes: int = 1
    lasts_s: float = 0.0
    fired: threading.Event = field(default_factory=threading.Event, repr=False)

    @classmethod
    def of(cls, dice: random.Random, kinds: tuple[Kind, ...], most_bytes: int) -> Fault:
        """Return a fault that follows from the dice alone."""
        return cls(
            dice.choice(("up", "down")),
            dice.randrange(most_bytes),
            dice.choice(kinds),
            dice.choice((1, 7, 48, 300)),
            dice.uniform(0.01, 0.1),
        )


class _Frames:
    """Finds where the frames of one direction end: they follow the handshake."""

    def __init__(self, direction: Direction) -> None:
        self._nonce_bytes = _NONCE_BYTES if direction == "down" else 0
        self._has_shaken = False
        self._item = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Give the data in parts, each with the frame that ends with it, or nothing."""
        while data:
            missing = self._size() - len(self._item)
            part, data = data[:missing], data[missing:]
            self._item += part
            frame = b""
            if len(self._item) == self._size():
                frame = bytes(self._item) if self._has_shaken else b""
                self._has_shaken = self._has_shaken or not self._nonce_bytes
                self._nonce_bytes = 0
                self._item.clear()
            yield part, frame

    def _size(self) -> int:
        """Size of what has begun, as far as its head is here."""
        item = self._item
        if self._nonce_bytes:
            return self._nonce_bytes
        if not self._has_shaken:
            body = int.from_bytes(item[6:8], "little") + _TAG_BYTES
            return _HELLO_BYTES + (body if len(item) >= _HELLO_BYTES else 0)
        if len(item) < HEADER_BYTES:
            return HEADER_BYTES
        sizes = (item[16:20], item[24:32])
        return HEADER_BYTES + sum(int.from_bytes(size, "little") for size in sizes)


class _Flow:
    """One direction of one connection: what is held back on it, and until when."""

    def __init__(self, sink: socket.socket, direction: Direction) -> None:
        self.sink = sink
        self.direction = direction
        self.frames = _Frames(direction)
        self.repeats = False
        self.swallows = False
        self.next_s = 0.0
        self.ends_s = math.inf
        self._held = bytearray()
        self._drips = 0

    @property
    def waits(self) -> bool:
        return bool(self._held) or self.ends_s < math.inf

    @property
    def due_s(self) -> float:
        return self.next_s if self._held else self.ends_s

    def put(self, data: bytes) -> None:
        for part, frame in self.frames.feed(data):
            self._held += part
            if frame and self.repeats:
                self._held += frame
                self.repeats = False

    def harm(self, fault: Fault, data: bytes) -> bytes:
        """Do what the fault does at the start of this data; returns what passes as usual."""
        size, until_s = fault.num_bytes, time.monotonic() + fault.lasts_s
        if fault.kind in ENDS:
            self.ends_s = 0.0 if fault.kind == "cut" else until_s
        if fault.kind in ("cut", "drop"):
            self.swallows, data = True, b""
        elif fault.kind == "delay":
            self.next_s = until_s
        elif fault.kind == "drip":
            self._drips = size
        elif fault.kind == "duplicate":
            data = data[:size] + data
        elif fault.kind == "reorder":
            data = data[size : 2 * size] + data[:size] + data[2 * size :]
        elif fault.kind == "truncate":
            data = data[size:]
        elif fault.kind == "repeat":
            self.repeats = True
        elif fault.kind == "flip":
            data = bytes([data[0] ^ 0x80]) + data[1:]
        return data

    def pass_on(self) -> bool:
        """Send what may go now; whether the connection goes on."""
        now_s = time.monotonic()
        if not self._held:
            return now_s < self.ends_s
        if now_s < self.next_s:
            return True
        count = 1 if self._drips else len(self._held)
        try:
            self.sink.sendall(self._held[:count])
        except OSError:
            return False
        del self._held[:count]
        if self._drips:
            self._drips -= 1
            self.next_s = now_s + DRIP_S
        return bool(self._held) or now_s < self.ends_s


class FaultProxy:
    """Forwards to one server; the next fault that was armed strikes whichever connection comes."""

    def __init__(self, target: Endpoint) -> None:
        self._target = (target.host, target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._flows: dict[socket.socket, _Flow] = {}
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self._closing = False
        self.connections = 0
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> Endpoint:
        host, port = self._listener.getsockname()[:2]
        return Endpoint(host, port)

    def plan(self, *cuts: tuple[Direction, int]) -> list[Fault]:
        """Arm cuts; see `arm`."""
        return self.arm(*(Fault(direction, after_bytes) for direction, after_bytes in cuts))

    def arm(self, *faults: Fault) -> list[Fault]:
        """Let these strike one after the other; bytes count from the one before, in all flows."""
        with self._lock:
            self._faults = list(faults)
        return list(faults)

    def retarget(self, target: Endpoint) -> None:
        """Forward new connections to another server, and cut those that there are."""
        self._target = (target.host, target.port)
        for sock in list(self._flows):
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
            for key, _ in self._selector.select(self._pause_s()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._flows:
                    self._forward(key.fileobj)
            for sock, flow in list(self._flows.items()):
                if sock in self._flows and flow.waits and not flow.pass_on():
                    self._drop(sock)
        while self._flows:
            self._drop(next(iter(self._flows)))
        self._selector.close()
        self._listener.close()

    def _pause_s(self) -> float:
        due_s = min((flow.due_s for flow in self._flows.values() if flow.waits), default=math.inf)
        return min(1.0, max(0.0, due_s - time.monotonic()))

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
        for sock, sink, direction in zip(
            (client, server), (server, client), directions, strict=True
        ):
            sock.settimeout(5.0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._flows[sock] = _Flow(sink, direction)
            self._selector.register(sock, selectors.EVENT_READ)

    def _forward(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if data:
            self._pass(self._flows[sock], data)
        else:
            self._drop(sock)

    def _pass(self, flow: _Flow, data: bytes) -> None:
        """Put data into its flow, harmed by the faults whose bytes it holds."""
        while data and not flow.swallows:
            with self._lock:
                fault = self._faults[0] if self._faults else None
                if fault is None or fault.direction != flow.direction:
                    break
                if fault.after_bytes >= len(data):
                    fault.after_bytes -= len(data)
                    break
                self._faults.pop(0)
            flow.put(data[: fault.after_bytes])
            data = flow.harm(fault, data[fault.after_bytes :])
            fault.fired.set()
        if not flow.swallows:
            flow.put(data)

    def _drop(self, sock: socket.socket) -> None:
        for end in (sock, self._flows[sock].sink):
            if self._flows.pop(end, None) is not None:
                self._selector.unregister(end)
                end.close()
