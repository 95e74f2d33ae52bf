"""How fast is an all-reduce of 64 MB, beside plain sockets and TensorFlow's own?

Figures: P26 for 2 and 4 processes, against two references.
Method: ranks of `tfos.Runner(np=-n)`, processes of this host. Each round all ranks reduce 64 MB of
    float32 by `tfos.runner.allreduce`, then send and receive the bytes of a ring all-reduce over
    TCP on loopback without summing (reference/socket_ring.py), then reduce by
    MultiWorkerMirroredStrategy (reference/mirrored_allreduce.py); a barrier before each, and the
    slowest rank's time. GB/s are bytes of the array by seconds.
Caveats: all processes share the cores, so 4 of them on 2 cores wait for each other on every side.
    Ours takes shared memory between processes of one host; the sum is inside our time.
Bars: 0.7 of the sockets, 1.5 of TensorFlow's.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.benchmarks.harness import Figure, parse_arguments, report
from scripts.benchmarks.reference.mirrored_allreduce import mirrored_allreduce
from scripts.benchmarks.reference.socket_ring import SocketRing
from tfos import runner
from tfos.bench.reference.tensorflow_ps import free_port
from tfos.runner.local_run import run_local

MB = 64
REFERENCES = {
    "socket": "a ring over plain TCP sockets, without sums",
    "mirrored": "TF MultiWorkerMirroredStrategy all-reduce",
}


def measure(num_bytes: int, repeats: int, references: list[str]) -> dict[str, list[float]]:
    """Run all sides in turn as one rank; returns GB/s of each round."""
    array = np.random.default_rng(runner.rank()).random(num_bytes // 4, dtype=np.float32)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ports = [int(each) for each in runner.allgather(listener.getsockname()[1])]
        ring = SocketRing(listener, ports[(runner.rank() + 1) % runner.size()])
    scratch = memoryview(bytearray(num_bytes))
    calls: dict[str, Callable[[], Any]] = {
        "ours": lambda: runner.allreduce(array, "sum"),
        "socket": lambda: ring.exchange(scratch, runner.size()),
    }
    if "mirrored" in references:
        servers = [int(each) for each in runner.allgather(free_port())]
        calls["mirrored"] = mirrored_allreduce(servers, runner.rank(), array)
    sides = ["ours", *references]
    found: dict[str, list[float]] = {side: [] for side in sides}
    for round_number in range(repeats + 1):
        turn = round_number % len(sides)
        for side in sides[turn:] + sides[:turn]:  # so that each comes after each other one
            call = calls[side]
            runner.barrier()
            began_s = time.perf_counter()
            call()
            slowest_s = float(runner.allreduce(time.perf_counter() - began_s, "max"))
            if round_number:  # the first is for warmth
                found[side].append(num_bytes / slowest_s / 1e9)
    ring.close()
    return found


def main() -> None:
    """Measure with 2 and 4 processes."""
    args = parse_arguments(__doc__, repeats=7)
    num_bytes = 1 << 20 if args.toy else MB << 20
    references = ["socket"] if args.toy else list(REFERENCES)  # the other starts TensorFlow twice
    for size in (2,) if args.toy else (2, 4):
        found = run_local(measure, (num_bytes, args.repeats, references), {}, size)[0]
        figure = Figure("P26", f"all-reduce of {MB} MB among {size} processes", "GB/s", "higher")
        for reference in references:
            report(figure, found["ours"], found[reference], REFERENCES[reference])


if __name__ == "__main__":
    main()
