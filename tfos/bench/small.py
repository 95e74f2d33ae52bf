"""What does a small request cost beside a bare ping-pong?

Figure: P05.
Method: 10,000 pulls of 4 KiB of parameters from one server process, loopback TCP; their median.
    The reference sends the same 4 KiB both ways over a raw socket. Rounds of both take turns.
Caveats: the reference sends 4 KiB in each direction, a pull sends a short request.
Bar: at most 3 times the ping-pong.
Last result: docs/guides/performance.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np

from ps.manifest.manifest import Add
from tfos.bench.dense import GROUP, manifest
from tfos.bench.harness import Bench, Figure, interleave, timed
from tfos.bench.reference.raw_socket import RawPeer
from tfos.bench.servers import served_for

NUM_BYTES = 4096
REPEATS = 10


def median_us(work: Callable[[], object], count: int) -> float:
    """Return the median of `count` single timings in microseconds.

    Args:
        work: one request.
        count: number of requests.
    """
    return statistics.median(timed(work) for _ in range(count)) * 1e6


def run(bench: Bench) -> None:
    """Measure P05."""
    repeats = bench.repeats(REPEATS)
    calls = 100 if bench.toy else 10_000 // repeats
    values = np.zeros(NUM_BYTES // 4, np.float32)
    data = memoryview(bytearray(NUM_BYTES))
    into = memoryview(bytearray(NUM_BYTES))
    with RawPeer(NUM_BYTES) as raw, served_for(bench) as client:
        client.seed(manifest(Add(), values.size), {GROUP: values})
        client.attach(timeout_s=60)

        def ours() -> float:
            return median_us(lambda: client.pull({GROUP: values}), calls)

        def reference() -> float:
            return median_us(lambda: raw.echo(data, into), calls)

        ours(), reference()
        seconds = interleave(repeats, ours, reference)
    figure = Figure("P05", "pull of 4 KiB, median, TCP", "us", "lower")
    bench.report(figure, seconds[0], seconds[1], "raw ping-pong of 4 KiB", calls_per_repeat=calls)
