"""Two servers and some workers that go on while they are killed and replaced, and who counts."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
import psutil

from ps.client.client import PSClient
from ps.client.saving.saver import SaveOptions
from ps.client.slices import slice_by_server
from ps.manifest.manifest import Layout
from rpc.auth.handshake import Identity, Role
from rpc.endpoint import Endpoint
from tests.support.programs.soaking_worker import Counts, Job, ids_of, pushes_together
from tests.support.ps_cluster import ADD, filled
from tests.support.ps_processes import CREDENTIALS, SECRET, ServerProcess
from tests.support.snapshot_skew import torn_by
from tests.support.tables import table, with_tables
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SIZE = 30_000
SETTLE_S = 60.0
KILLED_SERVER = 1
MANIFEST = with_tables(table("rows"), size=SIZE, rule=ADD, bucket_bytes=4096)


def start_worker(job: Job, stderr: IO[str] | None = None) -> subprocess.Popen[str]:
    """Start a worker process; its errors go to `stderr`, or to this process's."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.programs.soaking_worker"],
        stdin=subprocess.PIPE,
        stderr=stderr,
        text=True,
        cwd=ROOT,
    )
    assert process.stdin is not None
    process.stdin.write(f"{SECRET.decode()}\n{msgspec.json.encode(job).decode()}\n")
    process.stdin.close()
    return process


