"""A listener whose handler does what the request's meta says, and raw clients to attack it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import secrets
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rpc.auth.certificates import TlsCredentials
from rpc.auth.handshake import ClientHandshake, Credentials, Identity, Integrity, Role, Session
from rpc.client.connection import Buffer, Connection, PendingCall, Reply, connect, wait_any
from rpc.endpoint import Endpoint
from rpc.errors import RpcError
from rpc.limits import Limits
from rpc.process_stat import resident_bytes
from rpc.server.listener import Call, Listener
from rpc.transport.gmac_stream import SealedStream
from rpc.transport.shm_stream import SharedStream, share
from rpc.transport.stream import SocketStream, Stream
from rpc.transport.tls_stream import TlsStream
from rpc.wire.frame import FrameKind, Opener, Sealer
from tfos.control.authority import ClusterAuthority

WAIT_S = 20.0
TRANSPORTS = ("tcp", "tcp+payload", "tcp+tls", "unix", "shm", "inproc")
WORKER = Identity(Role.WORKER, 3, 1)
SERVER = Identity(Role.SERVER, 0)
PART_BYTES = 64 * 1024


@dataclass(frozen=True)
class OutCall:
    """One call of `call_all`."""

    connection: Connection
    meta: bytes
    payload: Sequence[Buffer] = ()
    into: Sequence[Buffer] | None = None


def call_all(calls: Sequence[OutCall], *, timeout_s: float) -> list[Reply | RpcError]:
    """Make one call on each of several connections at once; errors stand in their places."""
    deadline_s = time.monotonic() + timeout_s
    begun: list[PendingCall | RpcError] = []
    for call in calls:
        try:
            begun.append(call.connection.begin(call.meta, call.payload, into=call.into))
        except RpcError as error:
            begun.append(error)
    pending = [one for one in begun if isinstance(one, PendingCall)]
    while left := [one for one in pending if not one.settled]:
        if not wait_any(left, max(0.0, deadline_s - time.monotonic())):
            for late in left:
                late.fail_if_overdue(timeout_s)
    return [_outcome(one) if isinstance(one, PendingCall) else one for one in begun]


def _outcome(call: PendingCall) -> Reply | RpcError:
    try:
        return call.result(0.0)
    except RpcError as error:
        return error


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def little_memory(limit_bytes: int = 1 << 20) -> Iterator[None]:
    """Fail if more memory is taken at any moment, even if it is given back or never touched.

    The resident size must not grow by more either, but it hides what is allocated and not used.
    """
    before = resident_bytes(os.getpid())
    tracemalloc.start()
    try:
        yield
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < limit_bytes, f"{peak_bytes} bytes were allocated at once"
    grown = resident_bytes(os.getpid()) - before - tracemalloc.get_tracemalloc_memory()
    assert grown < limit_bytes, f"resident memory grew by {grown} bytes"


class CodedError(Exception):
    code = "shape"

    def __init__(self, message: str, details: dict[str, str]) -> None:
        super().__init__(message)
        self.details = details


class Bed:
    """Handler and listener; `gate` holds back calls whose meta is `wait`."""

    def __init__(
        self,
        transport: str = "tcp",
        limits: Limits | None = None,
        integrity: Integrity = "auto",
    ) -> None:
        self.credentials = dataclasses.replace(Credentials.generate(), integrity=integrity)
        if transport == "tcp+payload":
            self.credentials = dataclasses.replace(self.credentials, integrity="payload")
        if transport == "tcp+tls":
            self.credentials = over_tls(self.credentials)
        self.gate = threading.Event()
        self.waiting = threading.Semaphore(0)
        self.handled: list[bytes] = []
        self.disconnected: list[Identity] = []
        self.saw_peer_gone = threading.Event()
        self.limits = limits or Limits()
        if transport == "unix":
            self.limits = dataclasses.replace(self.limits, shared_ring_bytes=0)
        self.listener = Listener(
            self.handle,
            self.credentials,
            SERVER,
            limits=self.limits,
            on_disconnect=self.disconnected.append,
        )
        if transport.startswith("tcp"):
            self.listener.bind_tcp("127.0.0.1")
        elif transport in ("unix", "shm"):
            self.listener.bind_unix()
        else:
            self.listener.bind_inproc(f"bed-{id(self)}")
        self.listener.start()

    @property
    def endpoint(self) -> Endpoint:
        return self.listener.endpoint

    @property
    def address(self) -> tuple[str, int]:
        return (self.endpoint.host, self.endpoint.port)

    def connect(self, **changes: object) -> Connection:
        wanted: dict[str, object] = {"expect": Role.SERVER, "limits": self.limits} | changes
        return connect(self.endpoint, WORKER, self.credentials, **wanted)  # type: ignore[arg-type]

    def close(self) -> None:
        self.gate.set()
        self.listener.close()

    def handle(self, call: Call) -> None:
        self.handled.append(call.meta)
        action = getattr(self, "do_" + call.meta.decode().split(":")[0], None)
        if action is None:
            call.fail("unknown", f"no such call: {call.meta[:40]!r}")
        else:
            action(call)

    def do_echo(self, call: Call) -> None:
        data = np.empty(call.payload_bytes, np.uint8)
        call.read_into(data.data)
        call.reply(b"done", [data])

    def do_exchange(self, call: Call) -> None:
        """Reply part by part while the request is still coming."""
        part = memoryview(bytearray(PART_BYTES))
        while call.remaining:
            now = part[: min(PART_BYTES, call.remaining)]
            call.read_into(now)
            call.send([bytes(now)])
        call.reply(b"exchanged")

    def do_ignore(self, call: Call) -> None:
        call.reply(b"ignored")

    def do_parts(self, call: Call) -> None:
        for part in (b"one", b"", b"two"):
            call.send([part])
        call.reply(b"parts", [b"three"])

    def do_fail(self, call: Call) -> None:
        call.fail("refused", "not today", {"why": "test"})

    def do_fail_midway(self, call: Call) -> None:
        part = memoryview(bytearray(min(10, call.remaining)))
        call.read_into(part)
        call.send([bytes(part)])
        raise CodedError("midway", {"at": "10"})

    def do_raise(self, call: Call) -> None:
        raise ZeroDivisionError("secret inner detail")

    def do_silent(self, call: Call) -> None:
        pass

    def do_overread(self, call: Call) -> None:
        call.read_into(memoryview(bytearray(call.payload_bytes + 1)))

    def do_twice(self, call: Call) -> None:
        call.reply(b"first")
        call.reply(b"second")

    def do_long_meta(self, call: Call) -> None:
        call.reply(bytes(self.limits.max_meta_bytes + 1))

    def do_wait(self, call: Call) -> None:
        self.waiting.release()
        deadline = time.monotonic() + WAIT_S
        while not self.gate.wait(0.005) and time.monotonic() < deadline:
            if call.peer_gone():
                self.saw_peer_gone.set()
                return
        call.reply(b"waited")

    def do_leave_unread(self, call: Call) -> None:
        """Hold the request unread until the gate opens."""
        self.do_wait(call)


@contextlib.contextmanager
def bed(
    transport: str = "tcp",
    limits: Limits | None = None,
    integrity: Integrity = "auto",
) -> Iterator[Bed]:
    made = Bed(transport, limits, integrity)
    try:
        yield made
    finally:
        made.close()


def shared_pair(
    left: SocketStream, right: SocketStream, limits: Limits
) -> tuple[SharedStream, SharedStream]:
    """Both ends of a socket pair after they agreed to share memory."""
    made: list[SharedStream | None] = [None]
    deadline = time.monotonic() + WAIT_S

    def serve() -> None:
        made[0] = share(left, limits, first=True, deadline_s=deadline)

    server = threading.Thread(target=serve)
    server.start()
    client = share(right, limits, first=False, deadline_s=deadline)
    server.join(WAIT_S)
    assert made[0] is not None
    assert client is not None
    return made[0], client


def sealed_pair(left: Stream, right: Stream) -> tuple[SealedStream, SealedStream]:
    """Both ends of a pair with every byte authenticated."""
    one, other = bytes(32), bytes([1]) * 32
    return (
        SealedStream(left, Session(SERVER, one, other)),
        SealedStream(right, Session(WORKER, other, one)),
    )


@functools.cache
def _tls_keys() -> tuple[TlsCredentials, str]:
    cluster_id = secrets.token_hex(8)
    return ClusterAuthority(cluster_id).data_node(
        "server", "worker", "driver", "feeder"
    ), cluster_id


def over_tls(credentials: Credentials) -> Credentials:
    """The same cluster secret with a key for both sides; the cluster has a name of its own."""
    keys, cluster_id = _tls_keys()
    return dataclasses.replace(credentials, cluster_id=cluster_id, tls=keys)


def tls_pair(left: Stream, right: Stream) -> tuple[TlsStream, TlsStream]:
    """Both ends of a pair after they have shown their certificates."""
    keys, cluster_id = _tls_keys()
    server = TlsStream(left, keys, cluster_id, server_side=True)
    client = TlsStream(right, keys, cluster_id, server_side=False)
    are_done = [False, False]
    while not all(are_done):
        are_done = [one.shake_hands() for one in (client, server)]
    return server, client


class RawClient:
    """A TCP client that sends whatever bytes it likes."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address, timeout=WAIT_S)
        self.session: Session | None = None

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.sock.close()

    def receive(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            chunk = self.sock.recv(num_bytes - len(data))
            if not chunk:
                break
            data += chunk
        return data

    def until_closed(self) -> bytes:
        """Return all bytes that come before the peer closes; fails if it does not."""
        data = b""
        try:
            while chunk := self.sock.recv(65536):
                data += chunk
        except ConnectionResetError:
            pass
        except TimeoutError as error:
            raise AssertionError(f"still open, got {data!r}") from error
        return data

    def authenticate(self, credentials: Credentials, identity: Identity = WORKER) -> RawClient:
        handshake = ClientHandshake(identity, credentials)
        while handshake.session is None:
            self.sock.sendall(handshake.feed(self.receive(handshake.wanted)))
        self.session = handshake.session
        self.sealer = Sealer(self.session.send_key)
        self.opener = Opener(self.session.receive_key, Limits())
        return self

    def sealed(self, meta: bytes, payload_bytes: int = 0, request_id: int = 1) -> bytes:
        return self.sealer.seal(FrameKind.REQUEST, request_id, meta, payload_bytes)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.sock.sendall(data)


def error_of(action: Callable[[], object]) -> RpcError:
    try:
        action()
    except RpcError as error:
        return error
    raise AssertionError("no RpcError was raised")
