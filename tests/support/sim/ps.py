"""A whole cluster in one simulated world: real clients, real servers, a network that fails by seed.

PSClient, server group and channels on one side, service, gate, log and dense shard on the other
are the product's own; in between stands `Network` instead of sockets. What it does to a connection
is what TCP shows above rpc's frames: requests that never arrive, that end in the middle, whose
reply is lost; servers that hear of a cut late, so that an old copy of a request is still at work
beside its retry and behind later ones. Workers die by seed and are declared lost later; a server
dies and goes on from a save while the others live.

    python -m tests.support.sim.ps SEED        runs one schedule and prints what happened
"""

from __future__ import annotations

import contextlib
import random
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from ps.client import channel, client, dense, retry
from ps.client.client import PSClient
from ps.client.lookup_batch import TrainingBatch
from ps.client.server_group import AwayProbe
from ps.config import ServerSettings
from ps.consistency import gate, waits
from ps.errors import NonFiniteGradient, WorkerLost
from ps.manifest.manifest import SGD, Add, Consistency, GroupSpec, Hyper, Manifest, ParamSpec
from ps.manifest.sharding import deal
from ps.server import (
    handlers,
    lifecycle,
    receive,
    rendezvous,
    row_updates,
    shard,
    snapshot_trigger,
    table_handlers,
)
from ps.server.handlers import Service
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client import deadline
from rpc.endpoint import Endpoint
from tests.support.sim.network import Network
from tests.support.sim.restart import Restart
from tests.support.sim.world import Task, World, end_runners
from tests.support.tables import ones, table

MODULES = (
    table_handlers, row_updates, retry, gate, waits, lifecycle, channel, client, rendezvous,
    handlers, shard, snapshot_trigger, deadline,
)  # fmt: skip
BUCKET_ELEMENTS = 16
TIMEOUT_S = 60.0
"""Seconds for a request; four times as many where half of all calls are cut. There an attempt of
two calls succeeds one time in four: of 20,000 schedules one had 37 failures in a row."""
HYPER = Hyper(0.5)
CREDENTIALS = Credentials("simulated", b"s" * 32)


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
    has_rows: bool
    """Whether each step looks rows up, and pushes them after the groups; always in hybrid."""
    exchanges: bool
    """Whether those pushes take them along and bring the next ones back."""
    restarts: bool
    """Whether one server dies and is started again from a save."""
    clips: bool
    """Whether pushes take the two rounds of a norm over all servers; it never is too large."""
    meets: bool
    """Whether all workers meet twice before each step. Not where they leave and join, or bring more
    pushes than others, or where a loss fails a push of some: they would wait crosswise."""
    refuses: bool
    """Whether some pushes bring an infinite gradient; its worker goes on. Not with restarts and
    clipping: where one server has no norm of a step, all drop it."""

    @property
    def timeout_s(self) -> float:
        """Seconds for a request."""
        return 4 * TIMEOUT_S if self.cut_rate == 0.5 else TIMEOUT_S

    @classmethod
    def of(cls, seed: int) -> Plan:
        dice = random.Random(f"plan {seed}")
        consistency: Consistency = dice.choice(("async", "sync", "ssp", "hybrid"))
        plan = cls(
            seed,
            num_workers=dice.randint(1, 3),
            num_servers=dice.randint(1, 2),
            num_buckets=dice.randint(1, 5),
            num_steps=dice.randint(1, 5),
            consistency=consistency,
            bound={"ssp": dice.randint(0, 2), "hybrid": dice.randint(1, 2)}.get(consistency, 0),
            on_lost=dice.choice(("fail", "continue")),
            cut_rate=dice.choice((0.0, 0.2, 0.5)),
            crashes=dice.random() < 0.3,
            visits=dice.random() < 0.3,
            has_rows=consistency == "hybrid" or dice.random() < 0.2,
            exchanges=random.Random(f"exchanges {seed}").random() < 0.6,
            restarts=dice.random() < 0.3,
            meets=random.Random(f"meets {seed}").random() < 0.4,
            clips=consistency in ("sync", "hybrid") and dice.random() < 0.3,
            refuses=random.Random(f"refuses {seed}").random() < 0.2,
        )
        plan.exchanges &= plan.has_rows
        plan.refuses &= not (plan.restarts and plan.clips)
        may_fail = plan.crashes and plan.on_lost == "fail" and plan.manifest.has_barrier
        plan.meets &= not (plan.visits or plan.refuses or may_fail)
        return plan

    @property
    def manifest(self) -> Manifest:
        params = (ParamSpec("w", (self.num_buckets * BUCKET_ELEMENTS,)),)
        rule = SGD(global_clipnorm=1e9) if self.clips else Add()
        return Manifest(
            groups=(GroupSpec("g", "float32", rule, params),),
            tables=(table(segments=1),) if self.has_rows else (),
            bucket_bytes=4 * BUCKET_ELEMENTS,
            consistency=self.consistency,
            reduction="sum",
            staleness_bound=self.bound,
        )


