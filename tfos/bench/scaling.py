"""Do more workers and servers cost a step anything?

Figures: P17, and what a step moves (steps).
Method P17: 1 MB of parameters (SGD) on one server process, each worker a process of its own that
    repeats sleep(0.05) and push_pull over TCP, asynchronous and synchronous. Steps a second of all
    workers together, from a common start to the own end of each. Ideal is the number of workers x
    what one alone makes in the same run; both take turns. 2 and 4 workers explain.
Method of steps: the servers' own counters around the steps of 1, 2 and 4 servers and workers:
    requests and payload bytes, both ways, per step of one worker.
Caveats: all processes share this machine's cores; `cores` in the line says how many there are.
Bars: asynchronous at least 0.95 of ideal with 8 workers, synchronous at least 0.90. A step is one
    request per server, and as many bytes for any number of servers and workers.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ps.errors import PSError
from ps.manifest.manifest import SGD, GroupSpec, Hyper, Manifest, ParamSpec
from ps.stats.server_stats import ServerStats
from rpc.auth.handshake import Role
from tfos.bench.harness import Bench, Figure
from tfos.bench.servers import BenchServers, server_group

GROUP = "trainable"
NUM_TENSORS = 8
COMPUTE_S = 0.05
MOST_WORKERS = 8
REPEATS = 5
STEPS = 60
WAIT_S = 120.0
SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (4, 4))
Mode = Literal["async", "sync"]


@dataclass(frozen=True)
class Work:
    """What every worker of one run does."""

    mode: Mode
    num_workers: int
    num_elements: int
    steps: int
    compute_s: float

    def manifest(self) -> Manifest:
        """Equal tensors in one group."""
        shape = (self.num_elements // NUM_TENSORS,)
        params = tuple(ParamSpec(f"tensor_{index}", shape) for index in range(NUM_TENSORS))
        group = GroupSpec(name=GROUP, dtype="float32", rule=SGD(), params=params)
        return Manifest(groups=(group,), consistency=self.mode)


def train(group: BenchServers, work: Work, rank: int, answers: Any) -> None:
    """Run one worker, in a process of its own; tells how long its steps took.

    Args:
        group: the servers.
        work: mode, sizes and steps.
        rank: the worker's rank.
        answers: queue for its seconds.
    """
    gradient = {GROUP: np.full(work.num_elements, 1e-3, np.float32)}
    values = {GROUP: np.zeros(work.num_elements, np.float32)}
    with group.client(rank) as client:
        if rank == 0:
            client.seed(work.manifest(), values)
        client.attach()
        client.pull(values)  # connected
        client.rendezvous("start", b"", timeout_s=WAIT_S)
        begun = time.perf_counter()
        for _ in range(work.steps):
            time.sleep(work.compute_s)
            client.push_pull(gradient, values, hyper=Hyper(1e-3), rows=1)
        took_s = time.perf_counter() - begun
        client.rendezvous("end", b"", timeout_s=WAIT_S)
        answers.put((rank, took_s))
        client.finish()


def trained(work: Work, num_servers: int = 1) -> tuple[float, list[ServerStats]]:
    """Return steps a second of all workers together, and the servers' counters.

    Args:
        work: mode, sizes and steps.
        num_servers: servers that share the parameters.
    """
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with server_group(num_servers=num_servers, num_workers=work.num_workers) as group:
        workers = [
            spawn.Process(target=train, args=(group, work, rank, answers), daemon=True)
            for rank in range(work.num_workers)
        ]
        for worker in workers:
            worker.start()
        try:
            seconds = [_seconds(answers) for _ in workers]
            for worker in workers:
                worker.join(WAIT_S)
            if any(worker.exitcode for worker in workers):
                raise PSError(f"workers ended with {[worker.exitcode for worker in workers]}")
            with group.client(role=Role.DRIVER) as client:
                stats = client.stats()
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return sum(work.steps / value for value in seconds), stats


def _seconds(answers: Any) -> float:
    try:
        took_s: float = answers.get(timeout=WAIT_S)[1]
    except queue.Empty:
        raise PSError(
            f"a worker did not answer within {WAIT_S:.0f} s; its own message is above"
        ) from None
    return took_s


def weak_scaling(bench: Bench, mode: Mode, num_elements: int, steps: int) -> None:
    """Report P17 in one mode.

    Args:
        bench: takes the figures.
        mode: the manifest's mode.
        num_elements: float32 parameters.
        steps: steps of each worker.
    """

    def rate(num_workers: int) -> float:
        return trained(Work(mode, num_workers, num_elements, steps, COMPUTE_S))[0]

    counts = (1, 2) if bench.toy else (1, 2, 4, MOST_WORKERS)
    rates: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(bench.repeats(REPEATS)):
        for count in counts:
            rates[count].append(rate(count))
    for count in counts[1:]:
        ident = "P17" if count == counts[-1] else "scaling"
        name = f"{count} {mode} workers, 1 MB of parameters, 50 ms of compute"
        ideal = [count * value for value in rates[1]]
        figure = Figure(ident, name, "steps/s", "higher")
        bench.report(figure, rates[count], ideal, f"{count} x one worker alone")


def per_step(bench: Bench, num_elements: int, steps: int) -> None:
    """Report what a step moves.

    Args:
        bench: takes the figures.
        num_elements: float32 parameters.
        steps: steps of each worker.
    """
    sizes = SIZES[1:2] if bench.toy else SIZES
    for num_servers, num_workers in sizes:
        found = []
        for count in (0, steps):
            work = Work("async", num_workers, num_elements, count, 0.0)
            found.append(trained(work, num_servers)[1])
        own_steps = steps * num_workers
        requests, moved = (
            (_sum(found[1], *names) - _sum(found[0], *names)) / own_steps
            for names in (("calls",), ("bytes_in", "bytes_out"))
        )
        what = f"{num_servers} servers, {num_workers} workers"
        figure = Figure("steps", f"requests per step, {what}", "requests", "lower")
        bench.report(figure, [requests])
        figure = Figure("steps", f"bytes per step, {what}", "bytes", "lower")
        values = [8.0 * num_elements]
        bench.report(figure, [moved], values, "a gradient there, values back")


def _sum(stats: list[ServerStats], *names: str) -> float:
    return float(sum(getattr(each, name) for each in stats for name in names))


def run(bench: Bench) -> None:
    """Measure P17 and what a step moves."""
    num_elements = 1024 if bench.toy else 250_000
    steps = 2 if bench.toy else STEPS
    weak_scaling(bench, "async", num_elements, steps)
    if not bench.toy:
        weak_scaling(bench, "sync", num_elements, steps)
    per_step(bench, num_elements, steps)
