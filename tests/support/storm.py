"""A cluster of processes, killed, frozen and saved in any order behind a bad network; it counts.

Covers: servers, workers and proxies; what a seed makes happen; exact = told at the end.
Does not: measure what grows (tests.support.soak).

Each generation of a worker adds 1 to elements and rows of its own, so its pushes are counted per
server and per bucket. A server that goes on from a save tells how many updates that are not there
its clients have acks of. Told in all is what it had told when that save was made, and what it has
told since.

Left out, as known: in sync a second client of one worker that pushes, and a refused push between
the two rounds of a clipped one about a restart; in every mode a push that one server refuses and
another applies, which counts as lost where it was applied.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.client.slices import slice_by_server
from ps.errors import CheckpointError, PSError
from ps.manifest.manifest import Consistency, Layout, Manifest
from ps.protocol import messages
from ps.stats.server_stats import ServerStats
from rpc.auth.handshake import Credentials, Identity, Role
from rpc.client.connection import connect
from rpc.errors import RpcError
from tests.support.channel_proxy import ALL, KEEPS_BYTES, Fault, FaultProxy, Kind
from tests.support.programs.soaking_worker import Counts, Job, ids_of, pushes_together
from tests.support.ps_cluster import ADD, filled
from tests.support.ps_processes import CLUSTER_ID, SECRET, ServerProcess
from tests.support.soak import start_worker
from tests.support.tables import table, with_tables

NUM_SLOTS = 256
SIZE = 80 * NUM_SLOTS
SETTLE_S = 60.0
SAVE_S = 20.0
TICK_S = 0.01
FAULT_BYTES = 200_000
"""A fault strikes somewhere in the next so many bytes of a server's connections."""
LOOK_S = 10.0
"""For a server to say what it waits for, when something has failed."""
DIRECT_S = 3.0
"""A server that cannot be reached for so long fails a save."""
LONGEST_FREEZE_S = 1.5


@dataclass
class Generation:
    """One process of a worker's rank."""

    rank: int
    number: int
    slot: int
    counts: Counts
    process: subprocess.Popen[str]
    log: Path
    is_dead: bool = False

    @property
    def acknowledged(self) -> int:
        return sum(self.counts.acknowledged)


@dataclass(frozen=True)
class Thaw:
    """A process that is stopped, and when it goes on (monotonic seconds)."""

    pid: int
    at_s: float