def ids_of(rank: int) -> list[int]:
    """The rows that a worker counts its pushes in; they stand on all servers."""
    return [100 * rank + number for number in range(8)]


SHARED_IDS = range(5000, 5004)
"""Rows that all workers count their pushes in, where those take rows along."""


class Batch:
    """Rows to train on that come and go with pushes."""

    def __init__(self, client: PSClient, rank: int) -> None:
        ids = [*ids_of(rank), *SHARED_IDS]
        self.routed = client.tables.route({"user": ids})["user"]
        self.values = np.full((len(ids), 4), np.nan, np.float32)

    @property
    def into(self) -> dict[str, Any]:
        return {"user": (self.routed, self.values)}

    @property
    def grads(self) -> dict[str, Any]:
        return {"user": (self.routed, np.ones_like(self.values))}

    @property
    def own(self) -> Any:
        return self.routed.expand(self.values)[: -len(SHARED_IDS)]


@dataclass
class Worker:
    """What one worker did and read, for the invariants."""

    rank: int
    acknowledged: int = 0
    unknown: int = 0
    """Pushes without an answer; each may be applied or not."""
    refused: int = 0
    """Pushes of infinite gradients; a server without buckets has nothing to refuse."""
    rows: int = 0
    unknown_rows: int = 0
    """As for pushes, of gradients of rows."""
    clocks: list[int] = field(default_factory=list)
    is_ending: bool = False
    """Whether it will push no more."""
    ended_by: BaseException | None = None
    met: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """What it got at each rendezvous."""
    seen: Any = None
    """Its rows at the end."""
    batch: Batch | None = None
    """The rows that its next push takes along, if they do."""