@dataclass
class SoakingWorker:
    """All generations of one rank."""

    rank: int
    num_workers: int
    directory: Path
    endpoints: list[Endpoint]
    counts: list[Counts] = field(default_factory=list)

    def start(self) -> None:
        generation = len(self.counts)
        path = self.directory / f"counts-{self.rank}-{generation}"
        self.counts.append(Counts(path))
        self.process = start_worker(
            Job(
                rank=self.rank,
                generation=generation,
                num_workers=self.num_workers,
                slot=self.rank,
                num_slots=self.num_workers,
                counts=str(path),
                endpoints=self.endpoints,
            )
        )

    @property
    def acknowledged(self) -> int:
        """Of the generation that is at work, dense and table pushes together."""
        assert self.process.poll() is None, f"worker {self.rank} ended by itself"
        return sum(self.counts[-1].acknowledged)

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (acknowledged, begun), each of dense and table pushes, of all generations."""
        return (
            np.sum([each.acknowledged for each in self.counts], axis=0),
            np.sum([each.begun for each in self.counts], axis=0),
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10.0)

    def stop(self) -> None:
        self.counts[-1].stop()
        assert self.process.wait(SETTLE_S) == 0

    def close(self) -> None:
        self.kill()
        for each in self.counts:
            each.close()


class Soak:
    """The cluster: server 1 and all workers but the first may be killed."""

    def __init__(self, directory: Path, num_workers: int) -> None:
        self.num_workers = num_workers
        self.directory, self.root = directory, directory / "saves"
        self.servers: list[ServerProcess] = []
        self.workers: list[SoakingWorker] = []
        self.steps = 0
        self.lost = 0
        self.torn = 0
        self.driver: PSClient | None = None

    def start(self) -> None:
        self.servers = [self._server(rank, "--unix", wait=False) for rank in range(2)]
        told = [server.announced for server in self.servers]
        # The first keeps its Unix socket and is reached through shared memory.
        endpoints = [
            Endpoint(each["host"], each["port"], each["unix_path"], each["boot_id"])
            for each in told[:1]
        ]
        endpoints += [server.endpoint for server in self.servers[1:]]
        self.driver = PSClient(
            endpoints,
            CREDENTIALS,
            Identity(Role.WORKER, 0),
            num_workers=self.num_workers,
            timeout_s=SETTLE_S,
            reconnect_s=SETTLE_S,
        )
        self.driver.seed(MANIFEST, filled(MANIFEST))
        self.workers = [
            SoakingWorker(rank, self.num_workers, self.directory, endpoints)
            for rank in range(self.num_workers)
        ]
        for worker in self.workers:
            worker.start()

    def _server(self, rank: int, *arguments: str, wait: bool = True) -> ServerProcess:
        place = ("--rank", str(rank), "--num-servers", "2", "--num-workers", str(self.num_workers))
        return ServerProcess(self.directory, *place, *arguments, wait=wait)

    @property
    def saver(self) -> PSClient:
        assert self.driver is not None
        return self.driver

    def further(self, pushes: int) -> None:
        """Wait until so many pushes of every worker were acknowledged again."""
        goals = [worker.acknowledged + pushes for worker in self.workers]
        wait_until(
            lambda: all(w.acknowledged >= g for w, g in zip(self.workers, goals, strict=True)),
            f"{pushes} pushes of every worker",
            timeout_s=SETTLE_S,
        )

    def save(self) -> None:
        self.steps += 1
        options = SaveOptions(keep=2, full_every=3)
        self.saver.save(self.root, self.steps, options=options, timeout_s=SETTLE_S)

    def kill_worker(self, rank: int) -> None:
        """Kill one and start its next; a save: what a server loses then is of the living."""
        self.workers[rank].kill()
        self.workers[rank].start()
        self.further(10)
        self.save()

    def kill_server(self) -> None:
        """Kill server 1 some time after a save and start it again from there."""
        self.further(10)
        dead = self.servers[KILLED_SERVER]
        dead.send(signal.SIGKILL)
        dead.close()
        port = ("--port", str(dead.endpoint.port))
        self.servers[KILLED_SERVER] = self._server(
            KILLED_SERVER, *port, "--restore", str(self.root)
        )
        self.further(10)  # all are back, so all of the loss is known
        stats = self.saver.stats()[KILLED_SERVER]
        assert stats.restored_step == self.steps
        self.lost += stats.lost_updates
        self.torn += torn_by(self.root, self.steps, KILLED_SERVER)
        self.save()

    def held(self) -> tuple[tuple[int, int], ...]:
        """Return (descriptors, threads) of what is never killed: server 0 and worker 0."""
        return tuple((each.num_fds(), each.num_threads()) for each in self.survivors())

    def resident(self) -> tuple[int, ...]:
        """Return the resident bytes of the same, without what they share: rings fill but once."""
        found = [each.memory_info() for each in self.survivors()]
        return tuple(each.rss - each.shared for each in found)

    def survivors(self) -> tuple[psutil.Process, psutil.Process]:
        pids = self.servers[0].process.pid, self.workers[0].process.pid
        return psutil.Process(pids[0]), psutil.Process(pids[1])

    def check_counters(self) -> None:
        """Stop the workers and compare what the servers hold with what was acknowledged."""
        for worker in self.workers:
            worker.stop()
        all_acknowledged = all_begun = least = most = 0
        for worker in self.workers:
            acknowledged, begun = worker.totals()
            assert all(begun - acknowledged <= len(worker.counts) - 1)
            found = self._found(worker.rank)
            for number in range(2):  # dense, table
                on_first = found[0][number]
                assert acknowledged[number] <= on_first.min()
                assert on_first.max() <= begun[number]
            fewest, all_of = (min, max) if pushes_together(worker.rank) else (sum, sum)
            all_acknowledged += all_of(acknowledged.tolist())
            all_begun += all_of(begun.tolist())
            least += fewest(int(each.min()) for each in found[1])
            most += all_of(int(each.max()) for each in found[1])
        assert all_acknowledged - self.lost <= least
        assert most <= all_begun - self.lost + self.torn

    def _found(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return, per server, the elements and the rows that only this rank pushes to."""
        values = filled(MANIFEST)
        self.saver.pull(values)
        mine = np.arange(SIZE) % self.num_workers == rank
        routed = self.saver.tables.route({"rows": ids_of(rank)})["rows"]
        found = []
        for server, pieces in enumerate(slice_by_server(Layout.of(MANIFEST), 2)):
            own = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
            ids = routed.unique[routed.own(server)]
            rows = self.saver.tables.lookup({"rows": ids})["rows"]
            found.append((values["trainable"][own[mine[own]]], rows))
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        if self.driver is not None:
            self.driver.close()
        for server in self.servers:
            server.close()
