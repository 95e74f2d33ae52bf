"""A network that fails by seed, between real clients and real servers of one simulated world.

It stands in the place of rpc.client.connection for ps.client.channel: requests that never arrive,
that end in the middle, whose reply is lost; cuts that the two ends see at different times.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ps.errors import PSError
from ps.server.handlers import Service
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import ConnectionStats, Reply
from rpc.endpoint import Endpoint
from rpc.errors import DeadlineExceeded, PeerGone, RemoteError, RpcError
from tests.support.sim.world import World

WHOLE = 1 << 62


class Network:
    """Stands in the place of rpc.client.connection for ps.client.channel."""

    def __init__(self, world: World, cut_rate: float, services: Sequence[Service]) -> None:
        self.world = world
        self.services = list(services)
        self._calls: list[Call] = []
        self.cut_rate = cut_rate
        self.log: list[str] = []
        self.num_cuts = 0

    def note(self, text: str) -> None:
        self.log.append(f"{self.world.now_s - 1000:8.3f} s  {self.world.current.name}: {text}")

    def connect(self, endpoint: Endpoint, identity: Identity, *_: Any, **__: Any) -> Connection:
        if self.world.random.random() < self.cut_rate / 2:
            self.world.sleep(self.world.random.random() / 10)
            raise PeerGone("simulated: nothing listens")
        return Connection(self, self.services[endpoint.port], identity)

    def began(self, call: Call) -> None:
        self._calls = [each for each in self._calls if not each.settled]
        self._calls.append(call)

    def replace(self, rank: int, served: Service) -> None:
        """A server dies; another one is there at once, which nobody is connected to."""
        dead, self.services[rank] = self.services[rank], served
        self.note(f"ps:{rank} dies and is started again")
        for call in self._calls:
            if call.connection.service is dead and not call.settled:
                call.cut()

    def wait_any(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        self.world.block(lambda: any(call.settled for call in calls), timeout_s)
        return [call for call in calls if call.settled]


@dataclass
class Fate:
    """How far one request gets before its connection is cut, and when either side sees it."""

    delivered_bytes: int = WHOLE
    """-1: not even the request's head."""
    is_cut: bool = False
    client_sees_s: float = 0.0
    server_sees_s: float = 0.0
    delay_s: float = 0.0

    @classmethod
    def of(cls, dice: random.Random, cut_rate: float, num_bytes: int) -> Fate:
        delay_s = dice.choice((0.0, 0.0, 0.01, 0.3))
        if dice.random() >= cut_rate:
            return cls(delay_s=delay_s)
        kind = dice.choice(("lost", "inside", "reply"))
        delivered = {"lost": -1, "inside": dice.randint(0, num_bytes), "reply": WHOLE}[kind]
        sees = (dice.choice((0.0, 0.05, 0.6)), dice.choice((0.0, 0.05, 0.6, 4.0)))
        return cls(delivered, True, *sees, delay_s=dice.choice((delay_s, delay_s, 2.0)))


class Connection:
    """One authenticated connection, and what is left of it after a cut."""

    transport = "simulated"

    def __init__(self, network: Network, served: Service, identity: Identity) -> None:
        self.network = network
        self.service = served
        self.identity = identity
        self.peer = Identity(Role.SERVER, served.settings.rank)
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed or not self.is_served

    @property
    def is_served(self) -> bool:
        return self.network.services[self.service.settings.rank] is self.service

    def peer_closed(self) -> bool:
        return self.closed

    def close(self) -> None:
        self._closed = True

    def stats(self) -> ConnectionStats:
        return ConnectionStats(calls=0, errors=0, bytes_sent=0, bytes_received=0)

    def call(self, meta: bytes, payload: Any = (), *, into: Any = None, timeout_s: float) -> Reply:
        """As rpc's: one call alone."""
        call = self.begin(meta, payload, into=into)
        self.network.wait_any([call], timeout_s)
        call.fail_if_overdue(timeout_s)
        return call.result(0.0)

    def begin(self, meta: bytes, payload: Any = (), *, into: Any = None) -> Call:
        network, world = self.network, self.network.world
        data = b"".join(bytes(part) for part in payload)
        fate = Fate.of(world.random, network.cut_rate, len(data))
        call = Call(self, meta, data, into, fate)
        network.began(call)
        if fate.is_cut:
            world.at(fate.client_sees_s, call.cut)
            self.network.num_cuts += 1
        if fate.delivered_bytes >= 0:
            world.spawn(f"handler of {self.identity} at {self.peer}", call.serve)
        return call


class Call:
    """One request: the client's wait for it, and the handler's view of it (rpc.server.request)."""

    def __init__(
        self, connection: Connection, meta: bytes, payload: bytes, into: Any, fate: Fate
    ) -> None:
        self.connection = connection
        self.world = connection.network.world
        self.peer = connection.identity
        self.meta = meta
        self.payload_bytes = self.remaining = len(payload)
        self.answered = False
        self._payload = payload
        self._into = into
        self._fate = fate
        self._began_s = self.world.now_s
        self._parts: list[bytes] = []
        self._outcome: Reply | RpcError | None = None

    # -- the client's side, as rpc's PendingCall

    @property
    def settled(self) -> bool:
        return self._outcome is not None

    def fail_if_overdue(self, timeout_s: float) -> None:
        if self._outcome is None:
            self.connection.close()
            self._outcome = DeadlineExceeded(f"simulated: no answer within {timeout_s:g} s")

    def cut(self) -> None:
        """The client hears that the connection is gone."""
        self.connection.network.note(f"{self.peer} cut from {self.connection.peer}")
        self.connection.close()
        self._outcome = PeerGone("simulated cut")

    def result(self, _: float) -> Reply:
        found = self._outcome
        if not isinstance(found, Reply):
            assert found is not None
            raise found
        if self._into is not None:
            data, start = b"".join(self._parts), 0
            for view in self._into:
                view[:] = data[start : start + len(view)]
                start += len(view)
            assert start == len(data), "the reply has another size than what it is to fill"
        return found

    # -- the handler's side

    def serve(self) -> None:
        self.world.sleep(self._fate.delay_s)
        try:
            self.connection.service.handle(self)  # type: ignore[arg-type]
        except PSError as error:
            self._finish(RemoteError(error.code, error.message, error.details))
        except RpcError:
            pass  # the connection is gone

    def read_into(self, view: memoryview) -> None:
        self.world.maybe_switch()
        start = self.payload_bytes - self.remaining
        if start + len(view) > self._fate.delivered_bytes:
            self.world.sleep(self._fate.server_sees_s)
            raise PeerGone("simulated cut inside the request")
        view[:] = self._payload[start : start + len(view)]
        self.remaining -= len(view)

    def discard_rest(self) -> None:
        if self.payload_bytes > self._fate.delivered_bytes:
            raise PeerGone("simulated cut inside the request")
        self.remaining = 0

    def send(self, buffers: Sequence[Any]) -> None:
        self._parts += [bytes(part) for part in buffers]
        self.world.maybe_switch()

    def reply(self, meta: bytes, buffers: Sequence[Any] = ()) -> None:
        self.answered = True
        self.send(buffers)
        payload = b"" if self._into is not None else b"".join(self._parts)
        self._finish(Reply(meta, memoryview(payload)))

    def peer_gone(self) -> bool:
        cut_s = self._began_s + self._fate.server_sees_s
        return self._fate.is_cut and self.world.now_s >= cut_s

    def _finish(self, outcome: Reply | RpcError) -> None:
        if self._outcome is None and not self._fate.is_cut and self.connection.is_served:
            self._outcome = outcome
