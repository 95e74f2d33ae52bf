"""Do many idle connections slow the active ones, and how fast do many clients come in?

Figures: LOAD, SHAKE.
Method: LOAD: one server process; 16 clients, a thread each, pull 4 KiB over loopback TCP, one call
    after the other; the 99th percentile of all their calls, alone and beside 256 idle connections,
    in turns. SHAKE: from the first of 256 connections to the last one's proof, 16 threads
    connecting, without and with TLS.
Caveats: the 16 clients share this process and its interpreter, so both percentiles are mostly the
    wait for it; what is compared is the difference.
Bars: LOAD at most 1.5 times as long as alone, or 5 ms longer; SHAKE at most 2 s without TLS.
Last result: docs/architecture/performance-notes.md.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ps.client.client import PSClient
from ps.manifest.manifest import Add
from rpc.auth.handshake import Identity, Role
from rpc.client.connection import Connection, connect
from tfos.bench.dense import GROUP, manifest
from tfos.bench.harness import Bench, Figure, timed
from tfos.bench.servers import BenchServers, Protection, server_group

NUM_IDLE, NUM_ACTIVE = 256, 16
CALLS_EACH = 400
REPEATS = 5
NUM_ELEMENTS = 1024
CONNECT_TIMEOUT_S = 30.0
FIRST_IDLE_RANK = 1000


def p99_ms(pool: ThreadPoolExecutor, clients: Sequence[PSClient], calls_each: int) -> float:
    """Return the 99th percentile of all calls of all clients.

    Args:
        pool: a thread per client.
        clients: attached.
        calls_each: calls of each client.
    """

    def pull(client: PSClient) -> list[float]:
        into = {GROUP: np.zeros(NUM_ELEMENTS, np.float32)}
        return [timed(lambda: client.pull(into)) for _ in range(calls_each)]

    seconds = sorted(each for one in pool.map(pull, clients) for each in one)
    return seconds[math.ceil(0.99 * len(seconds)) - 1] * 1e3


def connected(pool: ThreadPoolExecutor, group: BenchServers, count: int) -> list[Connection]:
    """Return this many connections that carry no calls.

    Args:
        pool: threads that connect.
        group: the server.
        count: number of connections.
    """

    def come(index: int) -> Connection:
        identity = Identity(Role.WORKER, FIRST_IDLE_RANK + index)
        return connect(group.endpoints[0], identity, group.credentials, timeout_s=CONNECT_TIMEOUT_S)

    return list(pool.map(come, range(count)))


def beside_idle(bench: Bench, num_idle: int, num_active: int) -> None:
    """LOAD.

    Args:
        bench: takes the figures.
        num_idle: connections without calls.
        num_active: clients that call.
    """
    calls_each = 20 if bench.toy else CALLS_EACH
    values = np.zeros(NUM_ELEMENTS, np.float32)
    alone, beside = [], []
    with (
        server_group(num_workers=num_active) as group,
        ThreadPoolExecutor(num_active) as pool,
        contextlib.ExitStack() as open_clients,
    ):
        clients = [open_clients.enter_context(group.client(rank)) for rank in range(num_active)]
        clients[0].seed(manifest(Add(), NUM_ELEMENTS), {GROUP: values})
        for client in clients:
            client.attach()
        p99_ms(pool, clients, calls_each)  # what is made once is there afterwards
        for _ in range(bench.repeats(REPEATS)):
            alone.append(p99_ms(pool, clients, calls_each))
            idle = connected(pool, group, num_idle)
            beside.append(p99_ms(pool, clients, calls_each))
            for connection in idle:
                connection.close()
    name = f"pull of 4 KiB, 99th percentile, {num_active} connections beside {num_idle} idle ones"
    figure = Figure("LOAD", name, "ms", "lower")
    bench.report(figure, beside, alone, f"the {num_active} alone")


def handshakes(bench: Bench, count: int, num_threads: int, protection: Protection) -> None:
    """SHAKE.

    Args:
        bench: takes the figures.
        count: number of connections.
        num_threads: threads that connect at once.
        protection: protection of the connections.
    """
    seconds = []
    with (
        server_group(protection=protection) as group,
        ThreadPoolExecutor(num_threads) as pool,
    ):
        for _ in range(bench.repeats(REPEATS)):
            begun_s = time.perf_counter()
            made = connected(pool, group, count)
            seconds.append(time.perf_counter() - begun_s)
            for connection in made:
                connection.close()
    how = "TLS and the proof" if protection == "tls" else "the proof"
    bench.report(Figure("SHAKE", f"{count} handshakes, {how}", "s", "lower"), seconds)


def run(bench: Bench) -> None:
    """Measure LOAD and SHAKE."""
    num_idle, num_active = (8, 2) if bench.toy else (NUM_IDLE, NUM_ACTIVE)
    beside_idle(bench, num_idle, num_active)
    for protection in ("header", "tls"):
        handshakes(bench, num_idle, num_active, protection)
