"""A whole cluster in one simulated world: real clients, real servers, a network that fails by seed.

PSClient, Fleet, exchange and links on one side, Service, gate, record and dense shard on the other
are the product's own; in between stands `Network` instead of sockets. What it does to a connection
is what TCP shows above rpc's frames: requests that never arrive, that end in the middle, whose
reply is lost; servers that hear of a cut late, so that an old copy of a request is still at work
beside its retry and behind later ones. Workers die by seed and are declared lost later.

    python -m tests.simulated_ps SEED        runs one schedule and prints what happened
"""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from ps import exchange, gate, intake, lifecycle, links, meetings, service, serving
from ps.client import PSClient
from ps.errors import PSError, WorkerLost
from ps.lifecycle import ServerSettings
from ps.params import Add, Consistency, GroupSpec, Hyper, Manifest, ParamSpec
from ps.service import Service
from rpc.address import Endpoint
from rpc.connection import ConnectionStats, Reply
from rpc.errors import DeadlineExceeded, PeerGone, RemoteError, RpcError
from rpc.handshake import Credentials, Identity, Role
from tests.simulation import Task, World, end_runners

MODULES = (exchange, gate, lifecycle, links, meetings, service, serving)
BUCKET_ELEMENTS = 16
TIMEOUT_S = 60.0
HYPER = Hyper(0.5)
CREDENTIALS = Credentials("simulated", b"s" * 32)
WHOLE = 1 << 62


@dataclass
class Plan:
    """What one seed means."""

    seed: int
    num_workers: int
    num_servers: int
    num_buckets: int
    num_steps: int
    consistency: Consistency
    bound: int
    on_lost: Literal["fail", "continue"]
    cut_rate: float
    crashes: bool
    visits: bool
    """Whether workers leave and join."""

    @classmethod
    def of(cls, seed: int) -> Plan:
        dice = random.Random(f"plan {seed}")
        consistency: Consistency = dice.choice(("async", "sync", "ssp"))
        return cls(
            seed,
            num_workers=dice.randint(1, 3),
            num_servers=dice.randint(1, 2),
            num_buckets=dice.randint(1, 5),
            num_steps=dice.randint(1, 5),
            consistency=consistency,
            bound=dice.randint(0, 2) if consistency == "ssp" else 0,
            on_lost=dice.choice(("fail", "continue")),
            cut_rate=dice.choice((0.0, 0.2, 0.5)),
            crashes=dice.random() < 0.3,
            visits=dice.random() < 0.3,
        )

    @property
    def manifest(self) -> Manifest:
        params = (ParamSpec("w", (self.num_buckets * BUCKET_ELEMENTS,)),)
        return Manifest(
            groups=(GroupSpec("g", "float32", Add(), params),),
            bucket_bytes=4 * BUCKET_ELEMENTS,
            consistency=self.consistency,
            reduction="sum",
            staleness_bound=self.bound,
        )


class Network:
    """Stands in the place of rpc.connection for ps.links."""

    def __init__(self, world: World, plan: Plan, services: Sequence[Service]) -> None:
        self.world = world
        self.services = services
        self.cut_rate = plan.cut_rate
        self.log: list[str] = []
        self.num_cuts = 0

    def note(self, text: str) -> None:
        self.log.append(f"{self.world.now_s - 1000:8.3f} s  {self.world.current.name}: {text}")

    def connect(self, endpoint: Endpoint, identity: Identity, *_: Any, **__: Any) -> Connection:
        if self.world.random.random() < self.cut_rate / 2:
            self.world.sleep(self.world.random.random() / 10)
            raise PeerGone("simulated: nothing listens")
        return Connection(self, self.services[endpoint.port], identity)

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
        self.closed = False

    def close(self) -> None:
        self.closed = True

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
        if fate.is_cut:
            world.at(fate.client_sees_s, call.cut)
            self.network.num_cuts += 1
        if fate.delivered_bytes >= 0:
            world.spawn(f"handler of {self.identity} at {self.peer}", call.serve)
        return call


