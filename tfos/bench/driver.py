"""What does a node cost the driver while it trains, and does that grow with their number?

Figures: driver.
Method: a real control server and its coordinator in this process, as a driver has them; simulated
    nodes in another process, each with a certificate, a connection and a stream of orders of its
    own. All register, then each sends a heartbeat every 2 s, as real ones do, through a forwarder
    that counts the bytes of both directions, keep-alive included. Bytes and this process's CPU
    seconds per heartbeat; the reference is the smallest cluster.
Caveats: lines of a node's output and its reports come on top. The driver has a thread per node.
    A machine that is too slow for all heartbeats in 2 s sends them as fast as it can.
Bar: bytes per heartbeat at most 1.1 of those in the smallest cluster.
Last result: docs/architecture/performance-notes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import threading
import time
from collections.abc import Iterator
from typing import Any

from ps.errors import PSError
from rpc.auth.certificates import TlsCredentials
from tfos.bench.harness import Bench, Figure
from tfos.config import ClusterConfig
from tfos.console.console import Console
from tfos.control import messages
from tfos.control.authority import ClusterAuthority
from tfos.control.client import ControlClient
from tfos.control.coordinator import Coordinator
from tfos.failure import NodeId
from tfos.topology import plan

HOST = "127.0.0.1"
CLUSTER_ID = "bench"
COUNTS = (10, 100, 1000)
PERIOD_S = 2.0
ROUNDS = 5
"""Heartbeats of each node that are counted together, after as many uncounted ones: a connection's
first calls carry names that later ones only refer to."""
REPEATS = 3
WAIT_S = 300.0
CHUNK_BYTES = 1 << 16
"""Most that the forwarder reads at once."""
Node = tuple[str, TlsCredentials]


class Forwarder:
    """Passes connections on to a port and counts the bytes of both directions."""

    def __init__(self, port: int) -> None:
        self.num_bytes = 0
        self._to = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        listening = asyncio.start_server(self._serve, HOST, 0, backlog=1024)
        server = asyncio.run_coroutine_threadsafe(listening, self._loop).result(WAIT_S)
        self.port: int = server.sockets[0].getsockname()[1]

    async def _serve(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, onward = await asyncio.open_connection(HOST, self._to)
        await asyncio.gather(self._pass(near, onward), self._pass(far, back))

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                self.num_bytes += len(data)
                sink.write(data)
                await sink.drain()
        sink.close()


def simulate(port: int, nodes: list[Node], orders: Any) -> None:
    """Be all nodes, in a separate process; answers each (rounds, period) with the bytes.

    Args:
        port: port of the control server.
        nodes: the nodes with their certificates.
        orders: pipe to the measuring process.
    """
    forwarder = Forwarder(port)
    address = f"{HOST}:{forwarder.port}"
    clients = []
    for index, (_, credentials) in enumerate(nodes):
        node = NodeId("worker", index)
        client = ControlClient(address, CLUSTER_ID, node, credentials)
        client.register(messages.Register(node, str(index), HOST, 1000 + index))
        client.orders(lambda _: None, lambda _: None)
        clients.append(client)
    orders.send(0)
    seq = 0
    while True:
        rounds, period_s = orders.recv()
        before = forwarder.num_bytes
        for _ in range(rounds):
            seq += 1
            next_s = time.monotonic() + period_s
            for client in clients:
                client.heartbeat(_heartbeat(client.node, seq), timeout_s=WAIT_S)
            time.sleep(max(0.0, next_s - time.monotonic()))
        orders.send(forwarder.num_bytes - before)


def _heartbeat(node: NodeId, seq: int) -> messages.Heartbeat:
    """Return one as a training worker sends it."""
    progress = {"steps": float(seq), "rows": 128.0 * seq, "loss": 0.25, "steps_per_s": 20.0}
    feed = messages.FeedSnapshot("input", fed_rows=128 * seq, taken_rows=128 * seq)
    return messages.Heartbeat(node, seq, "main_fun", 4242, 1 << 30, progress, (feed,))


@contextlib.contextmanager
def simulated(num_nodes: int) -> Iterator[Any]:
    """Start a driver's control plane and the nodes; yields the pipe to them."""
    authority = ClusterAuthority(CLUSTER_ID)
    patient = ClusterConfig(hang_s=WAIT_S, lease_s=WAIT_S, reconnect_s=WAIT_S, verbose=False)
    nodes_of = plan(num_nodes, 0)
    nodes = [(node.name, authority.node(node.name)) for node in nodes_of.nodes]
    coordinator = Coordinator(nodes_of, patient, Console(enabled=False))
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process: Any = None
    try:
        port = coordinator.start(HOST, authority.driver())
        process = spawn.Process(target=simulate, args=(port, nodes, theirs), daemon=True)
        process.start()
        theirs.close()  # so that its end is seen here
        _answer(ours)
        yield ours
    finally:
        if process is not None:
            process.kill()
            process.join()
        coordinator.close()


def _answer(pipe: Any) -> int:
    if not pipe.poll(WAIT_S):
        raise PSError(f"the simulated nodes did not answer within {WAIT_S:.0f} s")
    try:
        answer: int = pipe.recv()
    except EOFError:
        raise PSError("the simulated nodes have ended; their own message is above") from None
    return answer


def beats(pipe: Any, num_nodes: int, rounds: int, period_s: float) -> tuple[float, float]:
    """Let all nodes send this many; returns bytes and CPU milliseconds of this process per beat.

    Args:
        pipe: pipe to the process that is all nodes.
        num_nodes: number of nodes that send.
        rounds: heartbeats of each node.
        period_s: seconds between two of a node.
    """
    begun_s = time.process_time()
    pipe.send((rounds, period_s))
    count = rounds * num_nodes
    num_bytes = _answer(pipe)
    return num_bytes / count, (time.process_time() - begun_s) * 1e3 / count


def run(bench: Bench) -> None:
    """Measure what a heartbeat costs in clusters of several sizes."""
    counts, period_s = ((2, 4), 0.0) if bench.toy else (COUNTS, PERIOD_S)
    reference: tuple[list[float], list[float]] = ([], [])
    for num_nodes in counts:
        with simulated(num_nodes) as pipe:
            beats(pipe, num_nodes, ROUNDS, period_s)
            repeats = bench.repeats(REPEATS)
            pairs = [beats(pipe, num_nodes, ROUNDS, period_s) for _ in range(repeats)]
        found = [each for each, _ in pairs], [each for _, each in pairs]
        smallest = f"{counts[0]} nodes"
        for what, unit, values, beside in (
            ("bytes", "bytes", found[0], reference[0]),
            ("CPU of the driver", "ms", found[1], reference[1]),
        ):
            figure = Figure("driver", f"{what} per heartbeat, {num_nodes} nodes", unit, "lower")
            bench.report(figure, values, beside, smallest)
        reference = reference if reference[0] else found