class Storm:
    """One cluster and its misfortunes."""

    def __init__(
        self,
        directory: Path,
        consistency: Consistency,
        seed: int,
        *,
        num_servers: int = 3,
        num_workers: int = 3,
    ) -> None:
        self.directory, self.root = directory, directory / "saves"
        self.seed = seed
        self.dice = random.Random(f"storm {consistency} {seed}")
        self.num_servers, self.num_workers = num_servers, num_workers
        self.integrity: Literal["header", "payload"] = self.dice.choice(("header", "payload"))
        self.kinds: tuple[Kind, ...] = KEEPS_BYTES
        if self.integrity == "payload":
            self.kinds = (*ALL, "flip")
        base = with_tables(table("rows"), size=SIZE, rule=ADD, bucket_bytes=4096)
        self.manifest: Manifest = msgspec.structs.replace(
            base,
            consistency=consistency,
            reduction="sum",
            staleness_bound={"ssp": 1, "hybrid": 2}.get(consistency, 0),
        )
        self.servers: list[ServerProcess] = []
        self.proxies: list[FaultProxy] = []
        self.generations: list[Generation] = []
        self.log: list[str] = []
        self.step = 0
        self.told_at: dict[int, list[int]] = {}
        """By step: what each server had told in all when that save was begun."""
        self._faults: list[list[Fault]] = []
        self._thaws: list[Thaw] = []
        self._is_stormy = False
        self._driver: PSClient | None = None

    # -- the cluster

    def start(self) -> None:
        """Start all processes and wait until every worker pushes and a first save is there."""
        self.servers = [self._server(rank, wait=False) for rank in range(self.num_servers)]
        self.proxies = [FaultProxy(server.endpoint) for server in self.servers]
        self._faults = [[] for _ in self.proxies]
        with self._client(Role.WORKER) as chief:
            chief.seed(self.manifest, filled(self.manifest))
        self._driver = self._client(Role.DRIVER)
        self._driver.attach()
        for rank in range(self.num_workers):
            self._start_worker(rank)
        self.further(1)
        self.save()
        assert self.told_at, "the first save failed"
        self._is_stormy = True

    @property
    def driver(self) -> PSClient:
        assert self._driver is not None
        return self._driver

    def _client(self, role: Role) -> PSClient:
        return PSClient(
            [proxy.endpoint for proxy in self.proxies],
            Credentials(CLUSTER_ID, SECRET, self.integrity),
            Identity(role, 0),
            num_workers=self.num_workers,
            timeout_s=SETTLE_S,
            reconnect_s=DIRECT_S if role is Role.DRIVER else SETTLE_S,
        )

    def _server(self, rank: int, *arguments: str, wait: bool = True) -> ServerProcess:
        sizes = ("--num-servers", str(self.num_servers), "--num-workers", str(self.num_workers))
        place = ("--rank", str(rank), "--integrity", self.integrity, "--save-dir", str(self.root))
        return ServerProcess(self.directory, *place, *sizes, *arguments, wait=wait)

    def _start_worker(self, rank: int) -> None:
        slot = len(self.generations)
        number = sum(each.rank == rank for each in self.generations)
        path = self.directory / f"counts-{slot}"
        log = self.directory / f"worker-{slot}.log"
        job = Job(
            rank=rank,
            generation=number,
            num_workers=self.num_workers,
            slot=slot,
            num_slots=NUM_SLOTS,
            counts=str(path),
            endpoints=[proxy.endpoint for proxy in self.proxies],
            integrity=self.integrity,
        )
        counts = Counts(path)
        with log.open("w") as stderr:
            process = start_worker(job, stderr)
        self.generations.append(Generation(rank, number, slot, counts, process, log))

    def living(self) -> list[Generation]:
        return [each for each in self.generations if not each.is_dead]

    def _of(self, rank: int) -> Generation:
        (found,) = (each for each in self.living() if each.rank == rank)
        return found

    # -- time

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = SETTLE_S) -> None:
        """Wait for a condition while the storm goes on."""
        deadline_s = time.monotonic() + timeout_s
        pause = threading.Event()
        while not condition():
            for each in self.living():
                status = each.process.poll()
                assert status is None, (
                    f"worker {each.rank}, generation {each.number} ended with {status}: "
                    f"{each.log.read_text()}\n{self.story()}"
                )
            assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}\n{self.story()}"
            self._go_on()
            pause.wait(TICK_S)

    def wait_s(self, seconds: float) -> None:
        """Let time pass."""
        end_s = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= end_s, "time")

    def further(self, pushes: int) -> None:
        """Wait until so many pushes of every worker were acknowledged again by all servers."""
        goals = {each.slot: each.acknowledged + pushes for each in self.living()}
        self.wait(
            lambda: all(e.acknowledged >= goals[e.slot] for e in self.living()),
            f"{pushes} pushes of every worker",
        )

    def _go_on(self) -> None:
        """Continue what has been frozen for long enough; let the network fail again."""
        now_s = time.monotonic()
        for thaw in [each for each in self._thaws if each.at_s <= now_s]:
            self._thaws.remove(thaw)
            signal_to(thaw.pid, signal.SIGCONT)
        if not self._is_stormy:
            return
        for place, proxy in enumerate(self.proxies):
            if all(fault.fired.is_set() for fault in self._faults[place]):
                faults = [Fault.of(self.dice, self.kinds, FAULT_BYTES) for _ in range(4)]
                self._faults[place] = proxy.arm(*faults)

    def story(self) -> str:
        """The last events; counts of all generations."""
        counts = [
            f"worker {e.rank}.{e.number}{' (dead)' if e.is_dead else ''}: "
            f"begun {e.counts.begun}, acknowledged {e.counts.acknowledged}"
            for e in self.generations[-2 * self.num_workers :]
        ]
        mode = self.manifest.consistency
        head = f"mode {mode}, --storm-seed {self.seed}, integrity {self.integrity}, {self.kinds}"
        said = [
            f"worker {each.rank}.{each.number} said last: {line}"
            for each in self.living()
            for line in each.log.read_text().splitlines()[-3:]
        ]
        return "\n".join([head, *self.log[-30:], *counts, *said, *self._of_servers()])

    def _of_servers(self) -> Iterator[str]:
        """Say in which phase each server is, and for whom its pushes wait, past the proxies."""
        for rank, server in enumerate(self.servers):
            if (status := server.process.poll()) is not None:
                yield f"ps:{rank} ended with {status}: {server.wait()[1]}"
                continue
            try:
                credentials = Credentials(CLUSTER_ID, SECRET, self.integrity)
                with connect(server.endpoint, Identity(Role.DRIVER, 0), credentials) as asked:
                    reply = asked.call(messages.encode(messages.FetchStats()), timeout_s=LOOK_S)
                stats = messages.decode_reply(reply.payload, ServerStats)
            except (PSError, RpcError) as error:
                yield f"ps:{rank}: {type(error).__name__}: {error}"
            else:
                yield (
                    f"ps:{rank}: {stats.phase} for {stats.uptime_s:.0f} s, clock {stats.clock}, "
                    f"from step {stats.restored_step}, waits for {stats.missing}, {stats.waiting} "
                    f"waiting, workers {stats.workers}"
                )

    # -- what happens

    def misfortune(self) -> None:
        """One event, and some time for what it meets."""
        kinds: dict[Callable[[], None], int] = {
            self.kill_worker: 3,
            self.kill_server: 4,
            self.kill_two_servers: 1,
            self.freeze_worker: 2,
            self.freeze_server: 2,
            self.replace_frozen_worker: 1,
            self.save: 5,
            self.kill_server_in_a_save: 2,
        }
        event = self.dice.choices(list(kinds), list(kinds.values()))[0]
        self.log.append(event.__name__)
        event()
        if self.dice.random() < 0.5:
            self.wait_s(self.dice.choice((0.0, 0.02, 0.3)))
        else:
            self.further(self.dice.choice((1, 3, 20)))

    def kill_worker(self) -> None:
        if len(self.generations) == NUM_SLOTS:
            return
        victim = self._of(self.dice.randrange(self.num_workers))
        victim.process.kill()
        victim.process.wait(10.0)
        victim.is_dead = True
        self._start_worker(victim.rank)

    def replace_frozen_worker(self) -> None:
        """Freeze one, let another take its place, and continue the first: it is fenced."""
        if len(self.generations) == NUM_SLOTS:
            return
        old = self._of(self.dice.randrange(self.num_workers))
        signal_to(old.process.pid, signal.SIGSTOP)
        old.is_dead = True
        self._start_worker(old.rank)
        self.further(1)
        before = old.counts.acknowledged
        signal_to(old.process.pid, signal.SIGCONT)
        self.wait(lambda: old.process.poll() is not None, "the end of a replaced worker")
        assert "StaleGeneration" in old.log.read_text(), old.log.read_text()
        late = np.subtract(old.counts.acknowledged, before)
        late = late.max() if pushes_together(old.slot) else late.sum()
        assert late <= 1, f"{late} pushes of a replaced worker\n{self.story()}"

    def freeze_worker(self) -> None:
        self._freeze(self._of(self.dice.randrange(self.num_workers)).process.pid)

    def freeze_server(self) -> None:
        self._freeze(self.dice.choice(self.servers).process.pid)

    def _freeze(self, pid: int) -> None:
        signal_to(pid, signal.SIGSTOP)
        lasts_s = self.dice.uniform(0.0, LONGEST_FREEZE_S)
        self._thaws.append(Thaw(pid, time.monotonic() + lasts_s))

    def kill_server(self) -> None:
        self._restart(self._kill(self.dice.randrange(self.num_servers)))

    def kill_two_servers(self) -> None:
        ranks = self.dice.sample(range(self.num_servers), 2)
        for rank in ranks:
            self._kill(rank)
        for rank in ranks:
            self._restart(rank)

    def _kill(self, rank: int) -> int:
        dead = self.servers[rank]
        self._thaws = [each for each in self._thaws if each.pid != dead.process.pid]
        dead.send(signal.SIGKILL)
        dead.close()
        return rank

    def _restart(self, rank: int) -> None:
        port = str(self.servers[rank].endpoint.port)
        self.servers[rank] = self._server(rank, "--port", port, "--restore", str(self.root))

    def save(self) -> None:
        """Save, once all workers have been heard by all servers, so that what is told stands."""
        thread, _ = self._begin_save()
        self.wait(lambda: not thread.is_alive(), "a save", 2 * SAVE_S)

    def kill_server_in_a_save(self) -> None:
        thread, step = self._begin_save()
        self.wait_s(self.dice.uniform(0.0, 0.15))
        rank = self._kill(self.dice.randrange(self.num_servers))
        self.wait(lambda: not thread.is_alive(), f"save {step}, whose server was killed", SETTLE_S)
        self._restart(rank)

    def _begin_save(self) -> tuple[threading.Thread, int]:
        self.further(2)
        self.step += 1
        self.told_at[self.step] = self.told()
        thread = threading.Thread(target=self._save, args=(self.step,), daemon=True)
        thread.start()
        return thread, self.step

    def _save(self, step: int) -> None:
        options = SaveOptions(keep=2, full_every=3)
        try:
            self.driver.save(self.root, step, options=options, timeout_s=SAVE_S)
        except CheckpointError as error:
            self.log.append(f"save {step}: {error}")
        except PSError as error:
            self.log.append(f"save {step}: {type(error).__name__}: {error}")

    # -- what is counted

    def told(self) -> list[int]:
        """Return, per server, how many lost updates all its processes have told."""
        told = []
        for server, stats in enumerate(self.driver.stats()):
            before = self.told_at[stats.restored_step][server] if stats.restored_step >= 0 else 0
            told.append(before + stats.lost_updates)
        return told

    def end(self) -> None:
        """Let the weather clear, stop the workers, and compare what is there with what was told."""
        self._is_stormy = False
        for proxy in self.proxies:
            proxy.arm()
        self.further(3)
        for each in self.living():
            each.counts.stop()
        for each in self.living():
            assert each.process.wait(SETTLE_S) == 0, f"{each.log.read_text()}\n{self.story()}"
        told, found = self.told(), self._found()
        for server in range(self.num_servers):
            self._check(server, told[server], found[server])

    def _check(self, server: int, told: int, found: list[list[tuple[int, int]]]) -> None:
        """Compare one server's values with the acks.

        Args:
            server: its rank.
            told: updates that it has told as lost.
            found: per generation, the least and the most that one of its elements holds, and its
                rows.
        """
        missing = missing_in_all = 0
        for each in self.generations:
            begun, acknowledged = each.counts.begun, each.counts.acknowledged
            for kind in range(2):
                least, most = found[each.slot][kind]
                text = f"ps:{server}, worker {each.rank}.{each.number}: {least} to {most}"
                assert most <= begun[kind], f"{text} of {begun}: applied twice\n{self.story()}"
            kinds = [least for least, _ in found[each.slot]]
            if pushes_together(each.slot):
                kinds = [min(kinds)]
            for kind, least in enumerate(kinds):
                missing_in_all += begun[kind] - least
                if not each.is_dead:
                    missing += acknowledged[kind] - least
        assert missing <= told <= missing_in_all, (
            f"ps:{server}: {missing} updates of living workers are missing, of all at most "
            f"{missing_in_all}, told: {told}\n{self.story()}"
        )

    def _found(self) -> list[list[list[tuple[int, int]]]]:
        """Return [server][slot][dense, rows] the least and the most of what they hold."""
        values = filled(self.manifest)
        self.driver.pull(values)
        dense = values["trainable"]
        owned = []
        for pieces in slice_by_server(Layout.of(self.manifest), self.num_servers):
            ranges = [np.arange(piece.start, piece.stop) for piece in pieces]
            owned.append(np.concatenate(ranges))
        found: list[list[list[tuple[int, int]]]] = [[] for _ in owned]
        for each in self.generations:
            routed = self.driver.tables.route({"rows": ids_of(each.slot)})["rows"]
            for server, elements in enumerate(owned):
                ids = routed.unique[routed.own(server)]
                rows = self.driver.tables.lookup({"rows": ids})["rows"]
                own = dense[elements[elements % NUM_SLOTS == each.slot]]
                found[server].append([_extremes(own), _extremes(rows)])
        return found

    def close(self) -> None:
        """End everything."""
        for each in self.generations:
            signal_to(each.process.pid, signal.SIGCONT)
            each.process.kill()
            each.process.wait(10.0)
            each.counts.close()
        if self._driver is not None:
            self._driver.close()
        for server in self.servers:
            server.close()
        for proxy in self.proxies:
            proxy.close()


def _extremes(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> tuple[int, int]:
    return int(values.min()), int(values.max())


def signal_to(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended; nobody else can have waited for it."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