class Call:
    """One request: the client's wait for it, and the handler's view of it (as rpc.call.Call)."""

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
        if self._outcome is None and not self._fate.is_cut:
            self._outcome = outcome


@dataclass
class Worker:
    """What one worker did and read, for the invariants."""

    rank: int
    acknowledged: int = 0
    unknown: int = 0
    """Pushes without an answer; each may be applied or not."""
    clocks: list[int] = field(default_factory=list)
    ended_by: BaseException | None = None


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.plan = plan = Plan.of(seed)
        self.world = World(seed)
        self.workers = [Worker(rank) for rank in range(plan.num_workers)]
        self.lost: set[int] = set()
        self.values = np.empty(0)
        self.network: Network

    def run(self) -> None:
        """Run the schedule and check it.

        Raises:
            AssertionError: the text names the seed.
        """
        try:
            with self.world.patch(*MODULES) as patched:
                self._run(patched)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{self.plan}\nreplay: python -m tests.simulated_ps {self.plan.seed}"
            ) from error

    def _run(self, patched: Any) -> None:
        plan, world = self.plan, self.world
        services = []
        for rank in range(plan.num_servers):
            settings = ServerSettings(
                rank=rank,
                num_servers=plan.num_servers,
                num_workers=plan.num_workers,
                on_lost=plan.on_lost,
            )
            services.append(Service(settings, open_connections=int))
        self.network = network = Network(world, plan, services)
        patched.setattr(intake, "READ_BYTES", 4 * BUCKET_ELEMENTS)  # requests end inside buckets
        patched.setattr(serving, "SEND_BYTES", 8 * BUCKET_ELEMENTS)
        patched.setattr(links, "connect", network.connect)
        patched.setattr(exchange, "wait_any", network.wait_any)
        patched.setattr(exchange, "connect_together", lambda *_: {})  # threads of its own
        patched.setattr(links, "random", SimpleNamespace(uniform=lambda _, longest: longest))
        patched.setattr(secrets, "randbits", world.random.getrandbits)
        tasks = [
            world.spawn(f"worker:{worker.rank}", partial(self._work, worker))
            for worker in self.workers
        ]
        if plan.crashes and plan.num_workers > 1:
            tasks.append(world.spawn("driver", partial(self._crash, tasks[-1], services)))
        world.join(*tasks)
        for worker, task in zip(self.workers, tasks, strict=False):
            worker.ended_by = task.error
        network.cut_rate = 0.0
        reader = world.spawn("reader", partial(self._read, services))
        world.join(reader)
        if reader.error is not None:
            raise AssertionError(f"the last pull failed: {reader.error!r}") from reader.error
        self.check(services)

    # -- what workers do

    def _client(self, rank: int, role: Role = Role.WORKER) -> PSClient:
        return PSClient(
            [Endpoint("simulated", rank) for rank in range(self.plan.num_servers)],
            CREDENTIALS,
            Identity(role, rank),
            num_workers=self.plan.num_workers,
            timeout_s=TIMEOUT_S,
        )

    def _work(self, worker: Worker) -> None:
        plan, manifest = self.plan, self.plan.manifest
        client = self._client(worker.rank)
        zeros = {"g": np.zeros(plan.num_buckets * BUCKET_ELEMENTS, np.float32)}
        if worker.rank == 0:
            client.seed(manifest, zeros)
        client.attach()
        mine = {"g": zeros["g"].copy()}
        mine["g"][worker.rank :: BUCKET_ELEMENTS] = 1.0
        dice = random.Random(f"work {plan.seed} {worker.rank}")
        for _ in range(plan.num_steps):
            if plan.visits and dice.random() < 0.3:
                client.leave()
                client.join()
            worker.unknown += 1
            self._push(client, worker, mine, dice)
            worker.unknown -= 1
            worker.acknowledged += 1
        client.finish()

    def _push(self, client: PSClient, worker: Worker, mine: Any, dice: random.Random) -> None:
        into = {"g": np.full_like(mine["g"], np.nan)}
        if dice.random() < 0.7:
            ack = client.push_pull(mine, into, hyper=HYPER, rows=1)
        else:
            ack = client.push(mine, hyper=HYPER, rows=1)
            client.pull(into)
        self.network.note(f"pushed, clock {ack.clock}")
        worker.clocks.append(ack.clock)
        self._check_read(worker, into["g"].reshape(-1, BUCKET_ELEMENTS))

    def _check_read(self, worker: Worker, buckets: Any) -> None:
        """What a worker reads after its push number `done`."""
        plan, done = self.plan, worker.acknowledged + 1
        own = buckets[:, worker.rank]
        assert (own == done).all(), f"worker {worker.rank} pushed {done} times and reads {own}"
        if plan.visits or plan.crashes:
            return
        others = buckets[:, : plan.num_workers]
        if plan.consistency == "sync":
            assert (others >= done).all(), f"after barrier {done} somebody reads {others}"
        if plan.consistency == "ssp":
            assert (others >= done - plan.bound).all(), f"at clock {done}, bound broken: {others}"

    def _crash(self, victim: Task, services: Sequence[Service]) -> None:
        """Kill the last worker at some moment; the cluster learns of it later."""
        world = self.world
        world.sleep(world.random.choice((0.0, 0.1, 1.0, 5.0)))
        if victim.done:
            return
        world.kill(victim)
        self.network.note(f"kills {victim.name}")
        world.sleep(world.random.choice((0.0, 0.3, 5.0)))
        rank = self.plan.num_workers - 1
        self.lost.add(rank)
        for served in services:
            world.maybe_switch()
            served.worker_lost(rank, 0)  # type: ignore[arg-type]

    def _read(self, services: Sequence[Service]) -> None:
        if services[0].life.shard is None:
            return  # the chief died before it had seeded them
        client = self._client(0, Role.DRIVER)
        client.attach()
        self.values = np.empty(self.plan.num_buckets * BUCKET_ELEMENTS, np.float32)
        client.pull({"g": self.values})

    # -- what must hold at the end

    def check(self, services: Sequence[Service]) -> None:
        buckets = self.values.reshape(-1, BUCKET_ELEMENTS)
        for worker in self.workers:
            self._check_end(worker)
            if not len(buckets):
                continue
            counts = buckets[:, worker.rank]
            least, most = worker.acknowledged, worker.acknowledged + worker.unknown
            assert counts.min() >= least, f"worker {worker.rank}: {least} done, lost: {counts}"
            assert counts.max() <= most, f"worker {worker.rank}: {most} sent, doubled: {counts}"
            assert worker.clocks == sorted(worker.clocks), f"clocks go back: {worker.clocks}"
            if self.plan.consistency == "sync":
                assert len(set(worker.clocks)) == len(worker.clocks), "two pushes in one barrier"
            self._check_stats(worker, services)

    def _check_end(self, worker: Worker) -> None:
        error = worker.ended_by
        if error is None or worker.rank in self.lost:
            return
        plan = self.plan
        may_break = self.lost and plan.consistency == "sync" and plan.on_lost == "fail"
        is_expected = may_break and isinstance(error, WorkerLost)
        assert is_expected, f"worker {worker.rank}: {error!r}"

    def _check_stats(self, worker: Worker, services: Sequence[Service]) -> None:
        for served in services:
            pushes = sum(w.pushes for w in served.stats().workers if w.worker == worker.rank)
            assert worker.acknowledged <= pushes <= worker.acknowledged + worker.unknown, (
                f"ps:{served.settings.rank} counted {pushes} pushes of worker {worker.rank}, "
                f"acknowledged {worker.acknowledged}"
            )


def run(seeds: Sequence[int], on_done: Callable[[Simulation], None] = lambda _: None) -> None:
    """Run these schedules; the first that breaks a promise is raised."""
    try:
        for seed in seeds:
            simulation = Simulation(seed)
            simulation.run()
            on_done(simulation)
    finally:
        end_runners()


if __name__ == "__main__":
    shown = Simulation(int(sys.argv[1]))
    try:
        shown.run()
    finally:
        sys.stdout.write("\n".join([str(shown.plan), *shown.network.log, ""]))