class Simulation:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.plan = plan = Plan.of(seed)
        self.world = World(seed)
        self.workers = [Worker(rank) for rank in range(plan.num_workers)]
        self.lost: set[int] = set()
        self.values = np.empty(0)
        self.shared: Any = None
        """The rows of all workers at the end."""
        self.restart: Restart | None = None
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
                f"{error}\n{self.plan}\nreplay: python -m tests.support.sim.ps {self.plan.seed}"
            ) from error

    def _run(self, patched: Any) -> None:
        plan, world = self.plan, self.world
        services = [self._server(rank) for rank in range(plan.num_servers)]
        self.network = network = Network(world, plan.cut_rate, services)
        patched.setattr(receive, "READ_BYTES", 4 * BUCKET_ELEMENTS)  # requests end inside buckets
        patched.setattr(shard, "SEND_BYTES", 8 * BUCKET_ELEMENTS)
        patched.setattr(channel, "connect", network.connect)
        patched.setattr(retry, "wait_any", network.wait_any)
        patched.setattr(retry, "connect_together", lambda *_: {})  # threads of its own
        patched.setattr(dense, "wait_compiled", lambda *_, **__: None)  # the same
        patched.setattr(AwayProbe, "start", lambda _: None)  # the same; who is away asks at once
        patched.setattr(channel, "_chance", SimpleNamespace(uniform=lambda _, longest: longest))
        patched.setattr(secrets, "randbits", world.random.getrandbits)
        tasks = [
            world.spawn(f"worker:{worker.rank}", partial(self._work, worker))
            for worker in self.workers
        ]
        others = []
        if plan.crashes and plan.num_workers > 1:
            others.append(world.spawn("driver", partial(self._crash, tasks[-1])))
        if plan.restarts:
            rank = world.random.randrange(plan.num_servers)
            make = partial(self._server, rank)
            self.restart = Restart(
                network, rank, make, tasks, self.lost, self._acknowledged, self._ending
            )
            others.append(world.spawn("supervisor", self.restart.run))
        world.join(*tasks, *others)
        for task in others:
            if task.error is not None:
                raise AssertionError(f"{task.name}: {task.error!r}") from task.error
        for worker, task in zip(self.workers, tasks, strict=False):
            worker.ended_by = task.error
        network.cut_rate = 0.0
        services = network.services
        reader = world.spawn("reader", partial(self._read, services))
        world.join(reader)
        if reader.error is not None:
            raise AssertionError(f"the last pull failed: {reader.error!r}") from reader.error
        self.check(services)

    def _acknowledged(self) -> list[int]:
        return [worker.acknowledged for worker in self.workers]

    def _ending(self) -> list[bool]:
        return [worker.is_ending for worker in self.workers]

    def _server(self, rank: int) -> Service:
        plan = self.plan
        settings = ServerSettings(
            rank=rank,
            num_servers=plan.num_servers,
            num_workers=plan.num_workers,
            on_lost=plan.on_lost,
        )
        return Service(settings, open_connections=int)

    @property
    def gone(self) -> int | None:
        """The server that is another one now, if there is one."""
        return self.restart.rank if self.restart and self.restart.happened else None

    @property
    def kept(self) -> list[int]:
        """The buckets whose server never was another one."""
        sizes = [4 * BUCKET_ELEMENTS] * self.plan.num_buckets
        owned = deal(sizes, self.plan.num_servers)
        return [each for rank, buckets in enumerate(owned) if rank != self.gone for each in buckets]

    # -- what workers do

    def _client(self, rank: int, role: Role = Role.WORKER) -> PSClient:
        return PSClient(
            [Endpoint("simulated", rank) for rank in range(self.plan.num_servers)],
            CREDENTIALS,
            Identity(role, rank),
            num_workers=self.plan.num_workers,
            timeout_s=self.plan.timeout_s,
        )

    def _work(self, worker: Worker) -> None:
        plan, manifest = self.plan, self.plan.manifest
        client = self._client(worker.rank)
        zeros = {"g": np.zeros(plan.num_buckets * BUCKET_ELEMENTS, np.float32)}
        if worker.rank == 0:
            client.seed(manifest, zeros)
        client.attach()
        mine = {"g": zeros["g"].copy()}
        mine["g"][worker.rank :: BUCKET_ELEMENTS] = -2.0 if plan.clips else 1.0  # HYPER is 0.5
        dice = random.Random(f"work {plan.seed} {worker.rank}")
        for step in range(plan.num_steps + (dice.randint(0, 3) if plan.restarts else 0)):
            if plan.meets and step < plan.num_steps:
                self._meet(client, worker, step)
            if plan.visits and dice.random() < 0.3:
                client.leave()
                client.join()
            if plan.refuses and dice.random() < 0.3:
                worker.refused += 1
                with contextlib.suppress(NonFiniteGradient):  # else a restore has undone its clock
                    client.push({"g": np.full_like(mine["g"], np.inf)}, hyper=HYPER, rows=1)
                self.network.note("pushed what is refused")
            if plan.exchanges:
                self._exchange(client, worker, mine, dice)
                continue
            batch = self._look_up(client, worker) if plan.has_rows else None
            worker.unknown += 1
            self._push(client, worker, mine, dice)
            worker.unknown -= 1
            worker.acknowledged += 1
            if batch is not None:
                self._push_rows(batch, worker, dice)
        worker.is_ending = True
        if plan.visits and not plan.crashes:
            client.leave()
            client.rendezvous("end", b"", timeout_s=self.plan.timeout_s)
        client.finish()

    def _meet(self, client: PSClient, worker: Worker, step: int) -> None:
        """Meet the others as at the ends of epochs: once away from the barrier, once back in it."""
        waits = self.plan.consistency != "async"
        for key in (f"end {step}", f"begin {step}"):
            if waits:
                (client.leave if key.startswith("end") else client.join)()
            own = f"{key} of {worker.rank}".encode()
            worker.met[key] = client.rendezvous(key, own, timeout_s=self.plan.timeout_s)
            self.network.note(f"met at {key}")

    def _exchange(self, client: PSClient, worker: Worker, mine: Any, dice: random.Random) -> None:
        """One step whose push takes rows along, and perhaps brings the next ones."""
        if worker.batch is None:
            worker.batch = Batch(client, worker.rank)
            client.tables.lookup_into(worker.batch.into, training=True)
        own = worker.batch.own
        assert self.gone is not None or (own == worker.rows).all(), (
            f"worker {worker.rank} pushed {worker.rows}, reads {own}"
        )
        if dice.random() < 0.1:
            client.tables.give_up({"user": worker.batch.routed})
            worker.batch = None
        following = Batch(client, worker.rank) if dice.random() < 0.7 else None
        into = {"g": np.full_like(mine["g"], np.nan)}
        has_rows = worker.batch is not None
        worker.unknown += 1
        worker.unknown_rows += has_rows
        ack = client.push_pull(
            mine,
            into,
            hyper=HYPER,
            rows=1,
            table_grads=None if worker.batch is None else worker.batch.grads,
            next_rows=None if following is None else following.into,
        )
        worker.batch = following
        worker.unknown -= 1
        worker.unknown_rows -= has_rows
        worker.rows += has_rows
        self.network.note(f"pushed, clock {ack.clock}, rows {has_rows}")
        worker.clocks.append(ack.clock)
        self._check_read(worker, into["g"].reshape(-1, BUCKET_ELEMENTS))
        worker.acknowledged += 1

    def _look_up(self, client: PSClient, worker: Worker) -> TrainingBatch:
        """In hybrid with one permit this waits for ever if an earlier one was lost on the way."""
        batch = client.tables.batch({"user": ids_of(worker.rank)})
        seen = batch.rows["user"]
        assert self.gone is not None or seen.min() >= worker.rows, (
            f"worker {worker.rank} pushed {worker.rows}, reads {seen}"
        )
        return batch

    def _push_rows(self, batch: TrainingBatch, worker: Worker, dice: random.Random) -> None:
        if dice.random() < 0.1:
            batch.close()
            return
        worker.unknown_rows += 1
        batch.push({"user": ones(ids_of(worker.rank))}, hyper=HYPER)
        worker.unknown_rows -= 1
        worker.rows += 1
        self.network.note("pushed rows")

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
        assert (buckets[:, worker.rank] <= done).all(), f"pushed {done} times, reads {buckets}"
        buckets = buckets[self.kept]
        own = buckets[:, worker.rank]
        assert (own == done).all(), f"worker {worker.rank} pushed {done} times and reads {own}"
        if plan.visits or plan.crashes or plan.restarts or plan.refuses:
            return
        others = buckets[:, : plan.num_workers]
        if plan.manifest.has_barrier:
            assert (others >= done).all(), f"after barrier {done} somebody reads {others}"
        if plan.consistency == "ssp":
            assert (others >= done - plan.bound).all(), f"at clock {done}, bound broken: {others}"

    def _crash(self, victim: Task) -> None:
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
        for served in self.network.services:
            world.maybe_switch()
            served.worker_lost(rank, 0)  # type: ignore[arg-type]

    def _read(self, services: Sequence[Service]) -> None:
        if services[0].life.shard is None:
            return  # the chief died before it had seeded them
        client = self._client(0, Role.DRIVER)
        client.attach()
        self.values = np.empty(self.plan.num_buckets * BUCKET_ELEMENTS, np.float32)
        client.pull({"g": self.values})
        if self.plan.has_rows:
            for worker in self.workers:
                worker.seen = client.tables.lookup({"user": ids_of(worker.rank)})["user"]
            self.shared = client.tables.lookup({"user": SHARED_IDS})["user"]

    # -- what must hold at the end

    def check(self, services: Sequence[Service]) -> None:
        buckets = self.values.reshape(-1, BUCKET_ELEMENTS)
        if self.restart is not None and self.restart.happened:
            self._check_restarted(self.restart, buckets, services)
        self._check_met()
        for worker in self.workers:
            self._check_end(worker)
            if not len(buckets):
                continue
            counts = buckets[:, worker.rank]
            least, most = worker.acknowledged, worker.acknowledged + worker.unknown
            kept = counts[self.kept]
            is_whole = self.gone is None
            assert not len(kept) or kept.min() >= least, (
                f"worker {worker.rank}: {least} done, lost: {counts}"
            )
            assert counts.max() <= most, f"worker {worker.rank}: {most} sent, doubled: {counts}"
            if worker.seen is not None:
                some, all_ = worker.rows, worker.rows + worker.unknown_rows
                assert not is_whole or worker.seen.min() >= some, (
                    f"rows of {worker.rank}: {some} done, some lost"
                )
                assert worker.seen.max() <= all_, f"rows of {worker.rank}: {all_} sent, doubled"
            if is_whole or self.plan.manifest.has_barrier:
                assert worker.clocks == sorted(worker.clocks), f"clocks go back: {worker.clocks}"
            if self.plan.manifest.has_barrier:
                assert len(set(worker.clocks)) == len(worker.clocks), "two pushes in one barrier"
        if self.plan.exchanges and self.shared is not None:
            self._check_shared()
        if len(buckets):
            self._check_stats(services)

    def _check_met(self) -> None:
        """All have the same of each other; who has ended before a restart, its server forgets."""
        for key in {key for worker in self.workers for key in worker.met}:
            answers = [worker.met[key] for worker in self.workers if key in worker.met]
            brought = {rank: f"{key} of {rank}".encode() for each in answers for rank in each}
            for each in answers:
                right = brought if self.gone != 0 else {rank: brought[rank] for rank in each}
                assert each == right, f"{key}: {answers}"

    def _check_shared(self) -> None:
        """Each clock, or each push, has added up what all workers brought."""
        some = sum(worker.rows for worker in self.workers)
        all_ = some + sum(worker.unknown_rows for worker in self.workers)
        assert self.gone is not None or self.shared.min() >= some, (
            f"shared rows: {some} done, some lost: {self.shared}"
        )
        assert self.shared.max() <= all_, f"shared rows: {all_} sent, doubled: {self.shared}"

    def _check_restarted(self, restart: Restart, buckets: Any, services: Sequence[Service]) -> None:
        """What was saved is there, and what was pushed since; one push may have been under way."""
        found = np.delete(buckets, self.kept, axis=0)
        saved = restart.saved.reshape(-1, BUCKET_ELEMENTS)
        pushed = [
            worker.acknowledged - before
            for worker, before in zip(self.workers, restart.acknowledged, strict=True)
        ]
        for worker, since in zip(self.workers, pushed, strict=True):
            least = saved[:, worker.rank] + max(0, since - 1)
            counts = found[:, worker.rank]
            assert (counts >= least).all(), f"worker {worker.rank}: {least} expected, {counts} left"
        clocks = {served.life.loaded().gate.clock for served in services}
        ended = all(worker.ended_by is None for worker in self.workers)
        # What one server refuses, another applies: an update there that its worker does not count.
        if ended and len(found) and not self.plan.refuses:
            self._check_told(restart, found, services)
        is_told = ended and any(pushed) and self.plan.manifest.has_barrier
        in_step = len(clocks) == 1 or not is_told
        assert in_step, f"the servers are at clocks {clocks}"

    def _check_told(self, restart: Restart, found: Any, services: Sequence[Service]) -> None:
        """What is missing of workers that came back is told, and nothing that is there."""
        of_groups = [worker.acknowledged - found[:, worker.rank].min() for worker in self.workers]
        of_rows = [
            worker.rows - worker.seen.min() if self.plan.has_rows else 0 for worker in self.workers
        ]
        missing = [sum(pair) for pair in zip(of_groups, of_rows, strict=True)]
        # One push may lack groups and rows.
        least = list(map(max, of_groups, of_rows)) if self.plan.exchanges else missing
        of_living = [
            number for number, is_over in zip(least, restart.ending, strict=True) if not is_over
        ]
        told = services[restart.rank].life.loaded().lost_updates
        assert sum(of_living) <= told <= sum(missing), f"missing: {missing}, told: {told}"

    def _check_end(self, worker: Worker) -> None:
        error = worker.ended_by
        if error is None or worker.rank in self.lost:
            return
        plan = self.plan
        may_break = self.lost and plan.manifest.has_barrier and plan.on_lost == "fail"
        is_expected = may_break and isinstance(error, WorkerLost)
        assert is_expected, f"worker {worker.rank}: {error!r}"

    def _check_stats(self, services: Sequence[Service]) -> None:
        for served in services:
            if served.settings.rank == self.gone:
                continue  # its counters are those of another process
            counted = {each.worker: each.pushes for each in served.stats().workers}
            for worker in self.workers:
                pushes = counted.get(worker.rank, 0)
                most = worker.acknowledged + worker.unknown + worker.refused
                assert worker.acknowledged <= pushes <= most, (
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
